"""Which blocks each request loads: of every request from its first lookup until its load has ended.

The engine asks how much a request may load, and is told "ask again" (None) until the store's answer is there or the
lookup's deadline has passed. A load parks its request until all ranks have its blocks. Its record is kept until then,
even if the request is aborted. A block that any rank could not load is missing.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU

from kvstore_client.engine.admission import Admission
from kvstore_client.engine.computing_pace import ComputingPace, Scheduled, StepTimes
from kvstore_client.engine.lookup import PIN_S
from kvstore_client.engine.paged.plan import VOID, Load
from kvstore_client.engine.paged.shared_pool import Passages
from kvstore_client.vllm.connector.books import Books
from kvstore_client.vllm.connector.hand_over import Side, side_of
from kvstore_client.vllm.connector.pending import PendingLoad, TrackedRequest, WaitingRequest
from kvstore_client.vllm.connector.request_options import request_options
from kvstore_client.vllm.connector.work_ahead import WorkAhead

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


# How old an answer of the store may be before it is asked again. Until the new answer is there the old one counts, as
# long as what was found is pinned.
RENEW_S: Final = PIN_S / 4


class LoadPlanner:
    """Owns the records of requests that wait for blocks of the engine's cache, and of loads. Not thread-safe; no method
    blocks.

    ``admission``: which loads pay. ``computing``: how long the engine computes a prompt. ``work``: and those before
    it. ``void_until``: what the loads up to this number bring is of no use any more.
    """

    def __init__(
        self,
        books: Books,
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
        """tracked: the requests that have blocks, which are the `SavePlanner`'s. prefix_caching: whether the engine's
        own cache shares blocks between requests. steps_ahead: how many steps the engine plans before it waits for
        one. shares_rows: ranks have a host pool in common."""
        self.admission = admission
        self.computing = computing
        self._books = books
        self._tracked = tracked
        self._min_hit_tokens = max(1, min_hit_tokens)
        self._may_load = may_load
        self._may_save = may_save
        self._prefix_caching = prefix_caching
        self._steps = StepTimes(computing, steps_ahead)
        self._waiting: dict[str, WaitingRequest] = {}
        self._loading: dict[str, PendingLoad] = {}
        self._arriving: dict[bytes, str] = {}  # key -> the request whose load brings it
        self._failed: set[str] = set()  # requests of which a load has failed
        self.work = WorkAhead(
            computing, tracked, self._loading, block_tokens=books.block_tokens, whole_groups=books.groups.whole
        )
        self._planned: list[Load] = []  # that no step's plan has yet
        self._cancelled: list[str] = []  # requests that have ended during their load, which no plan has named yet
        self._passages = Passages(shares_rows)
        self.void_until = 0
        self._hit_sources: tuple[str, int, int] = ("", 0, 0)  # of the last load: request, tokens of host, of store

    @property
    def under_way(self) -> dict[str, int]:
        """How many records of each kind there are."""
        return {
            "waiting": len(self._waiting),
            "loading": len(self._loading),
            "arriving": len(self._arriving),
            "passages": self._passages.under_way,
        }

    # What a request may load.

    def wait(self, request: Request) -> WaitingRequest:
        """Unless the request waits already: start its lookup, since it may be long until the engine has room for it,
        and tell other engines what it will compute."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            books = self._books
            options = request_options(request, books.counters)
            if books.spans is not None:
                books.spans.added(request, options.traceparent, prefills=side_of(request) is Side.PREFILL)
            waiting = self._waiting[request.request_id] = WaitingRequest(options)
            usable = len(self._look_up(request, waiting))
            may_save = self._may_save and options.save and options.max_save_tokens is None
            may_save = may_save and not books.sharing.stands_still
            books.hand_overs.add(request, books.keys.of(request), usable, options.wait_s, may_save)
        return waiting

    def _look_up(self, request: Request, waiting: WaitingRequest) -> Sequence[bytes]:
        """See to it that the store is asked. -> the keys of the blocks that may be loaded, never that of the last
        token, which the engine must compute to go on; empty: none."""
        books = self._books
        keys = books.keys.of(request)
        usable = min(len(keys), (request.num_tokens - 1) // books.block_tokens)
        # No second load after a failed one: a store that finds blocks but cannot deliver them would hold the request
        # for ever.
        if (
            not self._may_load
            or books.sharing.stands_still
            or not waiting.options.load
            or usable * books.block_tokens < self._min_hit_tokens
            or request.skip_reading_prefix_cache
            or request.request_id in self._failed
        ):
            self._give_up(waiting)
            return []
        # Ask for the whole chain, also for blocks the engine has: in the store, its head must not age before its tail.
        if waiting.lookup is None or time.monotonic() - waiting.lookup.asked_at > PIN_S:
            self._give_up(waiting)
            waiting.lookup = books.lookups.ask(keys[:usable])
        elif waiting.next_lookup is None and time.monotonic() - waiting.lookup.asked_at > RENEW_S:
            waiting.next_lookup = books.lookups.ask(keys[:usable])
        if waiting.next_lookup is not None and books.lookups.poll(waiting.next_lookup) is not None:
            waiting.lookup, waiting.next_lookup = waiting.next_lookup, None
        return keys[:usable]

    def _give_up(self, waiting: WaitingRequest) -> None:
        for lookup in (waiting.lookup, waiting.next_lookup):
            if lookup is not None:
                self._books.lookups.give_up(lookup)
        waiting.lookup = waiting.next_lookup = None

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """How many tokens are to be loaded beyond the ``computed_tokens`` of the engine's own cache: whole blocks only,
        as far as they arrive sooner than they are computed. None: not known yet, ask again."""
        books, groups = self._books, self._books.groups
        waiting = self.wait(request)
        local = waiting.local = computed_tokens // books.block_tokens
        keys = self._look_up(request, waiting)
        # An engine that does nothing else hears of new weights in a step without tokens. Else the load's check tells.
        if waiting.lookup is not None and not self._tracked and books.sharing.is_unheard(waiting.since):
            return None
        if waiting.lookup is None or (len(keys) - local) * books.block_tokens < self._min_hit_tokens:
            return 0
        handed_over = books.hand_overs.loadable(request)
        chain = handed_over or books.keys.of(request)
        keys = handed_over or keys
        names = groups.keys_of(request, chain)
        if self._prefix_caching and (
            self._awaits(waiting, names, local, len(keys)) or books.hand_overs.follows(request, keys, local)
        ):
            return None
        if (coming := books.hand_overs.coming(request)) is None:
            return None
        in_host = groups.presence(books.tier.find(names[local * groups.count : len(keys) * groups.count]) >= 0)
        stored = books.lookups.poll(waiting.lookup)
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
            present[most // books.block_tokens :] = False
        run = groups.run(present, local)
        here = groups.needed(in_host, local, run)
        from_store = run - int(here.sum())
        waiting.declined = 0
        if from_store and not waiting.waits and not books.hand_overs.is_expected(request):
            least = max(1, groups.whole)  # what is transferred of a block, at least
            first = local + int(np.argmin(here))
            computing_s = self.work.computing_s(request, first * books.block_tokens, (local + run) * books.block_tokens)
            load = self.admission.judge(from_store * least, computing_s)
            if load is None:
                return None
            load = math.ceil(load / least)
            waiting.declined = from_store - load
            if waiting.declined:
                present[int(np.searchsorted(np.cumsum(~here), load, side="right")) :] = False
                run = groups.run(present, local)
        tokens = run * books.block_tokens
        if handed_over:  # perhaps with a block that the prompt fills in part
            tokens = min(tokens, request.num_prompt_tokens - local * books.block_tokens)
        return tokens if tokens >= self._min_hit_tokens else 0

    def _waits_for_lookup(self, request: Request, waiting: WaitingRequest, local: int, end: int) -> bool:
        """Whether to wait for the store to say which of these blocks it has. If not, they are computed."""
        if waiting.lookup is None or self._books.hand_overs.is_expected(request):
            return True
        waited_s = time.monotonic() - waiting.lookup.asked_at
        computing_s = self.work.computing_s(request, local * self._books.block_tokens, end * self._books.block_tokens)
        return waited_s < self.admission.patience_s((end - local) * max(1, self._books.groups.whole), computing_s)

    def _awaits(self, waiting: WaitingRequest, names: Sequence[bytes], local: int, end: int) -> bool:
        """Whether to wait for another request's load, which will put blocks `local` to `end` into the engine's own
        cache for all requests; with a sliding window, only if it has the same end. A request waits for one such load
        only: if that fails, every request loads for itself, since otherwise the last of them would wait for the loads
        of all others in turn."""
        groups = self._books.groups
        tells = (end - 1) * groups.count + groups.last if groups.windows else local * groups.count
        bringer = self._arriving.get(names[tells])
        if bringer is None or waiting.awaited not in (None, bringer):
            return False
        waiting.awaited = bringer
        waiting.hoped_tokens = max(waiting.hoped_tokens, end * self._books.block_tokens)
        return True

    # What is loaded.

    def leave(self, request: Request) -> WaitingRequest | None:
        """The request waits no more: it has blocks, or has ended. None: it did not wait."""
        return self._waiting.pop(request.request_id, None)

    def begin(
        self, request: Request, waiting: WaitingRequest, blocks: KVCacheBlocks, external_tokens: int
    ) -> PendingLoad | None:
        """Plan the load of a request that waited: the engine gave it blocks and relies on ``external_tokens`` being
        loaded there. None: there is nothing to load."""
        books, groups = self._books, self._books.groups
        before_s = self.work.add(request, waiting.local * books.block_tokens)
        books.counters.add("declined_tokens", waiting.declined * books.block_tokens)
        names = groups.keys_of(request, books.hand_overs.loadable(request) or books.keys.of(request))
        wait_s = books.hand_overs.take_wait_s(request)
        if external_tokens <= 0:
            return None
        first, end = waiting.local, waiting.local + math.ceil(external_tokens / books.block_tokens)
        places = list(groups.places(blocks.get_block_ids(), range(first, end)))
        keys = [groups.key_at(names, place) for place in places]
        block_ids = [place.block_id for place in places]
        slots = books.tier.acquire(keys).tolist()
        in_host = [index for index, slot in enumerate(slots) if slot >= 0]
        to_fetch = [index for index, slot in enumerate(slots) if slot < 0]
        load = Load(
            request.request_id,
            host_slots=[slots[index] for index in in_host],
            host_block_ids=[block_ids[index] for index in in_host],
            keys=[keys[index] for index in to_fetch],
            block_ids=[block_ids[index] for index in to_fetch],
        )
        # A block of a window or of states stands for all that is computed before it.
        from_store = len(load.keys) if groups.whole or not load.keys else end - first
        load.slots = self._slots_to_fetch_into(load.keys)
        load.waits = waiting.waits and bool(load.keys)
        if load.waits:
            load.within_s = wait_s
        else:
            from_token = min((places[index].index for index in to_fetch), default=end) * books.block_tokens
            own_s = self.computing.seconds(from_token, end * books.block_tokens)
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
                books.events.note(request, keys[index], places[index].index, places[index].group)
        fetched = {places[index].index for index in to_fetch}
        here = {places[index].index for index in in_host} - fetched
        host_tokens = len(here) * books.block_tokens if fetched else external_tokens
        self._hit_sources = (request.request_id, host_tokens, external_tokens - host_tokens)
        books.counters.add("hit_tokens_cpu", host_tokens)
        books.counters.add("hit_tokens_store", external_tokens - host_tokens)
        return pending

    def hit_sources(self, request: Request) -> tuple[int, int]:
        """How many tokens of the load just planned by `begin` come from the host tier, and from the store."""
        request_id, host, store = self._hit_sources
        return (host, store) if request_id == request.request_id else (0, 0)

    def _slots_to_fetch_into(self, keys: Sequence[bytes]) -> list[int] | None:
        """Slots of the host tier for blocks from the store, so that the tier has them next time. None if the blocks
        would take more than half of the tier, if there is no room, or if one of the blocks is being written already."""
        tier = self._books.tier
        if not tier.keep or not keys or len(keys) > tier.slots // 2:
            return None
        slots = self._books.reserve(keys)
        if (slots < 0).any():
            tier.abort(slots)
            return None
        reserved: list[int] = slots.tolist()
        return reserved

    def plan(self, scheduled_tokens: Mapping[str, int]) -> list[Load]:
        """The engine has planned a step, with so many tokens of each request. -> the loads that begin with it."""
        loads, self._planned = self._passages.admit(self._planned)
        check = self._books.sharing.ask() if loads else 0
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
        """The requests whose loads may end early, since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    # What becomes of a load.

    def lost(self, block_ids: set[int], request_ids: Iterable[str]) -> None:
        """Some rank could not load these blocks of the cache, or any block of these requests."""
        for load in self._loading.values() if block_ids else ():
            load.failed |= block_ids.intersection(load.block_ids)
        for request_id in request_ids:
            if (failed := self._loading.get(request_id)) is not None:
                failed.failed.update(failed.block_ids)

    def end(self, request_id: str) -> PendingLoad | None:
        """All ranks are done with the request's load. None: there was none."""
        load = self._loading.pop(request_id, None)
        if load is None:
            return None
        books, plan = self._books, load.plan
        self._passages.left(request_id)
        if not plan.waits:
            self.admission.end(load.from_store)
        if books.spans is not None:
            books.spans.loaded(request_id, len(load.keys), len(load.failed))
        if books.hand_overs.is_expected(load.request):
            books.counters.add("hand_over_seconds_load", time.monotonic() - load.began)
        books.tier.release(plan.host_slots)
        for key in load.keys:
            if self._arriving.get(key) == request_id:
                del self._arriving[key]
        fetched = list(zip(plan.slots, plan.keys, plan.block_ids, strict=True)) if plan.slots else []
        good = [each for each in fetched if not load.void and each[2] not in load.failed]
        books.tier.commit([slot for slot, _, _ in good])
        books.events.stored([key for _, key, _ in good], MEDIUM_CPU)
        if not load.void:
            for _, key, _ in fetched:
                books.events.forget(key)
            books.tier.link(load.keys, load.parents)
        books.tier.abort([slot for slot, _, block_id in fetched if load.void or block_id in load.failed])
        if load.failed and not load.cancelled:
            books.counters.add("failed_loads")
            books.lookups.forget()
            if request_id in self._tracked:
                self._failed.add(request_id)
        return load

    def forget(self, request: Request) -> None:
        """The request has ended. Its load, if one is under way, may end early."""
        if (waiting := self._waiting.pop(request.request_id, None)) is not None:
            self._give_up(waiting)
        self._failed.discard(request.request_id)
        if (load := self._loading.get(request.request_id)) is not None:
            load.cancelled = True
            self._cancelled.append(request.request_id)

    def reset(self) -> None:
        """What the store was asked for is of no use any more, nor what loads under way bring."""
        for waiting in self._waiting.values():
            self._give_up(waiting)
        for load in self._loading.values():
            load.void = True
        for planned in self._planned:
            planned.check = VOID
        self.void_until = self._passages.last
        self._arriving.clear()
