"""The members of a cluster: the records that nodes register and that clients read.

A `Membership` is the list of members at one epoch. An epoch is a revision of etcd or a count of changes. Servers and
clients with the same list compute the same owners, so they need not agree on anything else. Plain data; thread-safe.

A node's state determines in which of two placements it takes part:

* *new*: members that join or serve. Blocks are set on these nodes, and reads try these nodes first;
* *old*: members that serve or drain. These nodes may still hold blocks that now have another owner.

So while a node joins, clients can read the blocks that this node lacks from the previous owners. A node that drains
still answers for blocks that the other nodes lack. If all members serve, the two placements are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvstore.wire import ShardAddress

# A host name or an IP address.
_HOST: Final = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9A-Fa-f:.]+(%\w+)?", re.ASCII)
MAX_MEMBER_BYTES: Final = 64 * 1024  # the most bytes of a node's record in the directory

State = Literal["joining", "serving", "draining"]


class MemberError(Exception):
    """A record does not describe a valid member; the message says why."""


class DirectoryError(Exception):
    """The members cannot be read or written; the message says why."""


class PackageMissing(DirectoryError, ImportError):
    """A package that the directory needs is not installed; the message says how to install it."""


class Member(msgspec.Struct, frozen=True):
    """One node."""

    node: str  # its id, unique in the cluster and the same after a restart
    state: State
    shards: list[ShardAddress]  # each with a host; its weight is the bytes of its block memory
    zone: str = ""  # nodes of one zone fail together; replicas go to different zones
    version: str = ""
    instance: str = ""  # a new one at every start of the node
    started: float = 0.0  # unix seconds, for people
    metrics: str = ""  # HOST:PORT of the node's metrics; empty if it serves none
    cookie: str = ""  # other nodes present it to this node: see `kvstore.shard.connection_limits`

    @property
    def is_new_owner(self) -> bool:
        """Whether blocks are set on this node."""
        return self.state != "draining"

    @property
    def is_old_owner(self) -> bool:
        """Whether this node may hold blocks that their new owners do not have yet."""
        return self.state != "joining"


class Membership(msgspec.Struct, frozen=True):
    """All members at one epoch, sorted by node id."""

    epoch: int
    members: Sequence[Member]


_member_decoder = msgspec.json.Decoder(Member)


def encode_member(member: Member) -> bytes:
    """Return the record of a member, as JSON."""
    return msgspec.json.encode(member)


def decode_member(record: bytes) -> Member:
    """Return the member that a record describes. Raises `MemberError` when the record is not valid."""
    if len(record) > MAX_MEMBER_BYTES:
        raise MemberError(f"the record has {len(record)} bytes: expected at most {MAX_MEMBER_BYTES}")
    try:
        member = _member_decoder.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MemberError(f"the record is not the JSON of a member: {error}") from None
    check_member(member)
    return member


def check_member(member: Member) -> None:
    """Raise `MemberError` unless the member has an id, and its shards have distinct names, distinct addresses and
    weights > 0."""
    if not member.node:
        raise MemberError("the node id is empty")
    if not member.shards:
        raise MemberError(f"node {member.node!r} has no shards: expected at least 1")
    for shard in member.shards:
        address = _HOST.fullmatch(shard.host) and 0 < shard.port < 1 << 16
        if not (shard.name and address and 0 < shard.weight < math.inf):
            raise MemberError(
                f"node {member.node!r} has shard {shard.name!r} at host {shard.host!r}, port {shard.port}, with weight "
                f"{shard.weight}: expected a name, a host name or address, a port from 1 to 65535, a finite weight > 0"
            )
    if len({shard.name for shard in member.shards}) < len(member.shards):
        raise MemberError(f"node {member.node!r} has two shards with the same name")
