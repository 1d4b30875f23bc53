"""What is wrong with shards, or worth knowing, as sentences for an operator: for the page and for `kvstore top`.

`docs/operations.md` says what to do about each. Plain data; any thread.
"""

from __future__ import annotations

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
_MANY_SLOW: Final = 10  # turns, before somebody should look: a busy machine has some
_MANY_MISSES: Final = 100  # in the time looked at, before it is said that nothing is found


class Message(msgspec.Struct, frozen=True):
    """One thing to know. bad: blocks are lost or not served. warning: somebody should look. note: as it should be."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class Seen:
    """One shard: what it is called, its state or why it does not answer, and what it counted lately."""

    name: str
    state: ShardInfo | str
    recent: Table
    restarted_s: float | None = None  # how long ago another process took its place; None: not lately


def messages(shards: Sequence[Seen], others: Iterable[Message] = (), when: str = "in the last minute") -> list[Message]:
    """-> what there is to say of the shards, and these others, the worst first. when: what `Seen.recent` is of."""
    found = [*_of_all(shards, when), *_of_each(shards, when), *others]
    return sorted(found, key=lambda message: _ORDER[message.severity])


def of_cluster(status: RegistrationStatus, reason: str) -> Iterator[Message]:
    """What there is to say of the node's membership. reason: why it is not registered; empty: it is."""
    if reason:
        yield Message("bad", f"The cluster: {reason}")
    elif not status.directory_up:
        yield Message(
            "warning",
            "etcd does not answer this node. The last list of members still holds; no node can join or leave.",
        )
    if status.state in ("joining", "draining"):
        drain, fill = status.drain, status.fill
        text = f"This node is {status.state}."
        if status.state == "draining" and drain is not None:
            text += f" {drain.done} of {drain.total} blocks are on other nodes."
        elif fill is not None:
            text += f" {fill.done} of {fill.total} blocks have been copied."
        yield Message("note", text)


def _of_all(shards: Sequence[Seen], when: str) -> Iterator[Message]:
    silent = [shard for shard in shards if isinstance(shard.state, str)]
    if silent and len(silent) == len(shards):
        yield Message("bad", "No shard answers: every block is a miss.")
    if any(isinstance(shard.state, ShardInfo) and shard.state.draining for shard in shards):
        yield Message("note", "The server is stopping: it finishes what has begun and takes no new blocks.")
    recent = total(shard.recent for shard in shards)
    evicted, from_disk = recent["evicted",], recent["disk", "evicted"]
    disks = [shard.state.disk for shard in shards if isinstance(shard.state, ShardInfo) and shard.state.disk]
    if from_disk:
        yield Message(
            "note", f"The disk is full: the oldest blocks are evicted, {from_disk:,} {when}. See --disk-size."
        )
    if evicted and any(disk.state == "on" for disk in disks):
        yield Message("note", f"Memory is full: blocks are evicted from it, {evicted:,} {when}.")
    elif evicted:
        yield Message(
            "note",
            f"Memory is full: the blocks of least use are evicted, {evicted:,} {when}. See --memory.",
        )
    if recent["misses",] >= _MANY_MISSES and not recent["hits",]:
        yield Message(
            "warning",
            f"None of the {recent['misses',]:,} blocks asked for {when} was here. After a deployment: "
            "do the engines still use the namespaces below?",
        )


def _of_each(shards: Sequence[Seen], when: str) -> Iterator[Message]:
    for shard in shards:
        state, name = shard.state, shard.name
        if isinstance(state, str):
            yield Message("bad", f"{name} does not answer: {state}. Its blocks are misses.")
            continue
        if shard.restarted_s is not None:
            yield Message(
                "warning",
                f"{name} died and was started anew {shard.restarted_s:.0f} s ago. What it had in memory are misses; "
                "the log says why.",
            )
        yield from _of_disk(name, state, shard.recent, when)
        for limit in sorted(state.refused):
            if refused := shard.recent.get(("refused", limit), 0):
                yield Message("warning", f"{name} refused requests at its limit {limit}: {refused:,} {when}.")
        if slow := below(shard.recent, "slow_turns"):
            times = "once" if slow == 1 else f"{slow:,} times"
            worst = max((key for key in shard.recent if key[0] == "slow_turns"), key=lambda key: shard.recent[key])[1]
            yield Message(
                "warning" if slow >= _MANY_SLOW else "note",
                f"{name} kept clients waiting for over 50 ms: {times} {when}, mostly in: {worst}.",
            )
        if state.transient_bytes > _NEARLY_FULL * state.transient_limit_bytes > 0:
            yield Message(
                "warning",
                f"{name}: the memory of transient blocks is full. Handed-on blocks are refused until others are read.",
            )


def _of_disk(name: str, state: ShardInfo, recent: Table, when: str) -> Iterator[Message]:
    disk = state.disk
    if disk is None:
        return
    if disk.state == "off":
        yield Message("bad", f"{name}: its disk tier is off: {disk.reason}. Its blocks on disk are misses.")
    elif disk.state == "recovering":
        yield Message("note", f"{name} reads the index of its disk. Until it has, blocks on disk are misses.")
    elif disk.warming:
        yield Message("note", f"{name} brings its hottest blocks from disk to memory.")
    if disk.behind:
        yield Message("warning", f"{name}: the disk is slower than the sets. Clients that set wait for it.")
    if damaged := recent.get(("disk", "corrupt_blocks"), 0):
        yield Message("bad", f"{name} found damaged blocks on its disk, and dropped them: {damaged:,} {when}.")
