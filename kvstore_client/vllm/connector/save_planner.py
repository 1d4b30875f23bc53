"""Which blocks are saved: of every request that has blocks of the engine's cache, until its last block is sent.

A save is planned in the step that completes a block. Its slot in the host tier is written (copied from the cache),
then read (sent to the store), and free or evictable afterwards. A request's ``next_save`` starts where the store's run
of blocks ends. So blocks that only the engine has (because the store was emptied or evicted them) are saved again, and
the chain in the store has no hole.

A save costs the engine's steps much the same for one block as for twenty. So in the middle of a prompt, whose next step
is sure to come, blocks are saved `GATHER_S` after the last saves, unless another engine waits for them. Until then the
engine's cache has them. Of a request that goes on they leave it only when it is preempted, and then they are computed,
and saved, again; of one that is aborted, they are saved then.
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
from kvstore_client.vllm.connector.block_groups import NULL_BLOCK, Place
from kvstore_client.vllm.connector.books import Books
from kvstore_client.vllm.connector.hand_over import TAIL_S
from kvstore_client.vllm.connector.pending import (
    PendingCopies,
    PendingLoad,
    TrackedRequest,
    UnplacedBlocks,
    WaitingRequest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


# How long after the last saves blocks are saved again. So longer steps save what they complete.
GATHER_S: Final = 0.02


class SavePlanner:
    """Owns the records of requests that have blocks of the engine's cache, and of saves. Not thread-safe; no method
    blocks.

    ``tracked``: those requests; others only read it. ``sends``: the blocks that are being sent.
    """

    def __init__(
        self, books: Books, *, ranks: int, parts: int, save_decode: bool, may_save: bool, gather_s: float = GATHER_S
    ) -> None:
        """ranks: workers, each of which reports on every save. parts: in how many parts the store has each block.
        gather_s: see `GATHER_S`."""
        self.tracked: dict[str, TrackedRequest] = {}
        self._books = books
        self._ranks = ranks
        self._save_decode = save_decode
        self._may_save = may_save
        # Blocks behind a window leave the cache with the next step.
        self._gather_s = 0.0 if books.groups.windows else gather_s
        self._saved_at = -math.inf  # the last saves
        self._saves = Saves(job=0)  # of the next step
        self._resent: set[int] = set()  # the slots of those of its blocks that are only sent
        self._copying: dict[int, PendingCopies] = {}
        self.sends = SendsUnderWay(ranks=ranks, parts=parts)
        self._held: dict[str, int] = {}  # finished requests whose blocks the engine keeps -> until which job
        self._newly_held: dict[str, int] = {}  # those that no plan has named yet
        self._unplaced: dict[str, UnplacedBlocks] = {}

    @property
    def under_way(self) -> dict[str, int]:
        """How many records of each kind there are."""
        return {
            "tracked": len(self.tracked),
            "copying": len(self._copying),
            "sending": len(self.sends),
            "held": len(self._held) + len(self._unplaced),
        }

    @property
    def holds_blocks(self) -> bool:
        """Whether the engine still keeps blocks of finished requests, which will be free soon."""
        return bool(self._held or self._unplaced)

    # Requests.

    def track(self, request: Request, waiting: WaitingRequest, load: PendingLoad | None, external_tokens: int) -> None:
        """A request that waited has blocks. load: of so many tokens."""
        tracked = self.tracked[request.request_id] = TrackedRequest(
            request, waiting.options, waiting.lookup, next_save=waiting.local, loading=load is not None
        )
        if waiting.unheard:
            tracked.computes_from = waiting.local + external_tokens // self._books.block_tokens
        self._settle_lookup(tracked)
        if tracked.stored is not None:
            tracked.next_save = tracked.stored
        if load is not None and load.plan.waits:
            # What another engine sets need not be saved, whatever the store had when it was asked.
            tracked.lookup = tracked.stored = None
            tracked.next_save = waiting.local + external_tokens // self._books.block_tokens

    def loaded(self, request_id: str, *, whole: bool) -> None:
        """The request's load has ended. whole: all blocks came."""
        if (tracked := self.tracked.get(request_id)) is not None:
            tracked.loading = False
            if not whole:
                tracked.lookup = tracked.stored = None  # the lookup was wrong

    def _settle_lookup(self, tracked: TrackedRequest) -> None:
        """Start to save where the store's run of blocks ends, once that is known. Until then, and if the lookup is not
        certain, the blocks in the engine's own cache count as saved: they were saved when they were computed."""
        lookup = tracked.lookup
        if lookup is None or self._books.lookups.poll(lookup) is None:
            return
        tracked.lookup = None
        if not lookup.certain:
            return
        stored = tracked.stored = lookup.stored or 0
        if tracked.computes_from is None or stored < tracked.computes_from:
            tracked.next_save = min(tracked.next_save, stored)
            return
        self._books.counters.add("declined_tokens", (stored - tracked.computes_from) * self._books.block_tokens)
        tracked.next_save = max(tracked.next_save, stored)

    def save_rest(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan to save the blocks that a finished request leaves unsaved."""
        tracked = self.tracked.get(request.request_id)
        if self._may_save and tracked is not None and not tracked.loading:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            if lost := self._save(tracked, computed, block_ids):
                if self._books.hand_overs.is_handed_over(request):
                    self._unplaced[request.request_id] = UnplacedBlocks(
                        tracked, computed, block_ids, time.monotonic() + PROMISE_S
                    )
                else:
                    self._books.counters.add("dropped_blocks", lost)

    def end(self, request: Request) -> bool:
        """The request has ended. True: its blocks are still to be copied, so the engine must keep them until the
        workers name the request. (If a load is under way, the engine keeps the blocks until the workers report its
        end anyway.)"""
        request_id, books = request.request_id, self._books
        tracked = self.tracked.pop(request_id, None)
        unplaced = self._unplaced.get(request_id)
        if books.spans is not None:
            handed_over = books.hand_overs.is_handed_over(request)
            books.spans.finished(request_id, books.hand_overs.answered_at(request), sending=handed_over)
        books.hand_overs.finish(request, self._keys_under_way(), whole=unplaced is None)
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
        """The requests whose blocks are not saved any more."""
        return [request_id for request_id, tracked in self.tracked.items() if tracked.outdated]

    def reset(self) -> None:
        """The blocks of current requests are not saved any more, and what is on its way is not to be sent."""
        saves = self._saves
        self._books.tier.abort([block.slot for block in saves.copied])
        self._books.tier.release([block.slot for block in saves.sent])
        self._saves, self.sends.void_below = Saves(saves.job), saves.job
        self._resent.clear()
        for tracked in (*self.tracked.values(), *(rest.tracked for rest in self._unplaced.values())):
            tracked.outdated = True
            tracked.last_job = min(tracked.last_job, saves.job - 1)
        for held in (self._held, self._newly_held):
            held.update({request_id: saves.job - 1 for request_id, job in held.items() if job == saves.job})

    # What a step saves.

    def plan(self, output: SchedulerOutput) -> Saves | None:
        """The saves of the step that the engine just scheduled: the blocks it completes, and those that finished
        requests left unsaved."""
        if self._may_save and output.kv_connector_block_state is not None:
            gathering = time.monotonic() - self._saved_at < self._gather_s
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self.tracked.get(request_id)
                if tracked is None:
                    continue
                computed = tracked.request.num_computed_tokens + scheduled_tokens
                if gathering and computed < tracked.request.num_tokens and not self._is_handed_over(tracked):
                    continue
                block_ids = output.kv_connector_block_state.get_block_ids(request_id)
                if block_ids is not None:
                    self._save(tracked, computed, block_ids)
            for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
                if (tracked := self.tracked.get(request_id)) is not None:
                    self._save_states(tracked, offers)
        self._place_the_rest()
        if not self._saves:
            return None
        saves, self._saves = self._saves, Saves(job=self._saves.job + 1)
        self._resent.clear()
        saves.check = self._books.sharing.covering
        self._saved_at = time.monotonic()
        if saves.copied:
            self._copying[saves.job] = PendingCopies(saves.copied, self._ranks)
        self.sends.begin(saves)
        return saves

    def _is_handed_over(self, tracked: TrackedRequest) -> bool:
        return self._books.hand_overs.is_handed_over(tracked.request)

    def _save(self, tracked: TrackedRequest, computed_tokens: int, block_ids: Sequence[Sequence[int]]) -> int:
        """Plan to save the blocks that are complete once ``computed_tokens`` are computed and that are not saved yet.
        -> how many blocks found no slot, because all are being read or written; the next step tries those again."""
        books, groups = self._books, self._books.groups
        if tracked.outdated or books.sharing.stands_still:
            return 0
        request = tracked.request
        self._settle_lookup(tracked)
        first = tracked.next_save
        # After a failed load the engine computes again from the first missing block on: go back with it. And what it
        # computes although the store has it, the CPU tier may lack.
        if tracked.stored is None or books.tier.keep:
            first = min(first, request.num_computed_tokens // books.block_tokens)
        # A hash exists once the block's tokens are known, so drafts that may be rejected are never saved.
        chain = books.keys.of(request)
        whole = groups.table_blocks(block_ids, min(computed_tokens // books.block_tokens, len(chain)))
        end = min(whole, self._most_saved(tracked))
        options = tracked.options
        tail = books.hand_overs.tail_to_save(request, computed_tokens)
        if tail is not None and end == computed_tokens // books.block_tokens < min(map(len, block_ids)):
            chain, end = [*chain[:end], tail], end + 1
        if first >= end or not options.save:
            return 0
        how = self._send_as(tracked)
        names = groups.keys_of(request, chain)
        # From here on the store lacks blocks that the host tier may have.
        lacking = tracked.stored if books.tier.keep and tracked.stored is not None else end
        complete = []
        for index in range(first, end):
            behind = not groups.complete(block_ids, index)  # a window
            if not behind:
                complete.append(index)
            for group in range(groups.count) if index >= lacking else ():
                if behind or group in groups.states:
                    self._send_again(request, names, Place(index, group, NULL_BLOCK), how)
        places = list(groups.in_tables(block_ids, complete))
        keys = [groups.key_at(names, place) for place in places]
        unplaced = 0
        for place, slot in zip(places, books.reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, how if place.index < whole else how._replace(ttl_s=TAIL_S))
            elif not books.tier.is_known(slot):
                unplaced = end - place.index
                end = place.index
                break
            elif place.index >= lacking:
                self._send_again(request, names, place, how)
        if books.spans is not None:
            books.spans.saving(request.request_id)
        if end > whole:
            books.hand_overs.tail_is_saved(request)
        tracked.next_save = max(first, min(end, whole))
        for group in groups.tables:
            books.tier.touch(groups.in_group(names[: end * groups.count], group))
        return unplaced

    def _most_saved(self, tracked: TrackedRequest) -> int:
        """How many leading blocks of a request are saved at most."""
        most: int = tracked.request.num_tokens
        if not self._save_decode:
            most = tracked.request.num_prompt_tokens
        if tracked.options.max_save_tokens is not None:
            most = min(most, tracked.options.max_save_tokens)
        return most // self._books.block_tokens

    def _send_as(self, tracked: TrackedRequest) -> SendAs:
        options = tracked.options
        return SendAs(options.priority, options.ttl_s, self._is_handed_over(tracked))

    def _save_states(self, tracked: TrackedRequest, offers: Sequence[tuple[int, int, int]]) -> None:
        """Plan to save states that are complete at the end of the step. offers: what the engine says of each: the
        group, the block that holds it then, and the tokens before it."""
        books, groups = self._books, self._books.groups
        request = tracked.request
        chain = books.keys.of(request)
        most = min(len(chain), self._most_saved(tracked))
        if not groups.decoded_states:
            most = min(most, request.num_prompt_tokens // books.block_tokens)
        places = [
            Place(tokens // books.block_tokens - 1, group, block_id)
            for group, block_id, tokens in offers
            if not tokens % books.block_tokens and tokens // books.block_tokens <= most and block_id != NULL_BLOCK
        ]
        if tracked.outdated or books.sharing.stands_still or not tracked.options.save or not places:
            return
        names = groups.keys_of(request, chain)
        keys = [groups.key_at(names, place) for place in places]
        for place, slot in zip(places, books.reserve(keys).tolist(), strict=True):
            if slot >= 0:
                self._copy_out(tracked, names, place, slot, self._send_as(tracked))
            elif not books.tier.is_known(slot):
                books.counters.add("dropped_blocks")

    def _copy_out(self, tracked: TrackedRequest, names: Sequence[bytes], place: Place, slot: int, how: SendAs) -> None:
        """Plan to copy a block to a slot and to send it."""
        books, groups = self._books, self._books.groups
        key = groups.key_at(names, place)
        books.events.note(tracked.request, key, place.index, place.group)
        self._saves.copied.append(SavedBlock(key, slot, place.block_id, groups.parent_at(names, place), how))
        tracked.last_job = self._saves.job

    def _send_again(self, request: Request, names: Sequence[bytes], place: Place, how: SendAs) -> None:
        """Plan to send a block that the store lacks, if the host tier has it."""
        books, groups = self._books, self._books.groups
        key = groups.key_at(names, place)
        [slot] = books.tier.acquire([key]).tolist()
        if slot < 0:  # or still being written, and sent after that
            return
        if slot in self._resent:
            books.tier.release([slot])
            return
        books.events.note(request, key, place.index, place.group)
        self._resent.add(slot)
        self._saves.sent.append(SavedBlock(key, slot, parent=groups.parent_at(names, place), how=how))

    def _place_the_rest(self) -> None:
        """Save what finished requests hand over and no slot was free for; while nothing is sent, not for ever."""
        for request_id, rest in list(self._unplaced.items()):
            lost = self._save(rest.tracked, rest.computed_tokens, rest.block_ids)
            if lost and time.monotonic() < rest.until:
                continue
            self._books.counters.add("dropped_blocks", lost)
            del self._unplaced[request_id]
            self._held[request_id] = self._newly_held[request_id] = rest.tracked.last_job
            self._books.hand_overs.placed(rest.tracked.request, self._keys_under_way())

    def _keys_under_way(self) -> Iterator[bytes]:
        """Of the blocks that are being sent, or are about to be."""
        planned = (block.key for block in (*self._saves.copied, *self._saves.sent))
        return itertools.chain(self.sends.keys, planned)

    def take_held(self) -> dict[str, int]:
        """Finished requests whose blocks the engine keeps, that no plan has named yet -> until which job."""
        held, self._newly_held = self._newly_held, {}
        return held

    # What becomes of a save.

    def update(self, report: WorkerReport) -> None:
        """Take in which copies the workers have made, and which slots they have sent."""
        for job, ranks in report.copied.items():
            self._copied(job, ranks, broken=job in report.broken)
        self._sent(self.sends.update(report.released, report.stored))

    def freed(self, request_id: str) -> None:
        """The engine keeps the request's blocks no longer."""
        self._held.pop(request_id, None)

    def _copied(self, job: int, ranks: int, *, broken: bool) -> None:
        books, copying = self._books, self._copying[job]
        copying.ranks_left -= ranks
        copying.broken |= broken
        if copying.ranks_left:
            return
        del self._copying[job]
        is_void = job < self.sends.void_below
        keys, slots = [block.key for block in copying.blocks], [block.slot for block in copying.blocks]
        books.tier.commit(slots)
        if not is_void:
            books.tier.link(keys, [block.parent for block in copying.blocks])
        books.tier.hold(slots)  # until they are sent
        if copying.broken or is_void or not books.tier.keep:
            books.tier.drop(slots)
        else:
            books.events.stored(keys, MEDIUM_CPU)

    def _sent(self, ended: Sequence[Sent]) -> None:
        """No rank reads these blocks any more."""
        books = self._books
        good = [each for each in ended if not each.is_void]
        stored = [each.key for each in good if each.is_stored]
        books.events.stored(stored, MEDIUM_STORAGE)
        for key in stored:
            books.lookups.came(books.groups.of_chain(key))
        books.tier.release([each.slot for each in ended])
        for each in good:
            books.events.forget(each.key)
            books.hand_overs.sent(each.key)
