"""The plan as a document: what `kvstore plan search --json` prints, and `kvstore plan verify --plan` reads.

It has all that it was made from, its `basis`: whoever verifies it needs no other file, but for a trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from kvstore import __version__
from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import Links, Pool
from kvstore_serving.planning.goodput import Goodput
from kvstore_serving.planning.outage import OutageCost
from kvstore_serving.planning.placement import Engines, Placement, Seat, Shape
from kvstore_serving.planning.queueing import Queue
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Recipe

Binding: TypeAlias = Literal["prefill compute", "decode compute", "decode memory", "node link", "store bandwidth"]


class PlanError(ValueError):
    """The file is no plan; the message says what is wrong."""


class Placed(msgspec.Struct, frozen=True):
    """Engines of a phase. `pool`: the number of the nodes' kind, from 0; `gpu`: the kind of their GPUs, of which they
    have `gpus`. `seats`: for each instance, for each stage, the node and its GPUs; nodes are numbered through all
    pools."""

    tp: int
    pp: int
    instances: int
    pool: int
    gpu: str
    gpus: int
    price_per_hour: float
    seats: list[list[Seat]]

    @property
    def engines(self) -> Engines:
        """As the simulator takes them."""
        return Engines(Shape(self.tp, self.pp), self.instances, self.pool)


class Apart(msgspec.Struct, frozen=True):
    """The placement with the phases apart."""

    prefill: Placed
    decode: Placed


class StoreNeeds(msgspec.Struct, frozen=True):
    """What the store must deliver at `rate_rps`: to engines (read) and from them (write), in bytes a second; the memory
    of what is under way and of what later prompts find (`capacity_bytes`), and of the latter alone, which the plan
    assumes that the store keeps (`kept_bytes`); and nodes of the size that was given."""

    rate_rps: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: float
    kept_bytes: float
    nodes: int


class Point(msgspec.Struct, frozen=True):
    """A rate, and the share of requests that attain their SLOs."""

    rate_rps: float
    attainment: float


class Colocated(msgspec.Struct, frozen=True):
    """The alternative: engines that do both. `placement` is None, and what is for each GPU and for the price of an
    hour, if none holds the SLOs."""

    placement: Placed | None
    goodput_rps_per_gpu: Goodput | None
    goodput_rps_per_price: Goodput | None
    goodput_rps: float
    gpus: int
    price_per_hour: float
    enough: bool
    curve: list[Point]


class Sensitivity(msgspec.Struct, frozen=True):
    """What the goodput of the placement becomes when one thing changes; `ratio`: to the plan's."""

    change: str
    goodput_rps: float
    ratio: float


class AtCapacity(msgspec.Struct, frozen=True):
    """What the placement's goodput is if the store keeps `kept_bytes` for later prompts, which then find `hit_rate` of
    their tokens there; `ratio`: to the plan's, whose capacity is the one that is `assumed`."""

    kept_bytes: float
    hit_rate: float
    goodput_rps: float
    ratio: float
    assumed: bool


class Alone(msgspec.Struct, frozen=True):
    """What one engine of a shape serves alone in a phase, for each of its GPUs."""

    phase: str
    gpu: str
    tp: int
    pp: int
    rate_rps_per_gpu: float


class Basis(msgspec.Struct, frozen=True):
    """What a plan was made from: nodes with the profiles of their engines, links and store, the load, and the limits of
    engines, as in `Question`."""

    pools: list[Pool]
    links: Links
    load: Recipe
    max_batch: int
    chunk_tokens: int


class Plan(msgspec.Struct, frozen=True):
    """The result of `kvstore plan search`. `goodput_rps_per_price`: for each unit that an hour costs. `enough`: the
    placement serves `rate_rps`. `closed_form`: what theory says
    of a prefill engine at the goodput, see `closed_form`. `time_s`: where the time of a request goes at the goodput, in
    seconds. `busy`: shares of time. `capacities`: the goodput at sizes of the store around the one that is assumed, if
    it is known what they find. `outages`: what an engine of each phase that fails costs, if that was asked for."""

    placement: Apart
    gpus: int
    price_per_hour: float
    goodput_rps: float
    goodput_rps_per_gpu: Goodput
    goodput_rps_per_price: Goodput
    rate_rps: float | None
    enough: bool
    binding: Binding
    store: StoreNeeds
    colocated: Colocated
    sensitivity: list[Sensitivity]
    capacities: list[AtCapacity]
    outages: list[OutageCost]
    alone: list[Alone]
    closed_form: Queue | None
    curve: list[Point]
    time_s: dict[str, float]
    busy: dict[str, float]
    memory: dict[str, float]
    links: dict[str, float]
    slo: Slo
    percentile: float
    workload: str
    hit_rate: float
    profiles: list[str]
    basis: Basis
    version: str = __version__

    @property
    def fleet(self) -> Fleet:
        """The engines of the plan on its nodes, as the simulator takes them."""
        of, placed = self.basis, self.placement
        placement = Placement(placed.prefill.engines, placed.decode.engines)
        return Fleet(of.pools, of.links, placement, of.max_batch, of.chunk_tokens)


_decode: Final = msgspec.json.Decoder(Plan).decode


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises `PlanError`."""
    try:
        plan = _decode(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; expected what `kvstore plan search --json` printed") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}; expected what this version's `kvstore plan search --json` prints") from error
    if max(plan.placement.prefill.pool, plan.placement.decode.pool) >= len(plan.basis.pools):
        raise PlanError(
            f"{path}: the placement names a pool that is not among the {len(plan.basis.pools)} of its basis"
        )
    return plan
