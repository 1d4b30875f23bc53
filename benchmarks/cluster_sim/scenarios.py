"""Scenarios: changes of a cluster while a trace is replayed, such as joins, leaves, crashes and restarts.

In all scenarios the change begins at the same time of the trace. So the minutes after it can be compared with the same
minutes of an unchanged cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from benchmarks.cluster_sim.cluster import Cluster
from benchmarks.eviction.traces import Trace

MINUTE_S: Final = 60.0
NOTICE_S: Final = 3.0  # the time until the list of members shows that a node is dead
DRAIN_S: Final = 60.0
FILL_S: Final = 15.0
FILLED_S: Final = 20.0  # the grace period if blocks are copied to the nodes that join
RESTART_DRAIN_S: Final = 30.0
RESTART_S: Final = 10.0
GRACE_S: Final = 300.0
GRACES_S: Final = (0.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
BATCHES: Final = 10  # the number of steps in a rolling restart

Action = Callable[[Cluster, float], object]


@dataclass(frozen=True)
class Change:
    """A change. At the time `at_s` of the trace, `act(cluster, at_s)` is called. Then all clients get the new view,
    unless the change is `unnoticed`."""

    at_s: float
    act: Action
    unnoticed: bool = False


@dataclass
class Outcome:
    """The results for each minute of the trace. `moved`: the share of keys whose owner changed, for each change of the
    view."""

    hits: list[int] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    repaired: int = 0  # the number of blocks that clients repaired
    copied: int = 0  # the number of blocks that nodes copied
    reads: list[int] = field(default_factory=list)  # the reads of each node

    @property
    def hit_rate(self) -> float:
        return sum(self.hits) / max(1, sum(self.references))


def replay(
    trace: Trace, cluster: Cluster, changes: Sequence[Change], progress: Callable[[int], object] = lambda done: None
) -> Outcome:
    """Replay every request in order, with the changes at their times. `progress` is called with the number of finished
    requests."""
    waiting = sorted(changes, key=lambda change: change.at_s)
    outcome = Outcome()
    for number, (chain, now_s) in enumerate(zip(trace.chains, trace.times_s, strict=True)):
        while waiting and waiting[0].at_s <= now_s:
            change = waiting.pop(0)
            cluster.advance(change.at_s)
            change.act(cluster, change.at_s)
            if not change.unnoticed:
                cluster.look_again()
        cluster.advance(now_s)
        minute = int(now_s // MINUTE_S)
        while len(outcome.hits) <= minute:
            outcome.hits.append(0)
            outcome.references.append(0)
        outcome.references[minute] += len(chain)
        if len(chain):
            outcome.hits[minute] += cluster.request(chain)
        if number % 500 == 499:
            progress(500)
    outcome.moved = cluster.moved[1:]
    outcome.repaired, outcome.copied = cluster.repaired, cluster.copied
    outcome.reads = [node.reads for node in cluster.nodes]
    return outcome


# ---- the scenarios: each gives its changes ---------------------------------------------------------------------------


def join(at_s: float, count: int = 1, grace_s: float = GRACE_S, fill_s: float = 0.0) -> list[Change]:
    """Empty nodes join. During the grace period, blocks are also read from their old owners. If `fill_s` is above 0,
    the old owners copy blocks to the new owners."""
    added: list[int] = []

    def begin(cluster: Cluster, _: float) -> None:
        added.extend(cluster.add("joining" if grace_s else "serving") for _ in range(count))

    changes = [Change(at_s, begin)]
    if fill_s:
        changes.append(Change(at_s, lambda cluster, now: cluster.fill(added, now, fill_s), unnoticed=True))
    if grace_s:
        changes.append(Change(at_s + grace_s, lambda cluster, _: cluster.set_state(added, "serving")))
    return changes


def leave(at_s: float, numbers: Sequence[int], drain_s: float = DRAIN_S) -> list[Change]:
    """Nodes leave. If `drain_s` is above 0, they first move their blocks to other nodes."""

    def end(cluster: Cluster, _: float) -> None:
        cluster.set_state(numbers, None)
        cluster.kill(numbers)

    if not drain_s:
        return [Change(at_s, end)]
    return [Change(at_s, lambda cluster, now: cluster.drain(numbers, now, drain_s)), Change(at_s + drain_s, end)]


def crash(at_s: float, numbers: Sequence[int]) -> list[Change]:
    """Nodes stop answering, and the other nodes notice it later."""
    return [
        Change(at_s, lambda cluster, _: cluster.kill(numbers), unnoticed=True),
        Change(at_s + NOTICE_S, lambda cluster, _: cluster.set_state(numbers, None)),
    ]


def rolling_restart(
    at_s: float, nodes: int, grace_s: float = GRACE_S, fill_s: float = 0.0, pause_s: float = MINUTE_S
) -> list[Change]:
    """Restart all nodes in turn, one node (or a tenth of them) every `pause_s` seconds. Each node is drained, stopped
    and brought back empty."""
    batches = min(BATCHES, nodes)
    changes = []
    for batch in range(batches):
        numbers, begin_s = range(batch, nodes, batches), at_s + batch * pause_s
        back_s = begin_s + RESTART_DRAIN_S + RESTART_S
        changes += leave(begin_s, numbers, RESTART_DRAIN_S)
        changes.append(Change(back_s, lambda cluster, _, numbers=numbers: cluster.restart(numbers)))  # type: ignore[misc]
        if fill_s:
            changes.append(
                Change(back_s, lambda cluster, now, numbers=numbers: cluster.fill(numbers, now, fill_s), unnoticed=True)  # type: ignore[misc]
            )
        changes.append(
            Change(back_s + grace_s, lambda cluster, _, numbers=numbers: cluster.set_state(numbers, "serving"))  # type: ignore[misc]
        )
    return changes


@dataclass(frozen=True)
class Scenario:
    """A scenario. `changes`: returns the changes for a given number of nodes and a given number of zones. `spares`: see
    `Cluster`."""

    changes: Callable[[float, int, int], list[Change]]
    spares: int = 0


STEADY: Final = "steady"
JOIN: Final = "join"
JOIN_AT_ONCE: Final = "join, no grace"
JOIN_FILLED: Final = "join, filled"
JOIN_MANY: Final = "3 in 10 join"
JOIN_MANY_FILLED: Final = "3 in 10 join, filled"
LEAVE: Final = "leave, drained"
LEAVE_AT_ONCE: Final = "leave, not drained"
CRASH: Final = "crash of a node"
CRASH_ZONE: Final = "crash of a zone"
RESTART: Final = "rolling restart"
RESTART_SPARE: Final = "rolling restart, one owner more asked"
RESTART_FILLED: Final = "rolling restart, filled"


def _many(nodes: int) -> int:
    return max(2, nodes * 3 // 10)


SCENARIOS: Final[dict[str, Scenario]] = {
    STEADY: Scenario(lambda at_s, nodes, zones: []),
    JOIN_AT_ONCE: Scenario(lambda at_s, nodes, zones: join(at_s, grace_s=0.0)),
    JOIN: Scenario(lambda at_s, nodes, zones: join(at_s)),
    JOIN_FILLED: Scenario(lambda at_s, nodes, zones: join(at_s, grace_s=FILLED_S, fill_s=FILL_S)),
    JOIN_MANY: Scenario(lambda at_s, nodes, zones: join(at_s, _many(nodes))),
    JOIN_MANY_FILLED: Scenario(lambda at_s, nodes, zones: join(at_s, _many(nodes), FILLED_S, FILL_S)),
    LEAVE_AT_ONCE: Scenario(lambda at_s, nodes, zones: leave(at_s, [0], 0.0)),
    LEAVE: Scenario(lambda at_s, nodes, zones: leave(at_s, [0])),
    CRASH: Scenario(lambda at_s, nodes, zones: crash(at_s, [0])),
    CRASH_ZONE: Scenario(lambda at_s, nodes, zones: crash(at_s, range(0, nodes, zones))),
    RESTART: Scenario(lambda at_s, nodes, zones: rolling_restart(at_s, nodes)),
    RESTART_SPARE: Scenario(lambda at_s, nodes, zones: rolling_restart(at_s, nodes), spares=1),
    RESTART_FILLED: Scenario(lambda at_s, nodes, zones: rolling_restart(at_s, nodes, FILLED_S, FILL_S)),
}


class Drop(NamedTuple):
    """The largest drops of the hit rate, as shares, compared with the same minutes without the change."""

    minute: float
    five_minutes: float


def drop(outcome: Outcome, steady: Outcome, at_s: float) -> Drop:
    """Return the drop between the change and the end of the trace."""
    first = int(at_s // MINUTE_S)
    found = []
    for width in (1, 5):
        starts = range(first, max(first + 1, len(outcome.hits) - width + 1))
        lost = (sum(steady.hits[start : start + width]) - sum(outcome.hits[start : start + width]) for start in starts)
        asked = (sum(outcome.references[start : start + width]) for start in starts)
        found.append(max([0.0, *(less / max(1, total) for less, total in zip(lost, asked, strict=True))]))
    return Drop(*found)
