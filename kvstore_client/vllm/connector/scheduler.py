"""The connector's half beside the engine's scheduler: it decides which blocks are loaded and saved, and in which slots.

Thread: the engine core's, for everything here. Nothing blocks: `PrefixLookups` asks the store in the background, and
the engine is told "ask again" (None) until the answer is there or the lookup's deadline has passed.

A load parks its request until all ranks have its blocks. Its record is kept until then, even if the request is
aborted. A block that any rank could not load is missing.

A save is planned in the step that completes a block. Its slot in the host tier is written (copied from the cache),
then read (sent to the store), and free or evictable afterwards. A request's ``next_save`` starts where the store's run
of blocks ends. So blocks that only the engine has (because the store was emptied or evicted them) are saved again, and
the chain in the store has no hole.

Over 400 lines because loads, saves and the workers' reports of both change the same records.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE

from kvstore_client.engine.admission import Admission, StepTimes
from kvstore_client.engine.flights import PROMISE_S
from kvstore_client.engine.guard import Counters
from kvstore_client.engine.lookup import PIN_S, PrefixLookups
from kvstore_client.engine.transfer_out import SendAs
from kvstore_client.vllm.connector.block_groups import NULL_BLOCK, BlockGroups, Place
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.events import KVEvents
from kvstore_client.vllm.connector.hand_over import TAIL_S, HandOvers, Side, side_of
from kvstore_client.vllm.connector.host_tier import HostTier, Slots
from kvstore_client.vllm.connector.pending import (
    PendingCopies,
    PendingLoad,
    TrackedRequest,
    UnplacedBlocks,
    WaitingRequest,
)
from kvstore_client.vllm.connector.plan import Load, Saves, StepPlan, WorkerReport
from kvstore_client.vllm.connector.request_options import request_options
from kvstore_client.vllm.connector.request_spans import RequestSpans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# How old an answer of the store may be before it is asked again. Until the new answer is there the old one counts: what
# was found is pinned for longer.
RENEW_S: Final = PIN_S / 4


class SchedulerHalf:
    """The decisions and their state: of each request from its first lookup until the engine reports it finished, of
    each load and save until it is done. Not thread-safe; no method blocks."""

    def __init__(
        self,
        lookups: PrefixLookups,
        tier: HostTier,
        *,
        ranks: int,
        block_tokens: int,
        min_hit_tokens: int,
        save_decode: bool,
        may_load: bool,
        may_save: bool,
        counters: Counters,
        prefix_caching: bool,
        admission: Admission,
        steps_ahead: int,
        events: KVEvents,
        parts: int,
        groups: BlockGroups,
        hand_overs: HandOvers,
        spans: RequestSpans | None = None,
    ) -> None:
        """ranks: workers, each of which reports on every plan. prefix_caching: whether the engine's own cache shares
        blocks between requests. admission: which loads pay. steps_ahead: how many steps the engine plans
        before it waits for one. parts: in how many parts the store has each block.
        groups: of the engine's cache. hand_overs: prompts that other engines know of. spans: what writes the times of
        requests; None: nobody wants them."""
        self._lookups = lookups
        self._tier = tier
        self._keys = BlockKeys()
        self._ranks = ranks
        self._block_tokens = block_tokens
        self._min_hit_tokens = max(1, min_hit_tokens)
        self._save_decode = save_decode
        self._may_load = may_load
        self._may_save = may_save
        self._counters = counters
        self._prefix_caching = prefix_caching
        self._admission = admission
        self.events = events
        self._parts = parts
        self._groups = groups
        self._hand_overs = hand_overs
        self._spans = spans
        self._prompt_tokens: int | None = None  # see `_tokens_before`; None: not added up yet in this step
        self._steps = StepTimes(self._admission.computing, steps_ahead)
        self._waiting: dict[str, WaitingRequest] = {}
        self._tracked: dict[str, TrackedRequest] = {}
        self._loading: dict[str, PendingLoad] = {}
        self._arriving: dict[bytes, str] = {}  # key -> the request whose load brings it
        self._failed_loads: set[str] = set()
        self._loads: list[Load] = []
        self._saves = Saves(job=0)
        self._copying: dict[int, PendingCopies] = {}
        self._sending: Counter[tuple[int, int]] = Counter()  # (job, slot) -> ranks that still read it
        self._sent_keys: dict[tuple[int, int], bytes] = {}  # of those
        self._stored: Counter[tuple[int, int]] = Counter()  # (job, slot) -> parts that the store has
        self._held: dict[str, int] = {}  # finished requests whose blocks the engine keeps -> until which job
        self._unplaced: dict[str, UnplacedBlocks] = {}
        self._newly_held: dict[str, int] = {}  # those that no plan has named yet
        self._hit_sources: tuple[str, int, int] = ("", 0, 0)  # of the last load: request, tokens of host, of store

    @property
    def under_way(self) -> dict[str, int]:
        """How many records of each kind there are; all 0 when the engine is idle and its workers have reported."""
        return {
            "waiting": len(self._waiting),
            "tracked": len(self._tracked),
            "loading": len(self._loading),
            "arriving": len(self._arriving),
            "copying": len(self._copying),
            "sending": len(self._sending),
            "held": len(self._held) + len(self._unplaced),
            "hand_overs": self._hand_overs.under_way,
            "busy_slots": self._tier.busy,
        }

    # What a request may load.

    def added(self, request: Request) -> None:
        """Start the lookup of a new request: it may be long until the engine has room for it. Tell other engines what
        it will compute."""
        self._wait(request)

    def _wait(self, request: Request) -> WaitingRequest:
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            options = request_options(request, self._counters)
            if self._spans is not None:
                self._spans.added(request, options.traceparent, prefills=side_of(request) is Side.PREFILL)
            waiting = self._waiting[request.request_id] = WaitingRequest(options)
            usable = len(self._look_up(request, waiting))
            may_save = self._may_save and options.save and options.max_save_tokens is None
            self._hand_overs.add(request, self._keys.of(request), usable, options.wait_s, may_save)
        return waiting

    def _look_up(self, request: Request, waiting: WaitingRequest) -> Sequence[bytes]:
        """See to it that the store is asked. -> the keys of the blocks that may be loaded, never that of the last
        token, which the engine must compute to go on; empty: none."""
        keys = self._keys.of(request)
        usable = min(len(keys), (request.num_tokens - 1) // self._block_tokens)
        # No second load after a failed one: a store that finds blocks but cannot deliver them would hold the request
        # for ever.
        if (
            not self._may_load
            or not waiting.options.load
            or usable * self._block_tokens < self._min_hit_tokens
            or request.skip_reading_prefix_cache
            or request.request_id in self._failed_loads
        ):
            waiting.lookup = waiting.next_lookup = None
            return []
        # Ask for the whole chain, also for blocks the engine has: in the store, its head must not age before its tail.
        if waiting.lookup is None:
            waiting.lookup = self._lookups.ask(keys[:usable])
        elif waiting.next_lookup is None and time.monotonic() - waiting.lookup.asked_at > RENEW_S:
            waiting.next_lookup = self._lookups.ask(keys[:usable])
        if waiting.next_lookup is not None and self._lookups.poll(waiting.next_lookup) is not None:
            waiting.lookup, waiting.next_lookup = waiting.next_lookup, None
        return keys[:usable]

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """How many tokens are to be loaded beyond the ``computed_tokens`` of the engine's own cache: whole blocks only,
        as far as they arrive sooner than they are computed. None: not known yet, ask again."""
        waiting = self._wait(request)
        local = waiting.local = computed_tokens // self._block_tokens
        keys = self._look_up(request, waiting)
        if waiting.lookup is None or (len(keys) - local) * self._block_tokens < self._min_hit_tokens:
            return 0
        groups = self._groups
        handed_over = self._hand_overs.loadable(request)
        chain = handed_over or self._keys.of(request)
        keys = handed_over or keys
        names = groups.keys_of(request, chain)
        if self._prefix_caching and (
            self._awaits(waiting, names, local, len(keys)) or self._hand_overs.follows(request, keys, local)
        ):
            return None
        if (coming := self._hand_overs.coming(request)) is None:
            return None
        in_host = groups.presence(self._tier.find(names[local * groups.count : len(keys) * groups.count]) >= 0)
        stored = self._lookups.poll(waiting.lookup)
        if stored is None and not coming and groups.run(in_host, local) < len(in_host):
            return None
        waiting.waits = coming > (stored or 0)
        there = groups.stored(len(in_host), local, max(coming, stored or 0), waiting.lookup.states)
        present = in_host | there
        most = waiting.options.max_load_tokens
        if most is not None:
            present[most // self._block_tokens :] = False
        run = groups.run(present, local)
        here = groups.needed(in_host, local, run)
        from_store = run - int(here.sum())
        waiting.declined = 0
        if from_store and not waiting.waits and not self._hand_overs.is_expected(request):
            least = max(1, groups.whole)  # what is transferred of a block, at least
            load = self._admission.judge(from_store * least, self._tokens_before(request))
            if load is None:
                return None
            load = math.ceil(load / least)
            waiting.declined = from_store - load
            if waiting.declined:
                present[int(np.searchsorted(np.cumsum(~here), load, side="right")) :] = False
                run = groups.run(present, local)
        tokens = run * self._block_tokens
        if handed_over:  # perhaps with a block that the prompt fills in part
            tokens = min(tokens, request.num_prompt_tokens - local * self._block_tokens)
        return tokens if tokens >= self._min_hit_tokens else 0

    def _tokens_before(self, request: Request) -> int:
        """How many tokens the engine would still have to compute of other requests' prompts, had it no store."""
        if self._prompt_tokens is None:
            self._prompt_tokens = sum(map(self._tokens_left, self._tracked.values()))
        mine = self._tracked.get(request.request_id)
        return self._prompt_tokens - (self._tokens_left(mine) if mine is not None else 0)

    def _tokens_left(self, tracked: TrackedRequest) -> int:
        left: int = tracked.request.num_prompt_tokens - tracked.request.num_computed_tokens
        load = self._loading.get(tracked.request.request_id)
        coming = load.from_store // max(1, self._groups.whole) * self._block_tokens if load is not None else 0
        return coming + max(0, left)

    def _awaits(self, waiting: WaitingRequest, names: Sequence[bytes], local: int, end: int) -> bool:
        """Whether to wait for another request's load, which will put blocks `local` to `end` into the engine's own
        cache for all requests; with a sliding window, only if it has the same end. A request waits for one such load
        only: if that fails, every request loads for itself, since otherwise the last of them would wait for the loads
        of all others in turn."""
        groups = self._groups
        tells = (end - 1) * groups.count + groups.last if groups.windows else local * groups.count
        bringer = self._arriving.get(names[tells])
        if bringer is None or waiting.awaited not in (None, bringer):
            return False
        waiting.awaited = bringer
        return True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load: the engine gave the request blocks and relies on ``external_tokens`` being loaded there."""
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is None:  # the engine calls again after the load, when there is nothing to do
            return
        if self._spans is not None:
            self._spans.allocated(request.request_id, external_tokens)
        before = self._tokens_before(request)
        self._prompt_tokens = before + request.num_prompt_tokens - waiting.local * self._block_tokens
        self._counters.add("declined_tokens", waiting.declined * self._block_tokens)
        tracked = self._tracked[request.request_id] = TrackedRequest(
            request, waiting.options, waiting.lookup, next_save=waiting.local
        )
        self._settle_lookup(tracked)
        if tracked.stored is not None:
            tracked.next_save = tracked.stored
        names = self._groups.keys_of(request, self._hand_overs.loadable(request) or self._keys.of(request))
        wait_s = self._hand_overs.take_wait_s(request)
        if external_tokens <= 0:
            return
        first, end = waiting.local, waiting.local + math.ceil(external_tokens / self._block_tokens)
        places = list(self._groups.places(blocks.get_block_ids(), range(first, end)))
        keys = [self._name(names, place) for place in places]
        block_ids = [place.block_id for place in places]
        slots = self._tier.acquire(keys).tolist()
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
        from_store = len(load.keys) if self._groups.whole or not load.keys else end - first
        load.slots = self._slots_to_fetch_into(load.keys)
        load.waits = waiting.waits and bool(load.keys)
        if load.waits:
            load.within_s = wait_s
            # What another engine sets need not be saved, whatever the store had when it was asked.
            tracked.lookup = tracked.stored = None
            tracked.next_save = (first * self._block_tokens + external_tokens) // self._block_tokens
        else:
            load.within_s = self._admission.begin(from_store, before)
        self._loads.append(load)
        self._arriving.update(dict.fromkeys(keys, request.request_id))
        self._loading[request.request_id] = PendingLoad(
            keys,
            [self._parent(names, place) for place in places],
            block_ids,
            load.host_slots,
            load.slots or [],
            load.block_ids if load.slots else [],
            load.keys if load.slots else [],
            from_store,
            load.waits,
            time.monotonic(),
        )
        if load.slots:
            for index in to_fetch:
                self.events.note(request, keys[index], places[index].index, places[index].group)
        fetched = {places[index].index for index in to_fetch}
        here = {places[index].index for index in in_host} - fetched
        host_tokens = len(here) * self._block_tokens if fetched else external_tokens
        self._hit_sources = (request.request_id, host_tokens, external_tokens - host_tokens)
        self._counters.add("hit_tokens_cpu", host_tokens)
        self._counters.add("hit_tokens_store", external_tokens - host_tokens)

    def _name(self, names: Sequence[bytes], place: Place) -> bytes:
        return names[place.index * self._groups.count + place.group]

    def _parent(self, names: Sequence[bytes], place: Place) -> bytes | None:
        """The block that it follows in its chain; states follow the block of tokens behind which they are."""
        if place.group in self._groups.states:
            tables = self._groups.tables
            return self._name(names, replace(place, group=tables[0])) if tables else None
        return names[(place.index - 1) * self._groups.count + place.group] if place.index else None

    def hit_sources(self, request: Request) -> tuple[int, int]:
        """How many tokens of the load just planned by `allocated` come from the host tier, and from the store."""
        request_id, host, store = self._hit_sources
        return (host, store) if request_id == request.request_id else (0, 0)

    def _slots_to_fetch_into(self, keys: Sequence[bytes]) -> list[int] | None:
        """Slots of the host tier for blocks from the store, so that the tier has them next time. None if the blocks
        would take more than half of the tier, if there is no room, or if one of the blocks is being written already."""
        if not self._tier.keep or not keys or len(keys) > self._tier.slots // 2:
            return None
        slots = self._reserve(keys)
        if (slots < 0).any():
            self._tier.abort(slots)
            return None
        reserved: list[int] = slots.tolist()
        return reserved

    def _reserve(self, keys: Sequence[bytes]) -> Slots:
        slots = self._tier.reserve(keys)
        self.events.evicted(self._tier.take_evicted())
        return slots

    # What a step saves.

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that the engine just scheduled, without its saves."""
        self._steps.plan(output.num_scheduled_tokens)
        self._prompt_tokens = None
        plan = StepPlan(
            reusing=bool(output.preempted_req_ids) or self._groups.windows,
            idle=not output.total_num_scheduled_tokens,
        )
        # Loads are taken before anything can fail: if a promised load were lost, its request would be parked for ever.
        plan.loads, self._loads = self._loads, []
        plan.held, self._newly_held = self._newly_held, {}
        return plan

    def plan_saves(self, output: SchedulerOutput) -> Saves | None:
        """The saves of that step: the blocks it completes, and those that finished requests left unsaved."""
        if self._may_save and output.kv_connector_block_state is not None:
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                block_ids = output.kv_connector_block_state.get_block_ids(request_id)
                if tracked is not None and block_ids is not None:
                    self._save(tracked, tracked.request.num_computed_tokens + scheduled_tokens, block_ids)
            for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
                if (tracked := self._tracked.get(request_id)) is not None:
                    self._save_states(tracked, offers)
        self._place_the_rest()
        saves, self._saves = self._saves, Saves(job=self._saves.job + 1)
        if not saves:
            return None
        if saves.slots:
            self._copying[saves.job] = PendingCopies(saves.keys, saves.parents, saves.slots, self._ranks)
        for keys, slots in ((saves.keys, saves.slots), (saves.send_keys, saves.send_slots)):
            for key, slot in zip(keys, slots, strict=True):
                self._sending[saves.job, slot] = self._ranks
                self._sent_keys[saves.job, slot] = key
        return saves

    def _save(self, tracked: TrackedRequest, computed_tokens: int, block_ids: Sequence[Sequence[int]]) -> int:
        """Plan to save the blocks that are complete once ``computed_tokens`` are computed and that are not saved yet.
        -> how many blocks found no slot, because all are being read or written; the next step tries those again."""
        if tracked.outdated:
            return 0
        request = tracked.request
        self._settle_lookup(tracked)
        # After a failed load the engine computes again from the first missing block on: go back with it.
        first = min(tracked.next_save, request.num_computed_tokens // self._block_tokens)
        # A hash exists once the block's tokens are known, so drafts that may be rejected are never saved.
        chain = self._keys.of(request)
        whole = self._groups.table_blocks(block_ids, min(computed_tokens // self._block_tokens, len(chain)))
        end = min(whole, self._most_saved(tracked))
        options = tracked.options
        tail = self._hand_overs.tail_to_save(request, computed_tokens)
        if tail is not None and end == computed_tokens // self._block_tokens < min(map(len, block_ids)):
            chain, end = [*chain[:end], tail], end + 1
        if first >= end or not options.save:
            return 0
        how = self._send_as(tracked)
        names = self._groups.keys_of(request, chain)
        # From here on the store lacks blocks that the host tier may have.
        lacking = tracked.stored if self._tier.keep and tracked.stored is not None else end
        complete = []
        for index in range(first, end):
            behind = not self._groups.complete(block_ids, index)  # a window
            if not behind:
                complete.append(index)
            for group in range(self._groups.count) if index >= lacking else ():
                if behind or group in self._groups.states:
                    self._send_again(request, names, Place(index, group, NULL_BLOCK), how)
        places = list(self._groups.in_tables(block_ids, complete))
        keys = [self._name(names, place) for place in places]
        unplaced = 0
        for place, slot in zip(places, self._reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, how if place.index < whole else how._replace(ttl_s=TAIL_S))
            elif not self._tier.is_known(slot):
                unplaced = end - place.index
                end = place.index
                break
            elif place.index >= lacking:
                self._send_again(request, names, place, how)
        if self._spans is not None:
            self._spans.saving(request.request_id)
        if end > whole:
            self._hand_overs.tail_is_saved(request)
        tracked.next_save = max(first, min(end, whole))
        for group in self._groups.tables:
            self._tier.touch(self._groups.in_group(names[: end * self._groups.count], group))
        return unplaced

    def _most_saved(self, tracked: TrackedRequest) -> int:
        """How many leading blocks of a request are saved at most."""
        most: int = tracked.request.num_tokens
        if not self._save_decode:
            most = tracked.request.num_prompt_tokens
        if tracked.options.max_save_tokens is not None:
            most = min(most, tracked.options.max_save_tokens)
        return most // self._block_tokens

    def _send_as(self, tracked: TrackedRequest) -> SendAs:
        options = tracked.options
        return SendAs(options.priority, options.ttl_s, self._hand_overs.is_handed_over(tracked.request))

    def _save_states(self, tracked: TrackedRequest, offers: Sequence[tuple[int, int, int]]) -> None:
        """Plan to save states that are complete at the end of the step. offers: what the engine says of each: the
        group, the block that holds it then, and the tokens before it."""
        request = tracked.request
        chain = self._keys.of(request)
        most = min(len(chain), self._most_saved(tracked))
        if not self._groups.decoded_states:
            most = min(most, request.num_prompt_tokens // self._block_tokens)
        places = [
            Place(tokens // self._block_tokens - 1, group, block_id)
            for group, block_id, tokens in offers
            if not tokens % self._block_tokens and tokens // self._block_tokens <= most and block_id != NULL_BLOCK
        ]
        if tracked.outdated or not tracked.options.save or not places:
            return
        names = self._groups.keys_of(request, chain)
        keys = [self._name(names, place) for place in places]
        for place, slot in zip(places, self._reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, self._send_as(tracked))
            elif not self._tier.is_known(slot):
                self._counters.add("dropped_blocks")

    def _copy_out(self, tracked: TrackedRequest, names: Sequence[bytes], place: Place, slot: int, how: SendAs) -> None:
        """Plan to copy a block to a slot and to send it."""
        key = self._name(names, place)
        self.events.note(tracked.request, key, place.index, place.group)
        self._saves.keys.append(key)
        self._saves.parents.append(self._parent(names, place))
        self._saves.how.append(how)
        self._saves.block_ids.append(place.block_id)
        self._saves.slots.append(slot)
        tracked.last_job = self._saves.job

    def _place_the_rest(self) -> None:
        """Save what finished requests hand over and no slot was free for; while nothing is sent, not for ever."""
        for request_id, rest in list(self._unplaced.items()):
            lost = self._save(rest.tracked, rest.computed_tokens, rest.block_ids)
            if lost and time.monotonic() < rest.until:
                continue
            self._counters.add("dropped_blocks", lost)
            del self._unplaced[request_id]
            self._held[request_id] = self._newly_held[request_id] = rest.tracked.last_job
            self._hand_overs.placed(rest.tracked.request, self._keys_under_way())

    def _keys_under_way(self) -> Iterator[bytes]:
        """Of the blocks that are being sent, or are about to be."""
        return itertools.chain(self._sent_keys.values(), self._saves.keys, self._saves.send_keys)

    def _settle_lookup(self, tracked: TrackedRequest) -> None:
        """Start to save where the store's run of blocks ends, once that is known. Until then, and if the lookup is not
        certain, the blocks in the engine's own cache count as saved: they were saved when they were computed."""
        lookup = tracked.lookup
        if lookup is None or self._lookups.poll(lookup) is None:
            return
        tracked.lookup = None
        if lookup.certain:
            tracked.stored = lookup.stored or 0
            tracked.next_save = min(tracked.next_save, tracked.stored)

    def _send_again(self, request: Request, names: Sequence[bytes], place: Place, how: SendAs) -> None:
        """Plan to send a block that the store lacks, if the host tier has it."""
        key = self._name(names, place)
        [slot] = self._tier.acquire([key]).tolist()
        if slot < 0:  # or still being written, and sent after that
            return
        if slot in self._saves.send_slots:
            self._tier.release([slot])
            return
        self.events.note(request, key, place.index, place.group)
        self._saves.send_keys.append(key)
        self._saves.send_parents.append(self._parent(names, place))
        self._saves.send_how.append(how)
        self._saves.send_slots.append(slot)

    # What the workers report.

    def update(self, output: KVConnectorOutput) -> None:
        """Take in the workers' report of a step."""
        for load in self._loading.values():
            if output.invalid_block_ids:
                load.failed.update(output.invalid_block_ids.intersection(load.block_ids))
        for request_id in output.failed_recving or ():
            if (failed := self._loading.get(request_id)) is not None:
                failed.failed.update(failed.block_ids)
        for request_id in output.finished_recving or ():
            self._loaded(request_id)
        for request_id in output.finished_sending or ():
            self._held.pop(request_id, None)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._admission.arrived(report.arrived_blocks, report.arriving_seconds)
            for job, ranks in report.copied.items():
                self._copied(job, ranks, broken=job in report.broken)
            self._stored.update(report.stored)
            for sent, ranks in report.released.items():
                self._released(sent, ranks)

    def _loaded(self, request_id: str) -> None:
        load = self._loading.pop(request_id, None)
        if load is None:
            return
        if not load.waits:
            self._admission.end(load.from_store)
        if self._spans is not None:
            self._spans.loaded(request_id, len(load.keys), len(load.failed))
        tracked = self._tracked.get(request_id)
        if tracked is not None and self._hand_overs.is_expected(tracked.request):
            self._counters.add("hand_over_seconds_load", time.monotonic() - load.began)
        self._tier.release(load.held)
        for key in load.keys:
            if self._arriving.get(key) == request_id:
                del self._arriving[key]
        good = [block_id not in load.failed for block_id in load.fetched_block_ids]
        self._tier.commit([slot for slot, is_good in zip(load.fetched, good, strict=True) if is_good])
        self.events.stored([key for key, is_good in zip(load.fetched_keys, good, strict=True) if is_good], MEDIUM_CPU)
        for key in load.fetched_keys:
            self.events.forget(key)
        self._tier.link(load.keys, load.parents)
        self._tier.abort([slot for slot, is_good in zip(load.fetched, good, strict=True) if not is_good])
        if not load.failed:
            return
        self._counters.add("failed_loads")
        self._lookups.forget()
        if tracked is not None:
            self._failed_loads.add(request_id)
            tracked.lookup = tracked.stored = None  # the lookup was wrong

    def _copied(self, job: int, ranks: int, *, broken: bool) -> None:
        copying = self._copying[job]
        copying.ranks_left -= ranks
        copying.broken |= broken
        if copying.ranks_left:
            return
        del self._copying[job]
        self._tier.commit(copying.slots)
        self._tier.link(copying.keys, copying.parents)
        self._tier.hold(copying.slots)  # until they are sent
        if copying.broken or not self._tier.keep:
            self._tier.drop(copying.slots)
        else:
            self.events.stored(copying.keys, MEDIUM_CPU)

    def _released(self, sent: tuple[int, int], ranks: int) -> None:
        self._sending[sent] -= ranks
        if not self._sending[sent]:
            del self._sending[sent]
            key = self._sent_keys.pop(sent)
            if self._stored.pop(sent, 0) >= self._parts:
                self.events.stored([key], MEDIUM_STORAGE)
                self._lookups.came(self._groups.of_chain(key))
            self.events.forget(key)
            self._tier.release([sent[1]])
            self._hand_overs.sent(key)

    # The end of a request.

    def save_rest(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan to save the blocks that a finished request leaves unsaved."""
        tracked = self._tracked.get(request.request_id)
        if self._may_save and tracked is not None and request.request_id not in self._loading:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            if lost := self._save(tracked, computed, block_ids):
                if self._hand_overs.is_handed_over(request):
                    self._unplaced[request.request_id] = UnplacedBlocks(
                        tracked, computed, block_ids, time.monotonic() + PROMISE_S
                    )
                else:
                    self._counters.add("dropped_blocks", lost)

    def finished(self, request: Request) -> bool:
        """Forget the request. True: its blocks are still to be copied, so the engine must keep them until the workers
        name the request. (If a load is under way, the engine keeps the blocks until the workers report its end
        anyway.)"""
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._failed_loads.discard(request_id)
        unplaced = self._unplaced.get(request_id)
        if self._spans is not None:
            handed_over = self._hand_overs.is_handed_over(request)
            self._spans.finished(request_id, self._hand_overs.answered_at(request), sending=handed_over)
        self._hand_overs.finish(request, self._keys_under_way(), whole=unplaced is None)
        if unplaced is not None:
            return True
        if tracked is None or request_id in self._loading:
            return False
        if tracked.last_job != self._saves.job and tracked.last_job not in self._copying:
            return False
        self._held[request_id] = self._newly_held[request_id] = tracked.last_job
        return True

    def reply(self, request: Request) -> dict[str, Any] | None:
        """What the answer to a request that is about to be `finished` says of its blocks."""
        return self._hand_overs.reply(request)

    @property
    def holds_blocks(self) -> bool:
        """Whether the engine still keeps blocks of finished requests, which will be free soon."""
        return bool(self._held or self._unplaced)

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must go on with steps although it has no request: others wait for what they tell."""
        return self._hand_overs.ending

    def reset(self) -> None:
        """Make all blocks saved so far unfindable for this engine: the weights may have changed. The blocks of current
        requests are not saved any more."""
        self._keys.forget()
        self._hand_overs.forget()
        self._tier.clear()
        self.events.cleared()
        for waiting in self._waiting.values():
            waiting.lookup = waiting.next_lookup = None
        for tracked in self._tracked.values():
            tracked.outdated = True

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()
        self._hand_overs.close()
        self._lookups.close()
