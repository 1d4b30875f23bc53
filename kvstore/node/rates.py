"""What changed in a shard between two looks at it: counters of `ShardInfo` as one flat table, and sums of changes.

`/status.json` and `kvstore top` compute their rates here. A table has an entry for each counter: a tuple that begins
with what it counts. A shard that was started again counts from 0, so its whole table is the change. Plain data; any
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from kvstore.wire import DiskInfo, ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S, Field, fields_of

Key: TypeAlias = tuple[str, ...]
Table: TypeAlias = Mapping[Key, int]


def table_of(shard: ShardInfo) -> dict[Key, int]:
    """-> every counter of a shard that is not 0."""
    table = dict(_counters(shard))
    if shard.disk is not None:
        table.update({("disk", *key): count for key, count in _counters(shard.disk)})
    for row in shard.requests:
        table.update({("took", row.verb, row.tier, str(at)): count for at, count in enumerate(row.counts)})
    for namespace in shard.namespaces:
        table["namespace", namespace.id, "hits"] = namespace.hits
        table["namespace", namespace.id, "misses"] = namespace.misses
    return {key: count for key, count in table.items() if count}


def _counters(info: ShardInfo | DiskInfo) -> Iterator[tuple[Key, int]]:
    for field in fields_of(type(info)):
        if field.counter:
            value = getattr(info, field.name)
            yield from (((field.name, key), value[key]) for key in value) if field.label else [((field.name,), value)]


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


def amount(field: Field, shards: Iterable[ShardInfo], counted: Table) -> float:
    """-> what to show of a field of these shards: of a counter what is in the table, otherwise what they have now."""
    if field.counter:
        return below(counted, field.name)
    values = [getattr(shard, field.name) for shard in shards]
    return sum(sum(value.values()) if field.label else value for value in values)


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
