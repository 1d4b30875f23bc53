"""Decides which blocks are saved. It handles requests with blocks of the engine's cache until the last block is sent.

A save is planned in the step that completes a block. The block is copied to a slot of the host tier and sent from there
to the store; afterwards the slot is free or can be evicted. A request's `next_save` starts at the first block that the
store lacks. So blocks that only the engine has, because the store evicted or lost them, are saved again, and the chain
in the store has no gap.

Saving one block delays the engine's steps about as much as saving twenty. So in the middle of a prompt, blocks are
saved `SAVE_GATHER_S` after the last saves, unless another engine waits for them. Until then, the engine's cache has
them. The cache loses them early only if the request is preempted or aborted. If it is preempted, they are computed and
saved again. If it is aborted, they are saved at that time.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE

from kvstore_client.engine.flights import PROMISE_S
from kvstore_client.engine.paged.plan import SavedBlock, Saves, WorkerReport
from kvstore_client.engine.paged.sends_under_way import SendsUnderWay, Sent
from kvstore_client.engine.transfer_out import SendAs
from kvstore_client.vllm.connector.block_groups import NULL_BLOCK, GroupBlock
from kvstore_client.vllm.connector.hand_over import TAIL_S
from kvstore_client.vllm.connector.pending import (
    PendingCopies,
    PendingLoad,
    TrackedRequest,
    UnplacedBlocks,
    WaitingRequest,
)
from kvstore_client.vllm.connector.planner_state import PlannerState
from kvstore_client.vllm.shared.releases import BlockTables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


# The pause between two saves in the middle of a prompt. A step that takes longer saves all blocks that it completes.
SAVE_GATHER_S: Final = 0.02


class SavePlanner:
    """Owns the records of saves, and of requests that have blocks in the engine's cache. Not thread-safe; never blocks.

    `tracked`: the records of these requests, which other classes only read. `sends`: the blocks that are being sent.
    """

    def __init__(
        self,
        state: PlannerState,
        *,
        ranks: int,
        slices: int,
        save_decode: bool,
        may_save: bool,
        gather_s: float = SAVE_GATHER_S,
    ) -> None:
        """`ranks`: the number of workers, each of which reports every save. `slices`: the number of slices of each
        block in the store. `gather_s`: see `SAVE_GATHER_S`."""
        self.tracked: dict[str, TrackedRequest] = {}
        self._state = state
        self._ranks = ranks
        self._save_decode = save_decode
        self._may_save = may_save
        # Blocks before a window leave the cache in the next step.
        self._gather_s = 0.0 if state.groups.windows else gather_s
        self._saved_at = -math.inf  # the time of the last saves
        self._saves = Saves(job=0)  # the saves of the next step
        self._resent: set[int] = set()  # the slots of blocks that this step only sends
        self._copying: dict[int, PendingCopies] = {}
        self.sends = SendsUnderWay(ranks=ranks, slices=slices)
        self._held: dict[str, int] = {}  # the job until which the engine keeps blocks, by finished request
        self._newly_held: dict[str, int] = {}  # the entries that are in no plan yet
        self._unplaced: dict[str, UnplacedBlocks] = {}

    @property
    def under_way(self) -> dict[str, int]:
        """The number of records of each kind."""
        held = len(self._held) + len(self._unplaced)
        return {"tracked": len(self.tracked), "copying": len(self._copying), "sending": len(self.sends), "held": held}

    @property
    def holds_blocks(self) -> bool:
        """Whether the engine still keeps blocks of finished requests, which will be free soon."""
        return bool(self._held or self._unplaced)

    # Requests.

    def track(self, request: Request, waiting: WaitingRequest, load: PendingLoad | None, external_tokens: int) -> None:
        """Begin to track a request that waited and has blocks now. `load`: its load, of `external_tokens` tokens."""
        tracked = self.tracked[request.request_id] = TrackedRequest(
            request, waiting.options, waiting.lookup, next_save=waiting.local, loading=load is not None
        )
        if waiting.unheard:
            tracked.computes_from = waiting.local + external_tokens // self._state.block_tokens
        self._settle_lookup(tracked)
        if tracked.stored is not None:
            tracked.next_save = tracked.stored
        if load is not None and load.plan.waits:
            # Blocks that another engine sets need not be saved, whatever the store had at the time of the lookup.
            tracked.lookup = tracked.stored = None
            tracked.next_save = waiting.local + external_tokens // self._state.block_tokens

    def loaded(self, request_id: str, *, whole: bool) -> None:
        """Note that the request's load has ended. `whole`: whether all blocks came."""
        if (tracked := self.tracked.get(request_id)) is not None:
            tracked.loading = False
            if not whole:
                tracked.lookup = tracked.stored = None  # the lookup was wrong

    def _settle_lookup(self, tracked: TrackedRequest) -> None:
        """Set `next_save` to the first block that the store lacks, once that is known. Until then, and if the lookup is
        not certain, blocks in the engine's own cache count as saved, because they were saved earlier."""
        lookup = tracked.lookup
        if lookup is None or self._state.lookups.poll(lookup) is None:
            return
        tracked.lookup = None
        if not lookup.certain:
            return
        stored = tracked.stored = lookup.stored or 0
        if tracked.computes_from is None or stored < tracked.computes_from:
            tracked.next_save = min(tracked.next_save, stored)
            return
        self._state.counters.add("declined_tokens", (stored - tracked.computes_from) * self._state.block_tokens)
        tracked.next_save = max(tracked.next_save, stored)

    def save_rest(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan to save the remaining unsaved blocks of a finished request."""
        tracked = self.tracked.get(request.request_id)
        if self._may_save and tracked is not None and not tracked.loading:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            if lost := self._save(tracked, computed, block_ids):
                if self._state.hand_overs.is_handed_over(request):
                    self._unplaced[request.request_id] = UnplacedBlocks(
                        tracked, computed, block_ids, time.monotonic() + PROMISE_S
                    )
                else:
                    self._state.counters.add("dropped_blocks", lost)

    def end(self, request: Request) -> bool:
        """Note that the request has ended. Return whether its blocks are still to be copied. If so, the engine must
        keep them until the workers report the request. (During a load, the engine keeps them anyway.)"""
        request_id, state = request.request_id, self._state
        tracked = self.tracked.pop(request_id, None)
        unplaced = self._unplaced.get(request_id)
        if state.spans is not None:
            handed_over = state.hand_overs.is_handed_over(request)
            state.spans.finished(request_id, state.hand_overs.answered_at(request), sending=handed_over)
        state.hand_overs.finish(request, self._keys_under_way(), whole=unplaced is None)
        if unplaced is not None:
            return True
        if tracked is None or tracked.loading:
            return False
        if tracked.last_job != self._saves.job and tracked.last_job not in self._copying:
            return False
        self._held[request_id] = self._newly_held[request_id] = tracked.last_job
        return True

    @property
    def outdated(self) -> list[str]:
        """The requests whose blocks are no longer saved."""
        return [request_id for request_id, tracked in self.tracked.items() if tracked.outdated]

    def reset(self) -> None:
        """Do not save blocks of present requests any more, and discard those that are on their way to the store."""
        saves = self._saves
        self._state.tier.abort([block.slot for block in saves.copied])
        self._state.tier.release([block.slot for block in saves.sent])
        self._saves, self.sends.void_below = Saves(saves.job), saves.job
        self._resent.clear()
        for tracked in (*self.tracked.values(), *(rest.tracked for rest in self._unplaced.values())):
            tracked.outdated = True
            tracked.last_job = min(tracked.last_job, saves.job - 1)
        for held in (self._held, self._newly_held):
            held.update({request_id: saves.job - 1 for request_id, job in held.items() if job == saves.job})

    # The saves of a step.

    def plan(self, output: SchedulerOutput, tables: BlockTables | None) -> Saves | None:
        """Return the saves of the step that the engine just scheduled. These are the blocks that the step completes,
        and unsaved blocks of finished requests. `tables`: the block tables of the step; None if it has none."""
        if self._may_save and tables is not None:
            gathering = time.monotonic() - self._saved_at < self._gather_s
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self.tracked.get(request_id)
                if tracked is None:
                    continue
                computed = tracked.request.num_computed_tokens + scheduled_tokens
                if gathering and computed < tracked.request.num_tokens and not self._is_handed_over(tracked):
                    continue
                block_ids = tables.block_ids(request_id)
                if block_ids is not None:
                    self._save(tracked, computed, block_ids)
            for request_id, offers in tables.boundary_states.items():
                if (tracked := self.tracked.get(request_id)) is not None:
                    self._save_states(tracked, offers)
        self._place_the_rest()
        if not self._saves:
            return None
        saves, self._saves = self._saves, Saves(job=self._saves.job + 1)
        self._resent.clear()
        saves.check = self._state.sharing.covering
        self._saved_at = time.monotonic()
        if saves.copied:
            self._copying[saves.job] = PendingCopies(saves.copied, self._ranks)
        self.sends.begin(saves)
        return saves

    def _is_handed_over(self, tracked: TrackedRequest) -> bool:
        return self._state.hand_overs.is_handed_over(tracked.request)

    def _save(self, tracked: TrackedRequest, computed_tokens: int, block_ids: Sequence[Sequence[int]]) -> int:
        """Plan to save the unsaved blocks that are complete when `computed_tokens` are computed. Return the number of
        blocks that got no slot, because all slots are being read or written. The next step tries them again."""
        state, groups = self._state, self._state.groups
        if tracked.outdated or state.sharing.stands_still:
            return 0
        request = tracked.request
        self._settle_lookup(tracked)
        first = tracked.next_save
        # After a failed load, the engine computes again from the first missing block on, so saves start there, too.
        # Blocks that it computes although the store has them may be missing in the CPU tier.
        if tracked.stored is None or state.tier.keep:
            first = min(first, request.num_computed_tokens // state.block_tokens)
        # A hash exists only when the block's tokens are final, so draft tokens that may be rejected are never saved.
        chain = state.keys.of(request)
        whole = groups.table_blocks(block_ids, min(computed_tokens // state.block_tokens, len(chain)))
        end = min(whole, self._most_saved(tracked))
        options = tracked.options
        tail = state.hand_overs.tail_to_save(request, computed_tokens)
        if tail is not None and end == computed_tokens // state.block_tokens < min(map(len, block_ids)):
            chain, end = [*chain[:end], tail], end + 1
        if first >= end or not options.save:
            return 0
        how = self._send_as(tracked)
        names = groups.keys_of(request, chain)
        # From this block on, the store lacks blocks that the host tier may have.
        lacking = tracked.stored if state.tier.keep and tracked.stored is not None else end
        complete = []
        for index in range(first, end):
            behind = not groups.complete(block_ids, index)  # before a window
            if not behind:
                complete.append(index)
            for group in range(groups.count) if index >= lacking else ():
                if behind or group in groups.states:
                    self._send_again(request, names, GroupBlock(index, group, NULL_BLOCK), how)
        places = list(groups.in_tables(block_ids, complete))
        keys = [groups.key_at(names, place) for place in places]
        unplaced = 0
        for place, slot in zip(places, state.reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, how if place.index < whole else how._replace(ttl_s=TAIL_S))
            elif not state.tier.is_known(slot):
                unplaced = end - place.index
                end = place.index
                break
            elif place.index >= lacking:
                self._send_again(request, names, place, how)
        if state.spans is not None:
            state.spans.saving(request.request_id)
        if end > whole:
            state.hand_overs.tail_is_saved(request)
        tracked.next_save = max(first, min(end, whole))
        for group in groups.tables:
            state.tier.touch(groups.in_group(names[: end * groups.count], group))
        return unplaced

    def _most_saved(self, tracked: TrackedRequest) -> int:
        """Return how many leading blocks of a request may be saved."""
        most: int = tracked.request.num_tokens
        if not self._save_decode:
            most = tracked.request.num_prompt_tokens
        if tracked.options.max_save_tokens is not None:
            most = min(most, tracked.options.max_save_tokens)
        return most // self._state.block_tokens

    def _send_as(self, tracked: TrackedRequest) -> SendAs:
        options = tracked.options
        return SendAs(options.priority, options.ttl_s, self._is_handed_over(tracked))

    def _save_states(self, tracked: TrackedRequest, offers: Sequence[tuple[int, int, int]]) -> None:
        """Plan to save states that are complete at the end of the step. An offer has a state's group, the block that
        has the state at that time, and the number of tokens that the state covers."""
        state, groups = self._state, self._state.groups
        request = tracked.request
        chain = state.keys.of(request)
        most = min(len(chain), self._most_saved(tracked))
        if not groups.decoded_states:
            most = min(most, request.num_prompt_tokens // state.block_tokens)
        places = [
            GroupBlock(tokens // state.block_tokens - 1, group, block_id)
            for group, block_id, tokens in offers
            if not tokens % state.block_tokens and tokens // state.block_tokens <= most and block_id != NULL_BLOCK
        ]
        if tracked.outdated or state.sharing.stands_still or not tracked.options.save or not places:
            return
        names = groups.keys_of(request, chain)
        keys = [groups.key_at(names, place) for place in places]
        for place, slot in zip(places, state.reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, self._send_as(tracked))
            elif not state.tier.is_known(slot):
                state.counters.add("dropped_blocks")

    def _copy_out(
        self, tracked: TrackedRequest, names: Sequence[bytes], place: GroupBlock, slot: int, how: SendAs
    ) -> None:
        """Plan to copy a block to a slot and then to send it."""
        state, groups = self._state, self._state.groups
        key = groups.key_at(names, place)
        state.events.note(tracked.request, key, place.index, place.group)
        self._saves.copied.append(SavedBlock(key, slot, place.block_id, groups.parent_at(names, place), how))
        tracked.last_job = self._saves.job

    def _send_again(self, request: Request, names: Sequence[bytes], place: GroupBlock, how: SendAs) -> None:
        """Plan to send a block that the store lacks, if the host tier has it."""
        state, groups = self._state, self._state.groups
        key = groups.key_at(names, place)
        [slot] = state.tier.acquire([key]).tolist()
        if slot < 0:  # it is not there, or it is being written and will be sent after that
            return
        if slot in self._resent:
            state.tier.release([slot])
            return
        state.events.note(request, key, place.index, place.group)
        self._resent.add(slot)
        self._saves.sent.append(SavedBlock(key, slot, parent=groups.parent_at(names, place), how=how))

    def _place_the_rest(self) -> None:
        """Plan to save handed-over blocks of finished requests that have no slot yet. After a time limit, drop them."""
        for request_id, rest in list(self._unplaced.items()):
            lost = self._save(rest.tracked, rest.computed_tokens, rest.block_ids)
            if lost and time.monotonic() < rest.until:
                continue
            self._state.counters.add("dropped_blocks", lost)
            del self._unplaced[request_id]
            self._held[request_id] = self._newly_held[request_id] = rest.tracked.last_job
            self._state.hand_overs.placed(rest.tracked.request, self._keys_under_way())

    def _keys_under_way(self) -> Iterator[bytes]:
        """Return the keys of the blocks that are being sent or will be sent."""
        planned = (block.key for block in (*self._saves.copied, *self._saves.sent))
        return itertools.chain(self.sends.keys, planned)

    def take_held(self) -> dict[str, int]:
        """Return the last job of each finished request whose blocks the engine keeps and that is in no plan yet."""
        held, self._newly_held = self._newly_held, {}
        return held

    # The end of saves.

    def update(self, report: WorkerReport) -> None:
        """Process the workers' report of copies that they have made and slots that they have sent."""
        for job, ranks in report.copied.items():
            self._copied(job, ranks, broken=job in report.broken)
        self._sent(self.sends.update(report.released, report.stored))

    def freed(self, request_id: str) -> None:
        """Note that the engine no longer keeps the request's blocks."""
        self._held.pop(request_id, None)

    def _copied(self, job: int, ranks: int, *, broken: bool) -> None:
        state, copying = self._state, self._copying[job]
        copying.ranks_left -= ranks
        copying.broken |= broken
        if copying.ranks_left:
            return
        del self._copying[job]
        is_void = job < self.sends.void_below
        keys, slots = [block.key for block in copying.blocks], [block.slot for block in copying.blocks]
        state.tier.commit(slots)
        if not is_void:
            state.tier.link(keys, [block.parent for block in copying.blocks])
        state.tier.hold(slots)  # until they are sent
        if copying.broken or is_void or not state.tier.keep:
            state.tier.drop(slots)
        else:
            state.events.stored(keys, MEDIUM_CPU)

    def _sent(self, ended: Sequence[Sent]) -> None:
        """Process the blocks that no rank reads any more."""
        state = self._state
        good = [each for each in ended if not each.is_void]
        stored = [each.key for each in good if each.is_stored]
        state.events.stored(stored, MEDIUM_STORAGE)
        for key in stored:
            state.lookups.came(state.groups.of_chain(key))
        state.tier.release([each.slot for each in ended])
        for each in good:
            state.events.forget(each.key)
            state.hand_overs.sent(each.key)
