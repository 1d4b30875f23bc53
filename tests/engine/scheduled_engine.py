"""vLLM's own scheduler with the connector's scheduling half, and with ranks that only keep records.

The scheduler, its KV cache manager, the connector and the aggregation of the ranks' outputs are real. `scheduled_ranks`
replaces the workers. The store is a set of keys per rank, and a test decides when its lookups answer.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstore_client.engine.admission import Admission
from kvstore_client.engine.computing_pace import ComputingPace
from kvstore_client.engine.flights import Flight
from kvstore_client.engine.guard import Counters
from kvstore_client.engine.lookup import PrefixLookup
from kvstore_client.engine.paged.host_tier import HostTier
from kvstore_client.engine.paged.plan import StepPlan
from kvstore_client.engine.paged.sharing import SharingChecks
from kvstore_client.engine.paged.weights import WeightsWatch
from kvstore_client.vllm.connector.block_groups import BlockGroups
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.engine_cache import EngineCache
from kvstore_client.vllm.connector.events import KVEvents, group_kinds
from kvstore_client.vllm.connector.hand_over import HandOvers
from kvstore_client.vllm.connector.load_planner import LoadPlanner
from kvstore_client.vllm.connector.planner_state import PlannerState
from kvstore_client.vllm.connector.save_planner import SavePlanner
from kvstore_client.vllm.connector.scheduler import SchedulerHalf
from tests.engine.scheduled_ranks import BLOCK_TOKENS, STATE, FakeFingerprints, Rank, Step, Work

MAX_MODEL_LEN = 1024
PROMPT = range(5 * BLOCK_TOKENS + 3)  # five whole blocks and a rest
StartEngine: TypeAlias = "Callable[..., ScheduledEngine]"


class FakeLookups:
    """Replaces `PrefixLookups`. While ``answering`` is true, it answers from ``held``, which has one set of keys per
    rank. If ``certain`` is false, it answers that nothing was found in time."""

    def __init__(self, held: Sequence[set[bytes]], groups: BlockGroups) -> None:
        self.held = held
        self.groups = groups
        self.answering = self.certain = True
        self.asked: list[Sequence[bytes]] = []
        self.asked_at = math.inf  # infinite, so that no answer becomes too old
        self.forgotten = 0

    def ask(self, keys: Sequence[bytes]) -> PrefixLookup:
        lookup = PrefixLookup(list(keys), self.asked_at)
        self.asked.append(lookup.keys)
        self.poll(lookup)
        return lookup

    def poll(self, lookup: PrefixLookup) -> int | None:
        if lookup.stored is None and self.answering:
            lookup.certain = self.certain
            lookup.stored = self.leading(lookup.keys) if self.certain else 0
            lookup.states = [end for end in range(1, lookup.stored + 1) if self.has_states(lookup.keys[end - 1])]
        return lookup.stored

    def leading(self, keys: Sequence[bytes]) -> int:
        there = (self._has(key, self.groups.tables) for key in keys)  # as in `SlicedStore`
        return next((index for index, present in enumerate(there) if not present), len(keys))

    def has_states(self, key: bytes) -> bool:
        return bool(self.groups.states) and self._has(key, self.groups.states)

    def _has(self, key: bytes, groups: Sequence[int]) -> bool:
        names = self.groups.keys([key])
        return set.intersection(*self.held).issuperset(names[group] for group in groups)

    def give_up(self, lookup: PrefixLookup) -> None:
        """Does nothing, because there is no queue here."""

    def came(self, key: bytes) -> None:
        """Does nothing, because answers are not kept here."""

    def forget(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        pass


class FakeFlights:
    """Replaces `Flights`. Other engines' promises are in ``others``. It answers when the lookups answer."""

    def __init__(self, lookups: FakeLookups) -> None:
        self._lookups = lookups
        self.others: set[bytes] = set()  # block hashes
        self.open: set[Flight] = set()

    def promise(self, keys: Sequence[bytes]) -> Flight:
        flight = Flight(list(keys), deadline=math.inf)
        self.open.add(flight)
        return flight

    def expect(self, keys: Sequence[bytes], _enough: int, _within_s: float) -> Flight:
        return self.promise(keys)

    def poll(self, flight: Flight) -> int | None:
        if flight.coming is None and self._lookups.answering:
            # With states, the keys of the flight are those of each group's blocks.
            groups = self._lookups.groups
            there = 0 if groups.states else self._lookups.leading(flight.keys)
            held = set.intersection(*self._lookups.held) if groups.states else ()
            hashes = [groups.of_chain(key) if groups.states else key for key in flight.keys[there:]]
            coming = (key in held or name in self.others for key, name in zip(flight.keys[there:], hashes, strict=True))
            more = next((index for index, promised in enumerate(coming) if not promised), len(flight.keys) - there)
            flight.coming = there + more
        return flight.coming

    def end(self, flight: Flight) -> None:
        assert not flight.ended, "a flight ends once"
        flight.ended = True
        self.open.discard(flight)

    def close(self) -> None:
        pass


@functools.cache
def scheduler_config(
    model: Path, blocks: int, budget: int, asynchronous: bool, prefix_cache: bool, states: bool
) -> VllmConfig:
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        enable_chunked_prefill=True,
        enable_prefix_caching=prefix_cache,
        async_scheduling=asynchronous,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"endpoint": "tcp://127.0.0.1:1"},
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    if states:
        config.cache_config.mamba_cache_mode = "align"
    return config


def cache_config(blocks: int, windows: Sequence[int]) -> KVCacheConfig:
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
    page = FullAttentionSpec(**shape).page_size_bytes
    state = MambaSpec(
        BLOCK_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,), page_size_padded=page, mamba_cache_mode="align"
    )
    specs = [
        state
        if window == STATE
        else SlidingWindowSpec(**shape, sliding_window=window)
        if window
        else FullAttentionSpec(**shape)
        for window in windows
    ]
    names = [f"layer{group}" for group in range(len(windows))]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=page * blocks, layers=[name], layer_stride=page * blocks, block_stride=page)
            for name in names
        ],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)],
        kv_cache_layout="LBHNC",
    )


def _raise(call: Any, _otherwise: Any) -> Any:
    return call()


class ScheduledEngine:
    """An engine without a model.

    ranks: the number of ranks; each sends all of its blocks. slots, keep: as for the CPU tier. blocks: the size of the
    engine's own cache. budget: the most tokens per step. asynchronous: the engine schedules a step before it knows the
    previous step's outcome. windows: the window of each group of layers, in tokens; 0 for a group that attends to all
    tokens; `STATE` for layers with a state. admission: decides which loads pay; None: all of them. checks: whether the
    ranks can check their weights.
    """

    def __init__(
        self,
        model: Path,
        *,
        ranks: int = 1,
        slots: int = 32,
        keep: bool = True,
        blocks: int = 32,
        budget: int = 512,
        min_hit_tokens: int = 0,
        save_decode: bool = True,
        asynchronous: bool = False,
        prefix_cache: bool = True,
        windows: Sequence[int] = (0,),
        single_flight: bool = False,
        admission: Admission | None = None,
        gather_s: float = 0.0,
        checks: bool = False,
    ) -> None:
        init_none_hash(sha256)
        self.groups = BlockGroups.of(cache_config(blocks, windows), BLOCK_TOKENS)
        config = scheduler_config(model, blocks, budget, asynchronous, prefix_cache, STATE in windows)
        self.blocks = blocks
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config, cache_config(blocks, windows), StructuredOutputManager(config), block_size=BLOCK_TOKENS
        )
        self.depth = 2 if asynchronous else 1
        self.counters = Counters()
        self.tier = HostTier(slots, keep=keep)
        self.weights = {"": 0}  # name -> their number
        # key -> the name of the weights when the key was made, and the key without that name
        self._names: dict[bytes, tuple[str, bytes]] = {}
        self.ranks = []
        for number in range(ranks):
            prints = FakeFingerprints()
            watch = WeightsWatch(prints if checks else None, "", alone=ranks == 1)  # type: ignore[arg-type]
            self.ranks.append(Rank(slots, set(), windows, number, watch, prints, self.weights_of, self.unnamed))
        self.lookups = FakeLookups([rank.held for rank in self.ranks], self.groups)
        self.flights = FakeFlights(self.lookups)
        keys = BlockKeys(BLOCK_TOKENS)
        self._unnamed_keys = BlockKeys(BLOCK_TOKENS)
        state = PlannerState(
            block_tokens=BLOCK_TOKENS,
            keys=keys,
            lookups=self.lookups,  # type: ignore[arg-type]
            tier=self.tier,
            groups=self.groups,
            hand_overs=HandOvers(
                self.flights,  # type: ignore[arg-type]
                self.groups,
                keys,
                block_tokens=BLOCK_TOKENS,
                single_flight_s=300.0 if single_flight else 0.0,
                counters=self.counters,
            ),
            events=KVEvents(wanted=True, block_tokens=BLOCK_TOKENS, groups=group_kinds(cache_config(blocks, windows))),
            counters=self.counters,
            sharing=SharingChecks(ranks, checks=checks, slots=slots),
        )
        saves = SavePlanner(state, ranks=ranks, slices=ranks, save_decode=save_decode, may_save=True, gather_s=gather_s)
        loads = LoadPlanner(
            state,
            saves.tracked,
            admission=admission or Admission(timeout_s=5.0, always=True),
            computing=ComputingPace(),
            min_hit_tokens=min_hit_tokens,
            may_load=True,
            may_save=True,
            prefix_caching=prefix_cache,
            steps_ahead=self.depth - 1,
            shares_rows=ranks > 1,
        )
        self.half = SchedulerHalf(state, saves, loads, cache=EngineCache(self.scheduler.kv_cache_manager))
        connector = self.scheduler.connector
        connector._start.half = self.half
        connector._keys = keys
        connector._never_raise = _raise  # an exception that an engine would survive fails the test
        connector.take_events = lambda: ()  # `hear` takes them
        self.heard: dict[str | None, set[Any]] = {MEDIUM_CPU: set(), MEDIUM_STORAGE: set()}  # groups and hashes
        self.requests: dict[str, Request] = {}
        # key -> the name of the weights, the group and the block hash that the key stands for
        self._meaning: dict[bytes, tuple[str, int, bytes]] = {}
        self.in_flight: deque[Step] = deque()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._aggregator = KVOutputAggregator(ranks)

    # Actions of users.

    def add(
        self, tokens: Sequence[int], name: str = "", max_tokens: int = 1, asks: object = None, side: str = ""
    ) -> Request:
        """Add a request. asks: its options for the connector. side: its side of a hand-over, "do_remote_decode" or
        "do_remote_prefill"."""
        name = name or f"request{len(self.requests)}"
        params = {} if asks is None else {"kvstore": asks, "another": "connector's"}
        params |= {side: True} if side else {}
        extra = {"kv_transfer_params": params} if params else None
        request = Request(
            name,
            list(tokens),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra),
            None,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the hashes of the whole blocks of these tokens."""
        return list(Request("", list(tokens), SamplingParams(), None, block_hasher=self._hasher).block_hashes)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the whole blocks of these tokens, in all groups."""
        return list(self.groups.keys(self.hashes(tokens)))

    def keys_of(self, request: Request) -> Sequence[bytes]:
        """Return the current keys of the request's blocks, block by block. Checks that no key changes its meaning."""
        keys = self.groups.keys(self.half.state.keys.of(request))
        for index, key in enumerate(keys):
            at, group = divmod(index, self.groups.count)
            meaning = (self.half.state.sharing.name, group, request.block_hashes[at])
            assert self._meaning.setdefault(key, meaning) == meaning, "blocks of two kinds of weights have one key"
        self._note(keys, self.groups.keys(list(request.block_hashes))[: len(keys)])
        return keys

    def _note(self, keys: Sequence[bytes], unnamed: Sequence[bytes]) -> None:
        name = self.half.state.sharing.name
        self._names.update({key: (name, plain) for key, plain in zip(keys, unnamed, strict=True)})

    def keys_by_group(self, request: Request, tail: bool = False, named: bool = True) -> list[Sequence[bytes]]:
        """Return the keys of the request's blocks for each group. tail: include the last block, which the prompt fills
        in part. named: the keys include the name of the weights."""
        maker = self.half.state.keys if named else self._unnamed_keys
        keys = self.keys_of(request) if named else self.groups.keys(list(request.block_hashes))
        whole = request.num_prompt_tokens // BLOCK_TOKENS
        if tail and (last := maker.tail(request)) is not None:
            keys = [*keys[: whole * self.groups.count], *self.groups.keys([last])]
            if named and (plain := self._unnamed_keys.tail(request)) is not None:
                self._note(self.groups.keys([last]), self.groups.keys([plain]))
        return [keys[group :: self.groups.count] for group in range(self.groups.count)]

    def weights_of(self, key: bytes) -> int:
        """Return the number of the weights that computed a key's block."""
        return self.weights[self._names.get(key, ("", b""))[0]]

    def unnamed(self, key: bytes) -> bytes:
        """Return a key without the name of the weights."""
        return self._names.get(key, ("", key))[1]

    def change_weights(self, name: str = "", *, reset: bool = True, ranks: Sequence[int] | None = None) -> bool:
        """Reset the engine's own cache, then change the weights. name: the name of the new weights; empty: they get
        none. reset: also reset the connector. ranks: the ranks that get new weights; None: all. Returns False, and
        changes nothing, if the cache cannot be reset."""
        if not self.scheduler.reset_prefix_cache():
            return False
        number = max(rank.prints.weights for rank in self.ranks) + 1
        for rank in self.ranks if ranks is None else [self.ranks[each] for each in ranks]:
            rank.prints.weights = number
        if name:
            self.name_weights(name)
        if reset:
            self.scheduler.reset_connector_cache()
        return True

    def name_weights(self, name: str, ranks: Sequence[int] | None = None) -> None:
        self.weights[name] = self.ranks[0].prints.weights
        for rank in self.ranks if ranks is None else [self.ranks[each] for each in ranks]:
            rank.watch.rename(name)

    # Actions of the engine.

    def schedule(self) -> Step:
        handed_over = {
            name
            for name in self.scheduler.requests
            if self.half.state.hand_overs.loadable(self.requests[name]) is not None
        }
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        step = Step(output, plan, [], set())
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            end = request.num_computed_tokens
            step.work.append(Work(request, end - tokens, end, self.block_ids_by_group(name)))
            if not request.is_prefill_chunk:
                step.sampling.add(name)
        for load in plan.loads:
            keys = {
                block: key
                for blocks, names in zip(
                    self.block_ids_by_group(load.request_id),
                    self.keys_by_group(self.requests[load.request_id], tail=load.request_id in handed_over),
                    strict=True,
                )
                for block, key in zip(blocks, names, strict=False)
            }
            blocks = [*load.host_block_ids, *load.block_ids]
            step.load_keys[load.request_id] = {block: keys[block] for block in blocks}
        self.in_flight.append(step)
        return step

    def block_ids(self, name: str) -> list[int]:
        """Return the ids of the blocks in the first group."""
        return self.block_ids_by_group(name)[0]

    def block_ids_by_group(self, name: str) -> list[list[int]]:
        return [list(block_ids) for block_ids in self.scheduler.kv_cache_manager.get_block_ids(name)]

    def complete(self) -> None:
        """Execute the oldest step that was scheduled, and report its outcome to the scheduler."""
        step = self.in_flight.popleft()
        for work in step.work:
            tail = work.end == work.request.num_prompt_tokens
            self.keys_by_group(work.request, tail)
            work.keys = self.keys_by_group(work.request, tail, named=False)
        for rank in self.ranks:
            rank.execute(step)
        names = [work.request.request_id for work in step.work]
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                # The same tokens always continue in the same way.
                sampled_token_ids=[
                    [self.requests[name].num_tokens % 50] if name in step.sampling else [] for name in names
                ],
                kv_connector_output=rank.output(),
            )
            for rank in self.ranks
        ]
        self.scheduler.update_from_output(step.output, self._aggregator.aggregate(outputs))

    def step(self) -> Step:
        step = self.schedule()
        while self.in_flight:
            self.complete()
        return step

    # Work in the background.

    def transfer(self) -> None:
        """Complete all pending transfers of the ranks successfully."""
        for rank in self.ranks:
            rank.finish_loads()
            while rank.copies:
                rank.finish_copy()
            rank.finish_sends()

    def run(self, limit: int = 200) -> None:
        """Run steps and transfers until every request has ended and nothing is in progress."""
        while self.in_flight:
            self.complete()
        for _ in range(limit):
            self.step()
            self.transfer()
            if not self.scheduler.requests and not any(self.half.under_way.values()):
                return
        raise AssertionError(f"after {limit} steps: {self.half.under_way}, requests {list(self.scheduler.requests)}")

    def fill_tier(self, tokens: Sequence[int] = PROMPT) -> None:
        """Run a request with these tokens. Afterwards the CPU tier has their blocks, and the engine's own cache has
        none."""
        self.add(tokens)
        self.run()
        self.scheduler.reset_prefix_cache()

    def empty_store(self) -> None:
        for rank in self.ranks:
            rank.held.clear()

    def load_in_part(self, blocks: int) -> Work:
        """Begin a load in the next step, and let the first rank get only this many of its blocks. Returns the work of
        the step after that load."""
        assert len(self.step().plan.loads) == 1
        self.ranks[0].finish_load(deliver=blocks)
        self.step()  # the rank reports in this step
        [work] = self.step().work
        return work

    def check_idle(self) -> None:
        """Check that nothing is left behind. Call this after every request has ended."""
        assert not any(self.half.under_way.values()), self.half.under_way
        assert not self.flights.open, "what was promised was neither set nor withdrawn"
        assert not self.scheduler.requests
        assert self.scheduler.kv_cache_manager.usage == 0
        for rank in self.ranks:
            assert not rank.writing and not +rank.reading and not rank.loads and not rank.copies and not rank.sends
        self.check_readable()
        self.check_heard()
        self.tier.clear()
        assert self.tier.busy == 0, "references to slots were not given back"

    def hear(self) -> None:
        """Process the connector's KV events as a router does."""
        for event in self.half.state.events.take():
            if isinstance(event, BlockStored):
                assert event.token_ids and len(event.token_ids) == event.block_size == BLOCK_TOKENS
                self.heard[event.medium].update((event.group_idx, each) for each in event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                removed = {(event.group_idx, each) for each in event.block_hashes}
                assert self.heard[event.medium] >= removed
                self.heard[event.medium] -= removed

    def check_heard(self) -> None:
        """Check that a listener to the events knows exactly which blocks the CPU tier has."""
        self.hear()
        index = self.tier._index
        keys = index.keys_of(index.ready_slots()) if index is not None else b""
        size = index.key_bytes if index is not None else 1
        named = [self._meaning.get(keys[at : at + size], (None, 0, b"")) for at in range(0, len(keys), size)]
        assert self.heard[MEDIUM_CPU] == {
            (group, maybe_convert_block_hash(BlockHash(block_hash)))
            for name, group, block_hash in named
            if name is not None
        }

    def check_readable(self) -> None:
        """Check that each block that the CPU tier offers is in its slot on every rank."""
        for request in self.requests.values():
            keys = self.keys_of(request)
            for key, slot in zip(keys, self.tier.find(keys).tolist(), strict=True):
                assert slot < 0 or all(rank.pool[slot] == key for rank in self.ranks), (
                    f"slot {slot} is not what it says"
                )
