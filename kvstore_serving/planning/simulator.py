"""Simulates a fleet: requests arrive, are prefilled, handed over and decoded, and either attain or miss their SLOs.

If the store has leading blocks of a prompt, they are loaded before the prompt's prefill begins, while other prompts are
computed. The prefill engine sends the first token to the user. Then the blocks go to a decode engine. If they go
through the store, they are fetched while they are still being sent. If they go from GPU to GPU, they occupy the prefill
engine's memory until they are fetched, and a decode engine on the same nodes is preferred. Blocks that later prompts
can find are always sent to the store. A request goes to the prefill engine with the fewest waiting tokens, and to the
decode engine with the fewest reserved tokens.

A request attains its SLOs only if it holds both TTFT and TPOT, because separate percentiles would say less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import simpy

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.colocated import ColocatedEngine
from kvstore_serving.planning.engine import Steps
from kvstore_serving.planning.engines import DecodeEngine, PrefillEngine
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.jobs import NetworkLink, SimulatedRequest, transfer
from kvstore_serving.planning.placement import EnginePlacement, Engines, nodes_of, shares_of
from kvstore_serving.planning.workload import Counts, Floats, Workload

WARM_UP: Final = 0.2  # the share of requests that are not counted, because the fleet is empty at first
PARTS: Final = ("load", "prefill_queue", "prefill", "decode_memory", "hand_over", "decode")
_AnyEngine = TypeVar("_AnyEngine", PrefillEngine, DecodeEngine, ColocatedEngine)


class DoesNotFit(ValueError):
    """The engines do not fit the nodes."""


@dataclass(frozen=True)
class Outage:
    """The failure of an engine, and its return. `phase`: prefill, decode or colocated. `instance`: the engine's number,
    from 0."""

    phase: str
    instance: int
    from_s: float
    until_s: float


@dataclass(frozen=True)
class Fleet:
    """The fleet to simulate. `chunk_tokens`: the budget of colocated engines; 0 if they do not prefill in chunks.
    `batch_tokens`: the budget of prefill engines; None to take it from the profile."""

    pools: Sequence[NodePool]
    links: NetworkLinks
    placement: EnginePlacement
    max_batch: int = 256
    chunk_tokens: int = 2048
    batch_tokens: int | None = None
    outages: Sequence[Outage] = ()

    @property
    def nodes(self) -> list[list[list[int]]] | None:
        """The node of each stage, for each phase and instance. It is None if they do not fit."""
        return nodes_of(self.placement, self.pools, together=self.links.via == "direct")


@dataclass
class SimulatedRun:
    """The counted requests of a run. Each array of times has one time in seconds for each request, in the order of
    arrival, or NaN if the request had not ended when the run ended.

    steps: the number of decoding steps
    decided: whether the run ended early, because enough requests had missed their SLOs
    kept_up: the ratio of ended to arrived requests in the second half of the arrivals' time; it falls under overload
    busy: for each phase, the share of time for which its engines worked
    memory: the largest share of an engine's memory that was reserved
    links: the share of time for which the busiest link of each kind sent
    parts_s: the parts of each request's time: `load` from the store, `prefill_queue`, `prefill`, `decode_memory` (the
    wait for memory), `hand_over` (the move of its blocks), `decode`
    """

    ttft_s: Floats
    tpot_s: Floats
    steps: Counts
    decided: bool
    kept_up: float
    duration_s: float
    busy: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    parts_s: dict[str, Floats] = field(default_factory=dict)

    def mean_parts_s(self) -> dict[str, float]:
        """Return the mean time that requests spend in each part."""
        return {part: float(np.nanmean(values)) for part, values in self.parts_s.items() if not np.isnan(values).all()}

    def held(self, slo: Slo) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], ...]:
        """Return two arrays: whether each request holds TTFT, and whether it holds TPOT."""
        return self.ttft_s <= slo.ttft_s, self.tpot_s <= slo.tpot_s

    def attainment(self, slo: Slo) -> float:
        """Return the share of requests that hold both SLOs."""
        ttft, tpot = self.held(slo)
        return float((ttft & tpot).mean())


class _Simulation:
    def __init__(
        self, fleet: Fleet, workload: Workload, rate_rps: float, slo: Slo | None, allowed: float, first: int
    ) -> None:
        self.fleet, self.workload, self.slo = fleet, workload, slo
        self.env = env = simpy.Environment()
        self.over = env.event()
        found = fleet.nodes
        if found is None:
            pools = ", ".join(f"{pool.nodes} nodes of {pool.gpus_per_node} GPUs" for pool in fleet.pools)
            raise DoesNotFit(f"{fleet.placement} does not fit on {pools}")
        links = fleet.links
        nodes = sum(pool.nodes for pool in fleet.pools)
        self.out = [NetworkLink(links.node_bytes_per_s) for _ in range(nodes)]
        self.into = [NetworkLink(links.node_bytes_per_s) for _ in range(nodes)]
        self.inside = [NetworkLink(links.inside_bytes_per_s) for _ in range(nodes)]
        self.store_in, self.store_out = (NetworkLink(links.store_bytes_per_s * links.store_nodes) for _ in range(2))
        self.nodes: dict[object, list[int]] = {}
        self.shares: dict[object, list[tuple[int, float]]] = {}  # the share of an engine's layers on each node
        self.prefills: list[PrefillEngine] = []
        self.decodes: list[DecodeEngine] = []
        self.colocated: list[ColocatedEngine] = []
        for (phase, engines), places in zip(fleet.placement.named.items(), found, strict=True):
            for stages in places:
                engine = self._make(phase, engines)
                self.nodes[engine], self.shares[engine] = stages, list(shares_of(stages).items())
        self.phases: dict[str, Sequence[PrefillEngine | DecodeEngine | ColocatedEngine]]
        self.phases = {"prefill": self.prefills, "decode": self.decodes, "colocated": self.colocated}
        everyone = [engine for engines in self.phases.values() for engine in engines]
        for engine in everyone:
            engine.neighbours = [each for each in everyone if each is not engine and self._share_node(engine, each)]
        pool = fleet.pools[fleet.placement.phases[0].pool]
        self.kv_bytes = pool.profile.kv_bytes_per_token
        columns = (workload.at / rate_rps, workload.inputs, workload.outputs, workload.hits)
        requests = zip(*(column.tolist() for column in columns), strict=True)
        self.jobs = [
            SimulatedRequest(at, tokens, output, hits, number >= first)
            for number, (at, tokens, output, hits) in enumerate(requests)
        ]
        self.unfinished = len(self.jobs) - first
        self.left = math.floor(allowed * self.unfinished + 1e-9)  # further misses until the run is decided
        self.saves = bool(workload.hits.any())  # later prompts find computed blocks in the store
        self.decided = False
        self.source: dict[
            SimulatedRequest, tuple[PrefillEngine, int]
        ] = {}  # the engine that has a job's blocks, and the engine's epoch when it computed them
        self.served: dict[
            SimulatedRequest, ColocatedEngine
        ] = {}  # the engine that does both phases of a job whose blocks must be saved
        env.process(self._arrivals())
        for outage in fleet.outages:
            env.process(self._outage(outage))

    def _make(self, phase: str, engines: Engines) -> object:
        fleet, env = self.fleet, self.env
        profile, shape = fleet.pools[engines.pool].profile, engines.shape
        if phase == "prefill":
            self.prefills.append(PrefillEngine(env, profile, shape, self._prefilled, fleet.batch_tokens))
            return self.prefills[-1]
        if phase == "decode":
            self.decodes.append(DecodeEngine(env, profile, shape, self._fetch, self._ended, fleet.max_batch))
            return self.decodes[-1]
        self.colocated.append(ColocatedEngine(env, profile, shape, self._ended, fleet.max_batch, fleet.chunk_tokens))
        return self.colocated[-1]

    # ---- the way of a request ------------------------------------------------------------------------------------

    def _arrivals(self) -> Steps:
        env = self.env
        for job in self.jobs:
            if job.at_s > env.now:
                yield env.timeout(job.at_s - env.now)
            self._dispatch(job)

    def _dispatch(self, job: SimulatedRequest) -> None:
        """Choose an engine for a request, and queue the request there when its blocks from the store have arrived."""
        if self.decodes and not self.prefills:  # only decode is simulated: prefill takes no time
            job.prefilled(self.env.now)
            job.sent_s = job.first_s = self.env.now
            if job.left:
                _least(self.decodes).add(job)
            else:
                self._ended(job)
            return
        engine: PrefillEngine | ColocatedEngine
        engine = _least(self.prefills) if self.prefills else _least(self.colocated)
        engine.expect(job)
        if isinstance(engine, ColocatedEngine) and self.saves:
            self.served[job] = engine
        if not job.hits:
            engine.add(job)
            return
        there_s = self._read(engine, job.hits)
        epoch = engine.epoch

        def loaded(_: simpy.Event) -> None:
            if engine.epoch != epoch:  # the engine failed while the blocks came
                self._dispatch(job)
                return
            job.loaded_s = self.env.now
            engine.add(job)

        self.env.timeout(there_s - self.env.now).callbacks.append(loaded)

    def _prefilled(self, engine: PrefillEngine, job: SimulatedRequest) -> None:
        """Continue after a prompt is computed and its first token sent."""
        now = self.env.now
        if self.slo is not None and job.ttft_s > self.slo.ttft_s:
            self._missed(job)
        if not self.decodes:  # only prefill is simulated
            engine.release(job)
            self._ended(job)
            return
        if self.fleet.links.via == "store":
            job.sent_s = self._save(engine, job)
            engine.after(job.sent_s - now, lambda: engine.release(job))
        elif self.saves:
            self._save(engine, job)
        if not job.left:
            if self.fleet.links.via == "direct":
                engine.release(job)
            self._ended(job)
            return
        decodes = self.decodes
        if self.fleet.links.via == "direct":
            self.source[job] = engine, engine.epoch
            decodes = [each for each in decodes if self._near(engine, each) and not each.down] or decodes
        _least(decodes).add(job)

    def _save(self, engine: PrefillEngine | ColocatedEngine, job: SimulatedRequest) -> float:
        """Send the computed part of a prompt to the store. Returns the time at which it has arrived."""
        new = min(job.input, job.context - 1) - job.hits
        if new <= 0:
            return self.env.now
        path = [*self._share(self.out, engine), (self.store_in, 1.0)]
        return transfer(self.env.now, new * self.kv_bytes, path) + self.fleet.links.store_write_latency_s

    def _read(self, engine: object, tokens: int, from_s: float = 0.0) -> float:
        """Fetch the blocks of tokens from the store, which has all of them from `from_s` on. Returns the time at which
        they have arrived."""
        path = [(self.store_out, 1.0), *self._share(self.into, engine)]
        there_s = transfer(self.env.now, tokens * self.kv_bytes, path)
        return max(from_s, there_s) + self.fleet.links.store_read_latency_s

    def _share_node(self, one: object, other: object) -> bool:
        """Return whether the two engines have stages on the same node."""
        return not set(self.nodes[one]).isdisjoint(self.nodes[other])

    def _near(self, one: object, other: object) -> bool:
        """Return whether the two engines have all their stages on the same nodes."""
        return set(self.nodes[one]) == set(self.nodes[other])

    def _fetch(self, engine: DecodeEngine, job: SimulatedRequest) -> None:
        """Fetch the blocks of a request for which a decode engine has memory."""
        now = job.admitted_s = self.env.now
        source, epoch = self.source.pop(job, (None, 0))
        if source is not None and source.epoch != epoch:  # the blocks are lost with the engine that had them
            engine.give_up(job)
            self._dispatch(job)
            return
        if self.fleet.links.via == "store":
            there_s = self._read(engine, job.context - 1, job.sent_s)
        elif source is None:  # only decode is simulated
            there_s = now
        else:
            there_s = transfer(now, (job.context - 1) * self.kv_bytes, self._direct(source, engine))
            source.after(there_s - now, lambda: source.release(job))

        def arrived() -> None:
            job.ready_s = self.env.now
            engine.arrived(job)

        engine.after(there_s - now, arrived)

    def _ended(self, job: SimulatedRequest) -> None:
        if job.last_s < 0:
            job.last_s = job.first_s
        if self.saves and job in self.served:
            self._save(self.served.pop(job), job)
        if not job.counted:
            return
        self.unfinished -= 1
        if self.slo is not None and (job.ttft_s > self.slo.ttft_s or job.tpot_s > self.slo.tpot_s):
            self._missed(job)
        if self.unfinished == 0 and not self.over.triggered:
            self.over.succeed()

    def _missed(self, job: SimulatedRequest) -> None:
        if job.missed or not job.counted:
            return
        job.missed = True
        self.left -= 1
        if self.left < 0 and not self.over.triggered:
            self.decided = True
            self.over.succeed()

    # ---- links ---------------------------------------------------------------------------------------------------

    def _share(self, links: Sequence[NetworkLink], engine: object) -> list[tuple[NetworkLink, float]]:
        """Return the links of the nodes of an engine's stages, each with the share of the layers there."""
        return [(links[node], share) for node, share in self.shares[engine]]

    def _direct(self, source: PrefillEngine, engine: DecodeEngine) -> list[tuple[NetworkLink, float]]:
        sent, taken = dict(self.shares[source]), dict(self.shares[engine])
        path: list[tuple[NetworkLink, float]] = []
        for node, share in sent.items():
            stays = min(share, taken.get(node, 0.0))
            path += [(self.inside[node], stays)] if stays else []
            path += [(self.out[node], share - stays)] if share > stays else []
        for node, share in taken.items():
            comes = share - min(share, sent.get(node, 0.0))
            path += [(self.into[node], comes)] if comes else []
        return path

    # ---- failures ------------------------------------------------------------------------------------------------

    def _outage(self, outage: Outage) -> Steps:
        engine = self.phases[outage.phase][outage.instance]
        yield self.env.timeout(outage.from_s)
        lost = engine.fail()
        for job in lost:
            source, epoch = self.source.pop(job, (None, 0))
            if source is not None and source.epoch == epoch:
                source.release(job)
            # If the prompt was computed, the store has its blocks. The generated tokens are computed again.
            if job.prefilled_s >= 0 and self.fleet.links.via == "store":
                job.hits = min(job.input, job.context - 1)
            self._dispatch(job)
        yield self.env.timeout(outage.until_s - outage.from_s)
        engine.recover()

    # ---- the result ----------------------------------------------------------------------------------------------

    def run(self) -> SimulatedRun:
        self.env.run(until=self.over)
        now = self.env.now
        counted = [job for job in self.jobs if job.counted]
        ttft = np.array([job.ttft_s if job.first_s >= 0 else np.nan for job in counted])
        tpot = np.array([job.tpot_s if job.last_s >= 0 else np.nan for job in counted])
        run = SimulatedRun(
            ttft, tpot, np.maximum(1, np.array([job.output - 1 for job in counted])), self.decided, self._kept_up(), now
        )
        for name, engines in self.phases.items():
            if engines:
                run.busy[name] = sum(engine.busy_s for engine in engines) / len(engines) / now
                run.memory[name] = max(engine.peak / engine.capacity for engine in engines)
        kinds = {"node": [*self.out, *self.into], "inside": self.inside, "store": [self.store_in, self.store_out]}
        for name, links in kinds.items():
            run.links[name] = max(link.sent_bytes / link.bytes_per_s for link in links) / now
        times = np.array(
            [
                (job.at_s, job.loaded_s, job.begun_s, job.prefilled_s, job.admitted_s, job.ready_s, job.last_s)
                for job in counted
            ]
        )
        times[times < 0] = np.nan
        run.parts_s = dict(zip(PARTS, np.diff(times, axis=1).T, strict=True))
        return run

    def _kept_up(self) -> float:
        end = self.jobs[-1].at_s
        middle = end / 2
        return sum(middle < job.last_s <= end for job in self.jobs) / sum(job.at_s >= middle for job in self.jobs)


def simulate(
    fleet: Fleet,
    workload: Workload,
    rate_rps: float,
    slo: Slo | None = None,
    percentile: float | None = None,
    warm_up: int | None = None,
) -> SimulatedRun:
    """Simulate a workload at a rate. Raises `DoesNotFit`.

    warm_up: the number of first requests that are not counted; None for the share `WARM_UP` of all requests.

    If `slo` and `percentile` are given, the run ends as soon as too many requests have missed their SLOs to hold the
    percentile.
    """
    allowed = 1.0 if percentile is None else 1 - percentile / 100
    first = int(len(workload) * WARM_UP) if warm_up is None else warm_up
    return _Simulation(fleet, workload, rate_rps, slo, allowed, first).run()


def _least(engines: Sequence[_AnyEngine]) -> _AnyEngine:
    """Return the engine with the fewest tokens among the engines that work, or among all engines if none works."""
    return min(engines, key=lambda engine: (engine.down, engine.pending))
