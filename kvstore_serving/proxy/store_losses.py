"""What a store has lost, from what its shards say of themselves: since when what it was given may be believed there.

Pure: the caller asks the shards and tells the time, of `time.monotonic`. A shard that was restarted, purged, emptied,
or has gone has lost all of its blocks. Of one that evicts, what counts is the share that it lost: blocks that were
there before a tenth of a shard's blocks went are not believed in any more, since a prompt is spread over all shards and
ends at its first block that is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.wire.status import NamespaceInfo, ShardInfo

_LOST: Final = 0.1  # of a shard's blocks
_REMEMBERED: Final = 10_000  # looks
_CLOCKS_S: Final = 1.0  # by which two looks at one start may differ
_GONE: Final = 2  # looks without an answer


@dataclass(frozen=True)
class _Seen:
    """A shard at one look. started: not before, not after. missing: how many looks it has not answered since."""

    info: ShardInfo
    started: tuple[float, float]
    missing: int = 0

    @property
    def name(self) -> str:
        return self.info.name or f"{self.info.node}/{self.info.shard}"


class StoreLosses:
    """One thread. since: nothing that the store was given before is believed there. purged_at: the last purge that the
    whole store had. why: of the last loss that was one of everything."""

    def __init__(self) -> None:
        self.since = 0.0
        self.purged_at = 0.0
        self.why = ""
        self._shards: dict[str, _Seen] = {}
        self._shares: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # when, the share lost up to then

    def look(self, shards: Sequence[ShardInfo], asked: float, answered: float) -> bool:
        """Take in what all shards that answer have said. -> whether a shard has lost everything."""
        share, why = 0.0, ""
        here = [_Seen(shard, (asked - shard.uptime_s, answered - shard.uptime_s)) for shard in shards]
        for now in here:
            before = self._shards.get(now.name)
            self._shards[now.name] = now
            if before is None:
                continue
            if now.info.generation > before.info.generation:
                self.purged_at = answered
            reason = _lost_all(before, now)
            share = max(share, 1.0 if reason else _lost(before.info, now.info))
            why = f"{now.name} {reason}" if reason else why
        for name in self._shards.keys() - {each.name for each in here}:
            seen = self._shards[name]
            self._shards[name] = replace(seen, missing=seen.missing + 1)
            if seen.missing + 1 == _GONE:
                del self._shards[name]
                share, why = 1.0, f"{name} has gone"
        if share:
            self._note(share, answered)
        self.why = why or self.why
        return bool(why)

    def _note(self, share: float, now: float) -> None:
        """Whatever was there before `now` has seen this loss, and those after it."""
        self._shares.append((now, share))
        total = 0.0
        for at, each in reversed(self._shares):
            total += each
            if total >= _LOST:
                self.since = max(self.since, at)
                break


def _lost_all(before: _Seen, now: _Seen) -> str:
    """-> why nothing is there any more that was; empty: it may be."""
    if now.info.pid != before.info.pid or now.started[0] > before.started[1] + _CLOCKS_S:
        return "was restarted"
    if now.info.generation > before.info.generation:
        return "was purged"
    if _blocks(before.info) and not _blocks(now.info):
        return "was emptied"
    return ""


def _blocks(shard: ShardInfo) -> int:
    return sum(each.blocks + each.disk_blocks for each in shard.namespaces)


def _lost(before: ShardInfo, now: ShardInfo) -> float:
    """-> the share of its blocks that a shard has lost: evicted, deleted, or expired."""
    there, left = _blocks(before), {each.id: each for each in now.namespaces}
    lost = sum(_lost_of(each, left.get(each.id)) for each in before.namespaces)
    return min(1.0, lost / there) if there else 0.0


def _lost_of(before: NamespaceInfo, now: NamespaceInfo | None) -> int:
    """-> how many blocks of a namespace there were and are not any more, in memory or, if it has one, on disk."""
    if now is None:
        return before.blocks + before.disk_blocks
    if before.disk_blocks or now.disk_blocks:
        return max(0, now.disk_evicted - before.disk_evicted, before.disk_blocks - now.disk_blocks)
    return max(0, now.evicted - before.evicted, before.blocks + now.created - before.created - now.blocks)
