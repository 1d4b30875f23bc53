"""Describes problems of shards, and other facts worth knowing, in sentences for an operator. The HTTP page and `kvstore
top` show them.

`docs/troubleshooting.md` says what to do about each problem. Plain data; thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from kvstore.node.rates import Table, below, total
from kvstore.wire import ShardInfo

if TYPE_CHECKING:
    from kvstore.node.health import RegistrationStatus

Severity: TypeAlias = Literal["bad", "warning", "note"]
_ORDER: Final[dict[Severity, int]] = {"bad": 0, "warning": 1, "note": 2}
_NEARLY_FULL: Final = 0.9
# What a stage of the shard's loop does, and the usual reason why it is slow.
_SLOW_STAGE: Final[dict[str, str]] = {
    "events": "It reads what clients send; the processor is probably busy with other work.",
    "requests": "It serves small requests; the processor is probably busy, or clients send many at once.",
    "background": "It removes or lists many blocks, as in a purge or while blocks move.",
    "disk": "It waits for the disk: compare its load and its speed.",
    "replies": "It sends blocks to clients; the processor is probably busy with other work.",
    "transport": "It serves reads through a transport.",
    "housekeeping": "It counts, and gives memory back; the processor is probably busy with other work.",
}
_MANY_SLOW: Final = 10  # from this many slow turns on, an operator should check; a busy machine has some
_MANY_MISSES: Final = 100  # from this many misses on, a finding says that no block was found


class Finding(msgspec.Struct, frozen=True):
    """One finding. Its severity is "bad" if blocks are lost or not served, "warning" if an operator should check
    something, and "note" for the normal state."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class Seen:
    """One shard: its name, its state or the reason why it does not answer, and its recent counts."""

    name: str
    state: ShardInfo | str
    recent: Table
    restarted_s: float | None = None  # seconds since another process took its place; None if not recently


def findings(shards: Sequence[Seen], others: Iterable[Finding] = (), when: str = "in the last minute") -> list[Finding]:
    """Return all findings about the shards together with `others`, the worst first. `when`: the period of
    `Seen.recent`, in words."""
    found = [*_of_all(shards, when), *_of_each(shards, when), *others]
    return sorted(found, key=lambda message: _ORDER[message.severity])


def of_cluster(status: RegistrationStatus, reason: str) -> Iterator[Finding]:
    """Yield findings about the node's membership. `reason`: why the node is not registered; empty if it is."""
    if reason:
        yield Finding("bad", f"The cluster: {reason}")
    elif not status.directory_up:
        yield Finding(
            "warning",
            "etcd does not answer this node. The last list of members stays in use; no node can join or leave.",
        )
    drain, filling = status.drain, status.filling
    if status.state == "joining":
        yield Finding("note", "This node is joining: the other nodes copy its blocks to it.")
    elif status.state == "draining":
        moved = f" {drain.done:,} of {drain.total:,} blocks are on other nodes." if drain is not None else ""
        yield Finding("note", f"This node is draining.{moved}")
    if filling is not None:
        done, left_s = filling.report, filling.left_s(time.monotonic())
        left = "" if left_s is None else f", which takes about {left_s:.0f} s more"
        yield Finding("note", f"{done.done:,} of {done.total:,} blocks are copied to {filling.nodes}{left}.")


def _at_quota(shards: Iterable[Seen]) -> list[str]:
    """Return the tenants that may take no more memory of a shard because of their quota, by name."""
    states = [shard.state for shard in shards if isinstance(shard.state, ShardInfo)]
    return sorted(
        {
            tenant.tenant
            for state in states
            for tenant in state.tenants
            if 0 <= tenant.memory_limit_bytes < tenant.memory_bytes + state.segment_bytes
        }
    )


def _of_all(shards: Sequence[Seen], when: str) -> Iterator[Finding]:
    silent = [shard for shard in shards if isinstance(shard.state, str)]
    if silent and len(silent) == len(shards):
        yield Finding("bad", "No shard answers: every block is a miss.")
    if any(isinstance(shard.state, ShardInfo) and shard.state.draining for shard in shards):
        yield Finding("note", "The server is stopping: it finishes what has begun, and accepts no new blocks.")
    recent = total(shard.recent for shard in shards)
    evicted, from_disk = recent["evicted",], recent["disk", "evicted"]
    disks = [shard.state.disk for shard in shards if isinstance(shard.state, ShardInfo) and shard.state.disk]
    if from_disk:
        yield Finding(
            "note", f"The disk is full: the oldest blocks are evicted, {from_disk:,} {when}. See --disk-size."
        )
    limited = _at_quota(shards)
    cause = f" Tenants at their memory quota, which evict their own blocks: {', '.join(limited)}." if limited else ""
    if evicted and limited and all(isinstance(shard.state, str) or shard.state.room_bytes for shard in shards):
        yield Finding("note", f"Memory has room, but blocks are evicted, {evicted:,} {when}.{cause}")
    elif evicted and any(disk.state == "on" for disk in disks):
        yield Finding("note", f"Memory is full: blocks are evicted from it, {evicted:,} {when}.{cause}")
    elif evicted:
        yield Finding(
            "note",
            f"Memory is full: the least useful blocks are evicted, {evicted:,} {when}. See --memory.{cause}",
        )
    if slow := below(recent, "slow_requests"):
        stages = [key for key in recent if key[0] == "slow_requests"]
        most = max(stages, key=lambda key: recent[key])[1]
        yield Finding(
            "note", f"Slow requests: {slow:,} {when}, mostly in: {most}. `kvstore slowlog` shows the last ones."
        )
    if recent["misses",] >= _MANY_MISSES and not recent["hits",]:
        yield Finding(
            "warning",
            f"None of the {recent['misses',]:,} blocks requested {when} was found. After a deployment: "
            "do the engines still use the namespaces below?",
        )


def _of_each(shards: Sequence[Seen], when: str) -> Iterator[Finding]:
    for shard in shards:
        state, name = shard.state, shard.name
        if isinstance(state, str):
            yield Finding("bad", f"{name} does not answer: {state}. Its blocks are misses.")
            continue
        if shard.restarted_s is not None:
            yield Finding(
                "warning",
                f"{name} died and was restarted {shard.restarted_s:.0f} s ago. Its blocks in memory were lost; "
                "the log says why it died.",
            )
        yield from _of_disk(name, state, shard.recent, when)
        for limit in sorted(state.refused):
            if refused := shard.recent.get(("refused", limit), 0):
                yield Finding("warning", f"{name} refused requests at its limit {limit}: {refused:,} {when}.")
        if slow := below(shard.recent, "slow_turns"):
            times = "once" if slow == 1 else f"{slow:,} times"
            worst = max((key for key in shard.recent if key[0] == "slow_turns"), key=lambda key: shard.recent[key])[1]
            yield Finding(
                "warning" if slow >= _MANY_SLOW else "note",
                f"{name} kept clients waiting for over 50 ms: {times} {when}, mostly in: {worst}. {_SLOW_STAGE[worst]}",
            )
        if state.transient_bytes > _NEARLY_FULL * state.transient_limit_bytes > 0:
            yield Finding(
                "warning",
                f"{name}: the memory of transient blocks is full. New ones are refused until others have been read.",
            )


def _of_disk(name: str, state: ShardInfo, recent: Table, when: str) -> Iterator[Finding]:
    disk = state.disk
    if disk is None:
        return
    if disk.state == "off":
        yield Finding("bad", f"{name}: its disk tier is off: {disk.reason}. Its blocks on disk are misses.")
    elif disk.state == "out of space":
        yield Finding(
            "warning",
            f"{name}: its disk tier is out of space: {disk.reason}. No blocks are written to it until there is room.",
        )
    elif disk.state == "recovering":
        yield Finding("note", f"{name} reads the index of its disk. Until that ends, blocks on disk are misses.")
    elif disk.warming:
        yield Finding("note", f"{name} loads its hottest blocks from disk into memory.")
    if disk.behind:
        yield Finding("warning", f"{name}: the disk is slower than the sets. Clients that set blocks wait for it.")
    if damaged := recent.get(("disk", "corrupt_blocks"), 0):
        yield Finding("bad", f"{name} found damaged blocks on its disk, and dropped them: {damaged:,} {when}.")
