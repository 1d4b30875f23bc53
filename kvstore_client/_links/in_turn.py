"""Shards on this host that move blocks in turn, so that they do not fight for the same cores.

A client that reads or sends keeps one core busy, and each shard at the other end another one. If there are more of them
than cores, they take turns anyway, at the scheduler's choice: on two cores, reads from two shards at once took 1.2 to
1.3 times as long as from one. So a client moves blocks to or from no more shards of its own host at a time than there
are cores beside its own. A shard that is silent keeps the others waiting for `SILENT_S` only. Shards on other hosts,
and those whose memory the client reads, do not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore_client._links.link import Link

AT_A_TIME: Final = max(
    1, len(os.sched_getaffinity(0)) - 1
)  # shards on this host to or from which one client moves blocks
SILENT_S: Final = 0.02

_T = TypeVar("_T")


def in_turn(items: Sequence[_T], link_of: Callable[[_T], Link]) -> list[Sequence[_T]]:
    """-> calls, or whatever is moved over the links that `link_of` tells, in groups of which one begins when the one
    before it has ended. At least one group."""
    links = dict.fromkeys(map(link_of, items))
    here = [link for link in links if link.on_this_host and not link.by_reference]
    if len(here) <= AT_A_TIME:
        return [items]
    group_of = {link: number // AT_A_TIME for number, link in enumerate(here)}
    groups: list[list[_T]] = [[] for _ in range(group_of[here[-1]] + 1)]
    for item in items:
        groups[group_of.get(link_of(item), 0)].append(item)
    return list(groups)
