"""Reads shards on this host in turn, so that they do not compete for the same cores.

A client that reads keeps one core busy, and each shard that sends keeps another one busy. If there are more of them
than cores, the scheduler switches between them. On two cores, reads from two shards at once took 1.2 to 1.3 times as
long as reads from one. So the client keeps one core for itself. For each other core, it reads from at most one shard of
its host at a time. A turn lasts at most `turn_s`, which is computed for the slowest shard that is expected on this
host. After that time, requests are sent to all other shards, so that a slower shard does not delay them further.

Only TCP connections that are up and free take turns. If the client reads the shards' memory, no shard sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvstore.wire.dealer import GetAnswer
from kvstore_client._links.call import Call
from kvstore_client._links.link import Link

SHARDS_AT_A_TIME: Final = max(1, (os.cpu_count() or 1) - 1)  # how many shards on this host send to a client at a time
SHORTEST_TURN_S: Final = 0.02
LEAST_BYTES_PER_S: Final = 1e9  # a shard on this host that sends more slowly exceeds its turn
NEARLY_BYTES: Final = 4 << 20  # a turn ends when only this much is missing, because the next shard needs time


def in_turn(calls: Sequence[Call]) -> list[Sequence[Call]]:
    """Return the GETs in at least one group. The groups are to be sent one after the other."""
    links = dict.fromkeys(call.link for call in calls)
    if any(link.by_reference for link in links):
        return [calls]
    # This is checked only once, because other threads may start to use the links meanwhile.
    free = {link for link in links if link.sock is not None and link.sending.owner is None}
    shards = {link: link.first for link in links if link in free and link.on_this_host}
    here = dict.fromkeys(shards.values())
    if len(here) <= SHARDS_AT_A_TIME:
        return [calls]
    turns = {first: number // SHARDS_AT_A_TIME for number, first in enumerate(here)}
    groups: list[list[Call]] = [[] for _ in range(max(turns.values()) + 1)]
    for call in calls:
        link = call.link
        if link in shards:
            groups[turns[shards[link]]].append(call)
        else:  # shards elsewhere go first; links that are down or in use go last, so that they delay no other
            groups[0 if link in free else -1].append(call)
    return list(groups)


class Turn:
    """The turn of one group. It is made before the group is sent."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = [call for call in calls if call.link.on_this_host]
        self._expected: dict[Link, int] = {}  # the `link.received` at which nearly all blocks have arrived
        nbytes = 0
        for call in self._calls:
            blocks = call.count * call.answer.block_bytes if isinstance(call.answer, GetAnswer) else 0
            self._expected.setdefault(call.link, call.link.received - NEARLY_BYTES)
            self._expected[call.link] += blocks
            nbytes += blocks
        self.turn_s = SHORTEST_TURN_S + nbytes / LEAST_BYTES_PER_S

    def over(self) -> bool:
        """Return whether nearly all blocks have arrived, or no more will come."""
        return all(call.done or call.link.received >= self._expected[call.link] for call in self._calls)
