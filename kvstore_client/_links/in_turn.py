"""Shards on this host that are read in turn, so that they do not fight for the same cores.

A client that reads keeps one core busy, and each shard that sends another one. If there are more of them than cores,
they take turns anyway, at the scheduler's choice: on two cores, reads from two shards at once took 1.2 to 1.3 times as
long as from one. So no more shards of the client's host are asked for blocks at a time than there are cores beside the
client's. A turn lasts as long as a shard on this host needs at the slowest (`turn_s`): one that is slower, whatever it
waits for, costs the others no more, and then all are asked.

In turn are only connections that are up and free over TCP. Where the client reads a shard's memory, no shard sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvstore.wire.dealer import GetAnswer
from kvstore_client._links.call import Call
from kvstore_client._links.link import Link

AT_A_TIME: Final = max(1, (os.cpu_count() or 1) - 1)  # shards on this host that send to one client
SHORTEST_TURN_S: Final = 0.02
LEAST_BYTES_PER_S: Final = 1e9  # a shard on this host that sends less takes longer than its turn
NEARLY_BYTES: Final = 4 << 20  # before the last block: the next shard takes as long to send its first ones


def in_turn(calls: Sequence[Call]) -> list[Sequence[Call]]:
    """-> the GETs, in groups that are to be sent one after the other; at least one group."""
    links = dict.fromkeys(call.link for call in calls)
    if any(link.by_reference for link in links):
        return [calls]
    # Looked at once: other threads may use the links meanwhile.
    free = {link for link in links if link.sock is not None and link.sending.owner is None}
    shards = {link: link.first for link in links if link in free and link.on_this_host}
    here = dict.fromkeys(shards.values())
    if len(here) <= AT_A_TIME:
        return [calls]
    turns = {first: number // AT_A_TIME for number, first in enumerate(here)}
    groups: list[list[Call]] = [[] for _ in range(max(turns.values()) + 1)]
    for call in calls:
        link = call.link
        if link in shards:
            groups[turns[shards[link]]].append(call)
        else:  # shards elsewhere wait for nobody; nobody waits for a connection that is to be made, or that others use
            groups[0 if link in free else -1].append(call)
    return list(groups)


class Turn:
    """The turn of one group. Made before it is sent."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = [call for call in calls if call.link.on_this_host]
        self._expected: dict[Link, int] = {}  # bytes received on it when the blocks are nearly there
        nbytes = 0
        for call in self._calls:
            blocks = call.count * call.answer.block_bytes if isinstance(call.answer, GetAnswer) else 0
            self._expected.setdefault(call.link, call.link.received - NEARLY_BYTES)
            self._expected[call.link] += blocks
            nbytes += blocks
        self.turn_s = SHORTEST_TURN_S + nbytes / LEAST_BYTES_PER_S

    def over(self) -> bool:
        """Whether the blocks are nearly there, or will not come."""
        return all(call.done or call.link.received >= self._expected[call.link] for call in self._calls)
