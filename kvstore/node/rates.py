"""What changed in a shard between two looks at it: counters of `ShardInfo` as one flat table, and sums of changes.

`/status.json` and `kvstore top` compute their rates here. A table has an entry for each counter: a tuple that begins
with what it counts. A shard that was started again counts from 0, so its whole table is the change. Plain data; any
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvstore.wire import ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S

Key: TypeAlias = tuple[str, ...]
Table: TypeAlias = Mapping[Key, int]

OF_SHARD: Final = ("hits", "misses", "created", "evicted", "bytes_in", "bytes_out", "sets", "gets", "lookups", "errors")
OF_DISK: Final = ("evicted", "written_bytes", "fetched_bytes", "fetched_blocks", "corrupt_blocks")


def table_of(shard: ShardInfo) -> dict[Key, int]:
    """-> every counter of a shard that is not 0."""
    table: dict[Key, int] = {(name,): getattr(shard, name) for name in OF_SHARD}
    if shard.disk is not None:
        table.update({("disk", name): getattr(shard.disk, name) for name in OF_DISK})
    table.update({("slow", stage): turns for stage, turns in shard.slow_turns.items()})
    table.update({("refused", limit): requests for limit, requests in shard.refused.items()})
    for row in shard.requests:
        table.update({("took", row.verb, row.tier, str(at)): count for at, count in enumerate(row.counts)})
    for namespace in shard.namespaces:
        table["namespace", namespace.id, "hits"] = namespace.hits
        table["namespace", namespace.id, "misses"] = namespace.misses
    return {key: count for key, count in table.items() if count}


def change(old: Table, new: Table) -> dict[Key, int]:
    """-> what was counted between two looks at one process. What is not in `new` any more counts nothing."""
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}


def total(tables: Iterable[Table]) -> Counter[Key]:
    """-> the sum of tables."""
    found: Counter[Key] = Counter()
    for table in tables:
        found.update(table)
    return found


def below(table: Table, *key: str) -> int:
    """-> the sum of all entries that begin with `key`."""
    return sum(count for each, count in table.items() if each[: len(key)] == key)


def hit_rate(hits: int, misses: int) -> float | None:
    """-> the share of blocks asked for that were there; None when none was asked for."""
    return hits / (hits + misses) if hits + misses else None


def counts_of(table: Table, verb: str, tier: str) -> list[int]:
    """-> the histogram of the requests of one verb and tier, as `RequestTimes.counts`."""
    return [table.get(("took", verb, tier, str(at)), 0) for at in range(len(REQUEST_BOUNDS_S) + 1)]


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """-> the time that so large a share of the requests of a histogram did not exceed, within the bucket's bounds: by
    proportion. None when it has none; the last bound when it lies above it."""
    rank = share * sum(counts)
    if not rank:
        return None
    low = 0.0
    for count, bound in zip(counts, REQUEST_BOUNDS_S, strict=False):
        if count >= rank:
            return low + (bound - low) * rank / count
        rank -= count
        low = bound
    return low
