"""Decides which blocks each request loads. It handles every request from its first lookup until its load has ended.

The engine asks how much a request may load. It gets the answer "ask again" (None) until the store has answered or the
lookup's deadline has passed. The request then waits until all ranks have ended its load. The load's record is kept
until then, even if the request is aborted. A block is missing if any rank could not load it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU

from kvstore_client.engine.admission import Admission
from kvstore_client.engine.computing_pace import ComputingPace, Scheduled, StepTimes
from kvstore_client.engine.lookup import LOOKUP_PIN_S
from kvstore_client.engine.paged.plan import VOID, Load
from kvstore_client.engine.paged.shared_pool import Passages
from kvstore_client.vllm.connector.hand_over import HandOverSide, side_of
from kvstore_client.vllm.connector.pending import PendingLoad, TrackedRequest, WaitingRequest
from kvstore_client.vllm.connector.planner_state import PlannerState
from kvstore_client.vllm.connector.request_options import request_options
from kvstore_client.vllm.connector.work_ahead import WorkAhead

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


# The age of an answer at which the store is asked again. Until the new answer comes, the old one counts, as long as the
# blocks that were found are pinned.
RENEW_PIN_S: Final = LOOKUP_PIN_S / 4


class LoadPlanner:
    """Owns the records of loads, and of requests that wait for blocks of the engine's cache. Not thread-safe. No method
    blocks.

    `admission` decides which loads save time. `computing` estimates how long the engine computes a prompt, and `work`
    adds the time for earlier prompts. `void_until`: blocks of loads up to this number must not be used any more.
    """

    def __init__(
        self,
        state: PlannerState,
        tracked: Mapping[str, TrackedRequest],
        *,
        admission: Admission,
        computing: ComputingPace,
        min_hit_tokens: int,
        may_load: bool,
        may_save: bool,
        prefix_caching: bool,
        steps_ahead: int,
        shares_rows: bool = False,
    ) -> None:
        """`tracked`: the `SavePlanner`'s records of requests that have blocks. `prefix_caching`: whether the engine's
        own cache shares blocks between requests. `steps_ahead`: the number of steps that the engine plans before it
        waits for one to end. `shares_rows`: whether ranks share a host pool."""
        self.admission = admission
        self.computing = computing
        self._state = state
        self._tracked = tracked
        self._min_hit_tokens = max(1, min_hit_tokens)
        self._may_load = may_load
        self._may_save = may_save
        self._prefix_caching = prefix_caching
        self._steps = StepTimes(computing, steps_ahead)
        self._waiting: dict[str, WaitingRequest] = {}
        self._loading: dict[str, PendingLoad] = {}
        self._arriving: dict[bytes, str] = {}  # the request whose load brings a block, by key
        self._failed: set[str] = set()  # requests with a load that failed
        self.work = WorkAhead(
            computing, tracked, self._loading, block_tokens=state.block_tokens, whole_groups=state.groups.whole
        )
        self._planned: list[Load] = []  # loads that are in no step's plan yet
        self._cancelled: list[str] = []  # requests that ended during their load and are in no plan yet
        self._passages = Passages(shares_rows)
        self.void_until = 0
        self._hit_sources: tuple[str, int, int] = ("", 0, 0)  # the last load: request, tokens of host tier, of store

    @property
    def under_way(self) -> dict[str, int]:
        """The number of records of each kind."""
        return {
            "waiting": len(self._waiting),
            "loading": len(self._loading),
            "arriving": len(self._arriving),
            "passages": self._passages.under_way,
        }

    # What a request may load.

    def wait(self, request: Request) -> WaitingRequest:
        """Start the lookup of a new request now, because it may take long until the engine has room for the request.
        Also promise the blocks that the request will compute."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            state = self._state
            options = request_options(request, state.counters)
            if state.spans is not None:
                state.spans.added(request, options.traceparent, prefills=side_of(request) is HandOverSide.PREFILL)
            waiting = self._waiting[request.request_id] = WaitingRequest(options)
            usable = len(self._look_up(request, waiting))
            may_save = self._may_save and options.save and options.max_save_tokens is None
            may_save = may_save and not state.sharing.stands_still
            state.hand_overs.add(request, state.keys.of(request), usable, options.wait_s, may_save)
        return waiting

    def _look_up(self, request: Request, waiting: WaitingRequest) -> Sequence[bytes]:
        """Make sure that the store is asked. Return the keys of the blocks that may be loaded, perhaps none. They never
        include the block of the last token, because the engine must compute that token to continue."""
        state = self._state
        keys = state.keys.of(request)
        usable = min(len(keys), (request.num_tokens - 1) // state.block_tokens)
        # There is no second load after a failed one. Otherwise, a store that finds blocks but cannot deliver them would
        # hold back the request forever.
        if (
            not self._may_load
            or state.sharing.stands_still
            or not waiting.options.load
            or usable * state.block_tokens < self._min_hit_tokens
            or request.skip_reading_prefix_cache
            or request.request_id in self._failed
        ):
            self._give_up(waiting)
            return []
        # Ask for the whole chain, including blocks that the engine has, because the store must not evict the chain's
        # head first.
        if waiting.lookup is None or time.monotonic() - waiting.lookup.asked_at > LOOKUP_PIN_S:
            self._give_up(waiting)
            waiting.lookup = state.lookups.ask(keys[:usable])
        elif waiting.next_lookup is None and time.monotonic() - waiting.lookup.asked_at > RENEW_PIN_S:
            waiting.next_lookup = state.lookups.ask(keys[:usable])
        if waiting.next_lookup is not None and state.lookups.poll(waiting.next_lookup) is not None:
            waiting.lookup, waiting.next_lookup = waiting.next_lookup, None
        return keys[:usable]

    def _give_up(self, waiting: WaitingRequest) -> None:
        for lookup in (waiting.lookup, waiting.next_lookup):
            if lookup is not None:
                self._state.lookups.give_up(lookup)
        waiting.lookup = waiting.next_lookup = None

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens to load after the `computed_tokens` of the engine's own cache. Only whole blocks that
        arrive sooner than the engine would compute them are loaded. Return None if the caller should ask again."""
        state, groups = self._state, self._state.groups
        waiting = self.wait(request)
        local = waiting.local = computed_tokens // state.block_tokens
        keys = self._look_up(request, waiting)
        # An idle engine notices new weights in a step without tokens. In other cases, the load's check notices them.
        if waiting.lookup is not None and not self._tracked and state.sharing.is_unheard(waiting.since):
            return None
        if waiting.lookup is None or (len(keys) - local) * state.block_tokens < self._min_hit_tokens:
            return 0
        handed_over = state.hand_overs.loadable(request)
        chain = handed_over or state.keys.of(request)
        keys = handed_over or keys
        names = groups.keys_of(request, chain)
        if self._prefix_caching and (
            self._awaits(waiting, names, local, len(keys)) or state.hand_overs.follows(request, keys, local)
        ):
            return None
        if (coming := state.hand_overs.coming(request)) is None:
            return None
        in_host = groups.presence(state.tier.find(names[local * groups.count : len(keys) * groups.count]) >= 0)
        stored = state.lookups.poll(waiting.lookup)
        waiting.unheard = stored is None and not coming and groups.run(in_host, local) < len(in_host)
        if waiting.unheard and self._waits_for_lookup(request, waiting, local, len(keys)):
            return None
        known = waiting.lookup.states
        waiting.waits = coming > (stored or 0) or bool(coming and groups.states and coming not in known)
        states = [*known, *([coming] if coming else [])]
        there = groups.stored(len(in_host), local, max(coming, stored or 0), states)
        present = in_host | there
        most = waiting.options.max_load_tokens
        if most is not None:
            present[most // state.block_tokens :] = False
        run = groups.run(present, local)
        here = groups.needed(in_host, local, run)
        from_store = run - int(here.sum())
        waiting.declined = 0
        if from_store and not waiting.waits and not state.hand_overs.is_expected(request):
            least = max(1, groups.whole)  # the least number of blocks to transfer for one block of tokens
            first = local + int(np.argmin(here))
            computing_s = self.work.computing_s(request, first * state.block_tokens, (local + run) * state.block_tokens)
            load = self.admission.judge(from_store * least, computing_s)
            if load is None:
                return None
            load = math.ceil(load / least)
            waiting.declined = from_store - load
            if waiting.declined:
                present[int(np.searchsorted(np.cumsum(~here), load, side="right")) :] = False
                run = groups.run(present, local)
        tokens = run * state.block_tokens
        if handed_over:  # its last block may be partly filled
            tokens = min(tokens, request.num_prompt_tokens - local * state.block_tokens)
        return tokens if tokens >= self._min_hit_tokens else 0

    def _waits_for_lookup(self, request: Request, waiting: WaitingRequest, local: int, end: int) -> bool:
        """Return whether to wait for the store's answer about these blocks. If not, they are computed."""
        if waiting.lookup is None or self._state.hand_overs.is_expected(request):
            return True
        waited_s = time.monotonic() - waiting.lookup.asked_at
        computing_s = self.work.computing_s(request, local * self._state.block_tokens, end * self._state.block_tokens)
        return waited_s < self.admission.patience_s((end - local) * max(1, self._state.groups.whole), computing_s)

    def _awaits(self, waiting: WaitingRequest, names: Sequence[bytes], local: int, end: int) -> bool:
        """Return whether to wait for the load of another request that brings blocks `local` to `end` into the engine's
        own cache. With a sliding window, only a load with the same end counts. A request waits for only one load in
        this way. If that load fails, each request loads its own blocks. Otherwise, the last of them would wait for the
        loads of all others in sequence."""
        groups = self._state.groups
        tells = (end - 1) * groups.count + groups.last if groups.windows else local * groups.count
        bringer = self._arriving.get(names[tells])
        if bringer is None or waiting.awaited not in (None, bringer):
            return False
        waiting.awaited = bringer
        waiting.hoped_tokens = max(waiting.hoped_tokens, end * self._state.block_tokens)
        return True

    # Planning loads.

    def leave(self, request: Request) -> WaitingRequest | None:
        """Remove and return the record of a request that no longer waits, because it has blocks or has ended. Return
        None if it did not wait."""
        return self._waiting.pop(request.request_id, None)

    def begin(
        self, request: Request, waiting: WaitingRequest, blocks: KVCacheBlocks, external_tokens: int
    ) -> PendingLoad | None:
        """Plan the load of a request that waited. The engine gave it blocks, and relies on `external_tokens` tokens
        being loaded into them. Return None if there is nothing to load."""
        state, groups = self._state, self._state.groups
        before_s = self.work.add(request, waiting.local * state.block_tokens)
        state.counters.add("declined_tokens", waiting.declined * state.block_tokens)
        names = groups.keys_of(request, state.hand_overs.loadable(request) or state.keys.of(request))
        wait_s = state.hand_overs.take_wait_s(request)
        if external_tokens <= 0:
            return None
        first, end = waiting.local, waiting.local + math.ceil(external_tokens / state.block_tokens)
        places = list(groups.places(blocks.get_block_ids(), range(first, end)))
        keys = [groups.key_at(names, place) for place in places]
        block_ids = [place.block_id for place in places]
        slots = state.tier.acquire(keys).tolist()
        in_host = [index for index, slot in enumerate(slots) if slot >= 0]
        to_fetch = [index for index, slot in enumerate(slots) if slot < 0]
        load = Load(
            request.request_id,
            host_slots=[slots[index] for index in in_host],
            host_block_ids=[block_ids[index] for index in in_host],
            keys=[keys[index] for index in to_fetch],
            block_ids=[block_ids[index] for index in to_fetch],
        )
        # A block of a window or of states replaces the computation of all blocks before it.
        from_store = len(load.keys) if groups.whole or not load.keys else end - first
        load.slots = self._slots_to_fetch_into(load.keys)
        load.waits = waiting.waits and bool(load.keys)
        if load.waits:
            load.within_s = wait_s
        else:
            from_token = min((places[index].index for index in to_fetch), default=end) * state.block_tokens
            own_s = self.computing.seconds(from_token, end * state.block_tokens)
            computing_s = math.inf if own_s is None else before_s + own_s
            load.within_s = self.admission.begin(from_store, computing_s)
            load.latest_s = self.admission.latest_s(computing_s)
        self._planned.append(load)
        self._arriving.update(dict.fromkeys(keys, request.request_id))
        pending = self._loading[request.request_id] = PendingLoad(
            request,
            load,
            keys,
            parents=[groups.parent_at(names, place) for place in places],
            block_ids=block_ids,
            from_store=from_store,
            began=time.monotonic(),
        )
        if load.slots:
            for index in to_fetch:
                state.events.note(request, keys[index], places[index].index, places[index].group)
        fetched = {places[index].index for index in to_fetch}
        here = {places[index].index for index in in_host} - fetched
        host_tokens = len(here) * state.block_tokens if fetched else external_tokens
        self._hit_sources = (request.request_id, host_tokens, external_tokens - host_tokens)
        state.counters.add("hit_tokens_cpu", host_tokens)
        state.counters.add("hit_tokens_store", external_tokens - host_tokens)
        return pending

    def hit_sources(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of the load that `begin` just planned come from the host tier, and how many from the
        store."""
        request_id, host, store = self._hit_sources
        return (host, store) if request_id == request.request_id else (0, 0)

    def _slots_to_fetch_into(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return slots of the host tier for blocks from the store, so that the tier has the blocks next time. Return
        None if they would take more than half of the tier, if there is no room, or if one of them is being written
        already."""
        tier = self._state.tier
        if not tier.keep or not keys or len(keys) > tier.slots // 2:
            return None
        slots = self._state.reserve(keys)
        if (slots < 0).any():
            tier.abort(slots)
            return None
        reserved: list[int] = slots.tolist()
        return reserved

    def plan(self, scheduled_tokens: Mapping[str, int]) -> list[Load]:
        """Return the loads that begin with the step that the engine has just planned. `scheduled_tokens`: the number of
        tokens that the step computes for each request."""
        loads, self._planned = self._passages.admit(self._planned)
        check = self._state.sharing.ask() if loads else 0
        for load in loads:
            load.check = load.check or check
        requests = ((self._tracked[name].request, n) for name, n in scheduled_tokens.items() if name in self._tracked)
        self._steps.plan(
            {
                each.request_id: Scheduled(
                    each.num_computed_tokens, tokens, each.num_computed_tokens < each.num_prompt_tokens
                )
                for each, tokens in requests
            }
        )
        self.work.step()
        return loads

    def take_cancelled(self) -> list[str]:
        """Return the requests that ended during their load since the last call. These loads may end early."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    # The end of loads.

    def lost(self, block_ids: set[int], request_ids: Iterable[str]) -> None:
        """Note that a rank could not load these cache blocks, or could not load all blocks of these requests."""
        for load in self._loading.values() if block_ids else ():
            load.failed |= block_ids.intersection(load.block_ids)
        for request_id in request_ids:
            if (failed := self._loading.get(request_id)) is not None:
                failed.failed.update(failed.block_ids)

    def end(self, request_id: str) -> PendingLoad | None:
        """Process the end of the request's load on all ranks. Return the load, or None if there was none."""
        load = self._loading.pop(request_id, None)
        if load is None:
            return None
        state, plan = self._state, load.plan
        self._passages.left(request_id)
        if not plan.waits:
            self.admission.end(load.from_store)
        if state.spans is not None:
            state.spans.loaded(request_id, len(load.keys), len(load.failed))
        if state.hand_overs.is_expected(load.request):
            state.counters.add("hand_over_seconds_load", time.monotonic() - load.began)
        state.tier.release(plan.host_slots)
        for key in load.keys:
            if self._arriving.get(key) == request_id:
                del self._arriving[key]
        fetched = list(zip(plan.slots, plan.keys, plan.block_ids, strict=True)) if plan.slots else []
        good = [each for each in fetched if not load.void and each[2] not in load.failed]
        state.tier.commit([slot for slot, _, _ in good])
        state.events.stored([key for _, key, _ in good], MEDIUM_CPU)
        if not load.void:
            for _, key, _ in fetched:
                state.events.forget(key)
            state.tier.link(load.keys, load.parents)
        state.tier.abort([slot for slot, _, block_id in fetched if load.void or block_id in load.failed])
        if load.failed and not load.cancelled:
            state.counters.add("failed_loads")
            state.lookups.forget()
            if request_id in self._tracked:
                self._failed.add(request_id)
        return load

    def forget(self, request: Request) -> None:
        """Note that the request has ended. If its load is in progress, the load may end early."""
        if (waiting := self._waiting.pop(request.request_id, None)) is not None:
            self._give_up(waiting)
        self._failed.discard(request.request_id)
        if (load := self._loading.get(request.request_id)) is not None:
            load.cancelled = True
            self._cancelled.append(request.request_id)

    def reset(self) -> None:
        """Stop using the store's earlier answers and the blocks of loads in progress."""
        for waiting in self._waiting.values():
            self._give_up(waiting)
        for load in self._loading.values():
            load.void = True
        for planned in self._planned:
            planned.check = VOID
        self.void_until = self._passages.last
        self._arriving.clear()
