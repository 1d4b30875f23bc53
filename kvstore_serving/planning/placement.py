"""Placements: the number of engines of each kind, their tensor and pipeline degrees, and the nodes that they run on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvstore_serving.planning.fleet import NodePool


class Shape(msgspec.Struct, frozen=True, order=True):
    """The degrees of an engine: tensor parallelism, which stays within a node, and pipeline parallelism."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """The number of GPUs of one engine."""
        return self.tp * self.pp


class Engines(msgspec.Struct, frozen=True):
    """The engines of one phase: the number of instances, their shape, and the number of their pool."""

    shape: Shape
    instances: int
    pool: int = 0

    @property
    def gpus(self) -> int:
        """The number of GPUs of all instances."""
        return self.shape.gpus * self.instances


class EnginePlacement(msgspec.Struct, frozen=True):
    """The engines of each phase: either `prefill` and `decode`, or only `colocated` engines, which do both phases."""

    prefill: Engines | None = None
    decode: Engines | None = None
    colocated: Engines | None = None

    @property
    def named(self) -> dict[str, Engines]:
        """The engines by phase, for the phases that have engines."""
        every = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {phase: engines for phase, engines in every.items() if engines is not None}

    @property
    def phases(self) -> list[Engines]:
        """The engines of each phase that has engines."""
        return list(self.named.values())

    def with_instances(self, phase: str, instances: int) -> EnginePlacement:
        """Return the same placement with another number of engines of a phase."""
        engines = msgspec.structs.replace(self.named[phase], instances=instances)
        return msgspec.structs.replace(self, **{phase: engines})

    @property
    def gpus(self) -> int:
        """The number of GPUs of all phases."""
        return sum(engines.gpus for engines in self.phases)

    def price(self, pools: Sequence[NodePool]) -> float:
        """Return the price of all engines for an hour."""
        return sum(engines.gpus * pools[engines.pool].price for engines in self.phases)


class StageGpus(msgspec.Struct, frozen=True):
    """The place of one stage of an engine: the node, numbered from 0 through all pools, and the GPUs there, from 0."""

    node: int
    gpus: list[int]


def nodes_of(
    placement: EnginePlacement, pools: Sequence[NodePool], together: bool = False
) -> list[list[list[int]]] | None:
    """Return, for each phase and instance, the node of each stage, or None if the instances do not fit. Nodes are
    numbered through all pools. A stage is on one node, because its GPUs exchange results in every layer.

    together: whether to put both phases on the same nodes. If there are enough nodes, groups of engines of both phases
    get nodes of their own. Otherwise the stages of prefill engines are spread over the nodes. Each stage of a decode
    engine is then put on a node that has the same stage of a prefill engine, if that node has room.
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


def seats_of(placement: EnginePlacement, nodes: Sequence[Sequence[Sequence[int]]]) -> list[list[list[StageGpus]]]:
    """Return, for each phase and instance, the seat of each stage on the nodes that `nodes_of` returned. Each stage
    gets the next GPUs of its node."""
    taken: dict[int, int] = {}
    found: list[list[list[StageGpus]]] = []
    for engines, instances in zip(placement.phases, nodes, strict=True):
        found.append([])
        for stages in instances:
            seats = []
            for node in stages:
                first = taken.get(node, 0)
                taken[node] = first + engines.shape.tp
                seats.append(StageGpus(node, list(range(first, taken[node]))))
            found[-1].append(seats)
    return found


def shares_of(stages: Sequence[int]) -> dict[int, float]:
    """Return the nodes of an engine's stages, each with the share of the layers that are on it."""
    return {node: stages.count(node) / len(stages) for node in dict.fromkeys(stages)}


def _units(
    placement: EnginePlacement, pools: Sequence[NodePool], starts: Sequence[int]
) -> list[list[list[int]]] | None:
    """Return the nodes if equal groups of engines of both phases get nodes of their own, with one node for each stage.
    Returns None if the groups do not fit."""
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
