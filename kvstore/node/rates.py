"""Computes the changes of a shard's counters between two polls, and sums of changes. The counters of `ShardInfo` are
put in one flat table.

`/status.json` and `kvstore top` compute their rates here. A table has an entry for each counter; its key is a tuple
that begins with the counter's name. A shard that was restarted counts from 0, so its whole table is the change. Plain
data; thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from kvstore.wire import DiskInfo, ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S, Field, fields_of

Key: TypeAlias = tuple[str, ...]
Table: TypeAlias = Mapping[Key, int]

NAMESPACE_COUNTERS: Final = ("hits", "misses", "created", "evicted")


def table_of(shard: ShardInfo) -> dict[Key, int]:
    """Return all counters of a shard that are not 0."""
    table = dict(_counters(shard))
    if shard.disk is not None:
        table.update({("disk", *key): count for key, count in _counters(shard.disk)})
    for row in shard.requests:
        table.update({("took", row.verb, row.tier, str(at)): count for at, count in enumerate(row.counts)})
    for namespace in shard.namespaces:
        for name in NAMESPACE_COUNTERS:
            table["namespace", namespace.id, name] = getattr(namespace, name)
    for tenant in shard.tenants:
        table["tenant", tenant.tenant, "refused"] = sum(tenant.refused.values())
    return {key: count for key, count in table.items() if count}


def _counters(info: ShardInfo | DiskInfo) -> Iterator[tuple[Key, int]]:
    for field in fields_of(type(info)):
        if field.counter:
            value = getattr(info, field.name)
            yield from (((field.name, key), value[key]) for key in value) if field.label else [((field.name,), value)]


def change(old: Table, new: Table) -> dict[Key, int]:
    """Return the change of each counter between two polls of one process. A counter that is no longer in `new` is left
    out."""
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}


def total(tables: Iterable[Table]) -> Counter[Key]:
    """Return the sum of tables."""
    found: Counter[Key] = Counter()
    for table in tables:
        found.update(table)
    return found


def below(table: Table, *key: str) -> int:
    """Return the sum of all entries that begin with `key`."""
    return sum(count for each, count in table.items() if each[: len(key)] == key)


def amount(field: Field, shards: Iterable[ShardInfo], counted: Table) -> float:
    """Return the value of a field to show for these shards: for a counter its value in the table `counted`, otherwise
    the current value."""
    if field.counter:
        return below(counted, field.name)
    values = [getattr(shard, field.name) for shard in shards]
    return sum(sum(value.values()) if field.label else value for value in values)


def hit_rate(hits: int, misses: int) -> float | None:
    """Return the share of the requested blocks that were present, or None if no block was requested."""
    return hits / (hits + misses) if hits + misses else None


def counts_of(table: Table, verb: str, tier: str) -> list[int]:
    """Return the histogram of the requests of one verb and tier, as `RequestTimes.counts`."""
    return [table.get(("took", verb, tier, str(at)), 0) for at in range(len(REQUEST_BOUNDS_S) + 1)]


def took_s(table: Table, verb: str, share: float) -> float | None:
    """Return the time within which the fraction `share` of a verb's requests ended, those that waited for the disk and
    the others. Return None if there are none."""
    memory, disk = (counts_of(table, verb, tier) for tier in ("memory", "disk"))
    return quantile_s([sum(both) for both in zip(memory, disk, strict=True)], share)


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the time within which the fraction `share` of a histogram's requests ended, interpolated within a bucket.
    Return None if there are no requests, and the last bound if the time is longer than that."""
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
