"""What a node tells of its membership in a cluster. Plain data, for metrics and health checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cluster.etcd import Drain
from kvstore.cluster.members import Member
from kvstore.moving.progress import MoveReport


@dataclass(frozen=True)
class RegistrationStatus:
    """The state of a node's membership, for metrics and health checks."""

    registered: bool
    state: str  # of the node; "out": it has left, and joins again only after a restart
    epoch: int  # of the last view
    nodes: Sequence[Member]  # of the last view
    directory_up: bool
    directory_errors: int
    changes: int  # of the view
    drain: Drain | None = None
    fill: MoveReport | None = None  # the present or the last fill of nodes that joined
