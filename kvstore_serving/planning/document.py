"""The plan as a document: `kvstore plan search --json` prints it, and `kvstore plan verify --plan` reads it.

The plan's `basis` contains everything that the plan was made from. So no other file is needed to verify the plan,
except for a trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from kvstore import __version__
from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.goodput import Goodput
from kvstore_serving.planning.outage import OutageCost
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape, StageGpus
from kvstore_serving.planning.queueing import Queue
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Recipe

Binding: TypeAlias = Literal["prefill compute", "decode compute", "decode memory", "node link", "store bandwidth"]


class PlanError(ValueError):
    """The file is not a plan; the message says what is wrong."""


class Placed(msgspec.Struct, frozen=True):
    """The engines of one phase, with their places on the nodes.

    pool: the number of the pool of nodes, from 0
    gpu: the kind of GPU that they run on
    gpus: the number of GPUs of these engines
    seats: for each instance and stage, the node and the GPUs there; nodes are numbered through all pools
    """

    tp: int
    pp: int
    instances: int
    pool: int
    gpu: str
    gpus: int
    price_per_hour: float
    seats: list[list[StageGpus]]

    @property
    def engines(self) -> Engines:
        """Return the engines in the simulator's form."""
        return Engines(Shape(self.tp, self.pp), self.instances, self.pool)


class Apart(msgspec.Struct, frozen=True):
    """A placement with separate engines for the two phases."""

    prefill: Placed
    decode: Placed


class StoreNeeds(msgspec.Struct, frozen=True):
    """What the store must deliver at `rate_rps`. Reads go to engines and writes come from them; both are in bytes a
    second.

    capacity_bytes: the memory for blocks that are being handed over, and for blocks that later prompts find
    kept_bytes: the memory for blocks that later prompts find; the plan assumes that the store keeps this much
    nodes: the number of store nodes of the given size
    """

    rate_rps: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: float
    kept_bytes: float
    nodes: int


class Point(msgspec.Struct, frozen=True):
    """A rate, and the share of requests that attain their SLOs at this rate."""

    rate_rps: float
    attainment: float


class Colocated(msgspec.Struct, frozen=True):
    """The alternative to the plan: engines that do both phases. If no such placement holds the SLOs, `placement` and
    the figures for each GPU and for the price of an hour are None."""

    placement: Placed | None
    goodput_rps_per_gpu: Goodput | None
    goodput_rps_per_price: Goodput | None
    goodput_rps: float
    gpus: int
    price_per_hour: float
    enough: bool
    curve: list[Point]


class Sensitivity(msgspec.Struct, frozen=True):
    """The goodput of the placement when one thing changes. `ratio`: this goodput divided by the plan's goodput."""

    change: str
    goodput_rps: float
    ratio: float


class AtCapacity(msgspec.Struct, frozen=True):
    """The goodput of the placement if the store keeps `kept_bytes` of blocks for later prompts.

    hit_rate: the share of their tokens that these prompts then find in the store
    ratio: this goodput divided by the plan's goodput
    assumed: whether this is the capacity that the plan assumes
    """

    kept_bytes: float
    hit_rate: float
    goodput_rps: float
    ratio: float
    assumed: bool


class Alone(msgspec.Struct, frozen=True):
    """The rate that one engine of a shape serves alone in a phase, divided by the number of its GPUs."""

    phase: str
    gpu: str
    tp: int
    pp: int
    rate_rps_per_gpu: float


class Basis(msgspec.Struct, frozen=True):
    """What a plan was made from: the nodes with their engines' profiles, the links and the store, the load, and the
    limits of engines. The fields are as in `Question`."""

    pools: list[NodePool]
    links: NetworkLinks
    load: Recipe
    max_batch: int
    chunk_tokens: int


class PlanDocument(msgspec.Struct, frozen=True):
    """The result of `kvstore plan search`.

    goodput_rps_per_price: the goodput divided by the price of an hour
    enough: whether the placement serves `rate_rps`
    closed_form: what theory predicts for a prefill engine at the goodput (see the function `closed_form`)
    time_s: the parts of a request's time at the goodput, in seconds
    busy: the shares of time in which engines and links work
    capacities: the goodput for sizes of the store around the assumed size, if their hit rates are known
    outages: what the failure of one engine of each phase costs, if this was requested
    """

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
        """Return the engines of the plan on its nodes, in the simulator's form."""
        of, placed = self.basis, self.placement
        placement = EnginePlacement(placed.prefill.engines, placed.decode.engines)
        return Fleet(of.pools, of.links, placement, of.max_batch, of.chunk_tokens)


_decode: Final = msgspec.json.Decoder(PlanDocument).decode


def read_plan(path: Path) -> PlanDocument:
    """Read the plan in a file. Raises `PlanError`."""
    try:
        plan = _decode(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; expected what `kvstore plan search --json` printed") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}; expected what this version's `kvstore plan search --json` prints") from error
    if max(plan.placement.prefill.pool, plan.placement.decode.pool) >= len(plan.basis.pools):
        raise PlanError(
            f"{path}: the placement names a pool that is not among the {len(plan.basis.pools)} pools of its basis"
        )
    return plan
