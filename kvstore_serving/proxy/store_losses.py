"""What a store has lost, according to its shards, and since when its blocks may be assumed to be there.

Pure: the caller asks the shards and passes the time from `time.monotonic`. A shard that was restarted, purged or
emptied, or that is gone, has lost all of its blocks. For a shard that evicts, the share of lost blocks is added up.
Once a shard has lost a tenth of its blocks, all older blocks are assumed to be lost. The reason is that a prompt is
spread over all shards and ends at its first missing block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.wire.status import NamespaceInfo, ShardInfo

_LOST: Final = 0.1  # share of a shard's blocks; when losses add up to it, all older blocks count as lost
_REMEMBERED: Final = 10_000  # the most losses that are remembered
_CLOCKS_S: Final = 1.0  # seconds by which two reports of the same start may differ
_GONE: Final = 2  # a shard missing in this many reports in a row is gone


@dataclass(frozen=True)
class _Seen:
    """A shard in one report.

    started: the earliest and the latest time at which it can have started
    missing: the number of later reports in which the shard did not answer
    """

    info: ShardInfo
    started: tuple[float, float]
    missing: int = 0

    @property
    def name(self) -> str:
        return self.info.name or f"{self.info.node}/{self.info.shard}"


class StoreLosses:
    """The losses of a store. Used by one thread.

    since: the time before which all blocks that the store got are assumed to be lost
    purged_at: the last purge of the whole store
    why: the reason for the last loss of all blocks of a shard
    """

    def __init__(self) -> None:
        self.since = 0.0
        self.purged_at = 0.0
        self.why = ""
        self._shards: dict[str, _Seen] = {}
        self._shares: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # the time and the share of each loss

    def look(self, shards: Sequence[ShardInfo], asked: float, answered: float) -> bool:
        """Compare the reports of all shards that answer with their last reports. Returns whether a shard has lost all
        its blocks."""
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
        """Note that this share of all blocks from before `now` is lost, in addition to earlier losses."""
        self._shares.append((now, share))
        total = 0.0
        for at, each in reversed(self._shares):
            total += each
            if total >= _LOST:
                self.since = max(self.since, at)
                break


def _lost_all(before: _Seen, now: _Seen) -> str:
    """Return why a shard has lost all its blocks, or an empty string if it may still have some."""
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
    """Return the share of its blocks that a shard has lost by eviction, deletion or expiry."""
    there, left = _blocks(before), {each.id: each for each in now.namespaces}
    lost = sum(_lost_of(each, left.get(each.id)) for each in before.namespaces)
    return min(1.0, lost / there) if there else 0.0


def _lost_of(before: NamespaceInfo, now: NamespaceInfo | None) -> int:
    """Return how many blocks of a namespace were lost between the two reports. The blocks on disk are counted if the
    namespace has a disk, otherwise those in memory."""
    if now is None:
        return before.blocks + before.disk_blocks
    if before.disk_blocks or now.disk_blocks:
        return max(0, now.disk_evicted - before.disk_evicted, before.disk_blocks - now.disk_blocks)
    return max(0, now.evicted - before.evicted, before.blocks + now.created - before.created - now.blocks)
