"""Where engines go: so many of each kind, each of some tensor and pipeline degree, on the nodes of pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvstore_serving.planning.fleet import Pool


class Shape(msgspec.Struct, frozen=True, order=True):
    """The degrees of an engine: tensor parallel (within a node) and pipeline parallel."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp


class Engines(msgspec.Struct, frozen=True):
    """Engines of one phase: so many instances of one shape, on the pool with this number."""

    shape: Shape
    instances: int
    pool: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.shape.gpus * self.instances


class Placement(msgspec.Struct, frozen=True):
    """Engines of the phases: `prefill` and `decode`, or only `colocated` ones, which do both."""

    prefill: Engines | None = None
    decode: Engines | None = None
    colocated: Engines | None = None

    @property
    def named(self) -> dict[str, Engines]:
        """The engines there are, by phase."""
        every = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {phase: engines for phase, engines in every.items() if engines is not None}

    @property
    def phases(self) -> list[Engines]:
        """The engines there are."""
        return list(self.named.values())

    def with_instances(self, phase: str, instances: int) -> Placement:
        """The same with another number of engines of a phase."""
        engines = msgspec.structs.replace(self.named[phase], instances=instances)
        return msgspec.structs.replace(self, **{phase: engines})

    @property
    def gpus(self) -> int:
        """GPUs of all phases."""
        return sum(engines.gpus for engines in self.phases)

    def price(self, pools: Sequence[Pool]) -> float:
        """The price of an hour."""
        return sum(engines.gpus * pools[engines.pool].price for engines in self.phases)


class Seat(msgspec.Struct, frozen=True):
    """Where a stage of an engine is: the node, numbered through all pools from 0, and the GPUs on it, from 0."""

    node: int
    gpus: list[int]


def nodes_of(placement: Placement, pools: Sequence[Pool], together: bool = False) -> list[list[list[int]]] | None:
    """-> for each phase, for each instance, the node of each stage; nodes are numbered through all pools. None: the
    instances do not fit. A stage is on one node, because its GPUs exchange what they compute in every layer.

    together: groups of engines of both phases have nodes of their own, if there are enough; else stages of prefill
    engines are spread over the nodes, and each stage of a decode engine is on the node of the same stage of a prefill
    engine, if there is room.
    """
    starts = [sum(pool.nodes for pool in pools[:number]) for number in range(len(pools))]
    free = [pool.gpus_per_node for pool in pools for _ in range(pool.nodes)]
    if together and len(placement.phases) == 2 and (units := _units(placement, pools, starts)) is not None:
        return units
    found: list[list[list[int]]] = [[] for _ in placement.phases]
    for turn in range(max((engines.instances for engines in placement.phases), default=0)):
        for phase, engines in enumerate(placement.phases):
            if turn >= engines.instances:
                continue
            nodes = range(starts[engines.pool], starts[engines.pool] + pools[engines.pool].nodes)
            partner = found[0][turn] if together and phase == 1 and turn < len(found[0]) else []
            stages = []
            for stage in range(engines.shape.pp):
                spread = sorted(nodes, key=lambda node: -free[node]) if together else nodes
                wanted = [*partner[stage : stage + 1], *spread]
                node = next((each for each in wanted if each in nodes and free[each] >= engines.shape.tp), None)
                if node is None:
                    return None
                free[node] -= engines.shape.tp
                stages.append(node)
            found[phase].append(stages)
    return found


def seats_of(placement: Placement, nodes: Sequence[Sequence[Sequence[int]]]) -> list[list[list[Seat]]]:
    """-> for each phase, for each instance, the seat of each stage, on the nodes that `nodes_of` gave: a stage has the
    next GPUs of its node."""
    taken: dict[int, int] = {}
    found: list[list[list[Seat]]] = []
    for engines, instances in zip(placement.phases, nodes, strict=True):
        found.append([])
        for stages in instances:
            seats = []
            for node in stages:
                first = taken.get(node, 0)
                taken[node] = first + engines.shape.tp
                seats.append(Seat(node, list(range(first, taken[node]))))
            found[-1].append(seats)
    return found


def shares_of(stages: Sequence[int]) -> dict[int, float]:
    """-> the nodes that an engine's stages are on, each with the share of the layers there."""
    return {node: stages.count(node) / len(stages) for node in dict.fromkeys(stages)}


def _units(placement: Placement, pools: Sequence[Pool], starts: Sequence[int]) -> list[list[list[int]]] | None:
    """-> the nodes when equal groups of both phases have nodes of their own, one a stage; None: they do not fit."""
    prefill, decode = placement.phases
    units = math.gcd(prefill.instances, decode.instances)
    counts = prefill.instances // units, decode.instances // units
    pool, stages = pools[prefill.pool], prefill.shape.pp
    taken = counts[0] * prefill.shape.tp + counts[1] * decode.shape.tp
    if prefill.pool != decode.pool or stages != decode.shape.pp:
        return None
    if taken > pool.gpus_per_node or units * stages > pool.nodes:
        return None
    start = starts[prefill.pool]
    groups = [list(range(start + unit * stages, start + (unit + 1) * stages)) for unit in range(units)]
    return [[nodes for nodes in groups for _ in range(count)] for count in counts]
