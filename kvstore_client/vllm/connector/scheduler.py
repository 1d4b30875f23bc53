"""The connector's half beside the engine's scheduler: it decides which blocks are loaded and saved, and in which slots.

What a request may load, and its load, is the `LoadPlanner`'s; what is saved of it is the `SavePlanner`'s. The connector
asks them. Here is what concerns both: a request gets blocks, a step is planned, workers report, a request ends.

Thread: the engine core's, for everything here. Nothing blocks: `PrefixLookups` asks the store in the background.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore_client.engine.admission import Admission
from kvstore_client.engine.computing_pace import ComputingPace
from kvstore_client.vllm.connector.books import Books
from kvstore_client.vllm.connector.held_back import HeldBackTimes
from kvstore_client.vllm.connector.load_planner import LoadPlanner
from kvstore_client.vllm.connector.plan import StepPlan, WorkerReport
from kvstore_client.vllm.connector.save_planner import GATHER_S, SavePlanner

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SchedulerHalf:
    """The decisions and their state: of each request from its first lookup until the engine reports it finished, of
    each load and save until it is done. Not thread-safe; no method blocks."""

    def __init__(
        self,
        books: Books,
        *,
        ranks: int,
        parts: int,
        min_hit_tokens: int,
        save_decode: bool,
        may_load: bool,
        may_save: bool,
        prefix_caching: bool,
        admission: Admission,
        computing: ComputingPace,
        steps_ahead: int,
        gather_s: float = GATHER_S,
        shares_rows: bool = False,
    ) -> None:
        """The arguments are those of the planners."""
        self.books = books
        self.saves = SavePlanner(
            books, ranks=ranks, parts=parts, save_decode=save_decode, may_save=may_save, gather_s=gather_s
        )
        self.loads = LoadPlanner(
            books,
            self.saves.tracked,
            admission=admission,
            computing=computing,
            min_hit_tokens=min_hit_tokens,
            may_load=may_load,
            may_save=may_save,
            prefix_caching=prefix_caching,
            steps_ahead=steps_ahead,
            shares_rows=shares_rows,
        )
        self.held_back = HeldBackTimes()

    @property
    def under_way(self) -> dict[str, int]:
        """How many records of each kind there are; all 0 when the engine is idle and its workers have reported."""
        return {
            **self.loads.under_way,
            **self.saves.under_way,
            "hand_overs": self.books.hand_overs.under_way,
            "held_back": len(self.held_back),
            "busy_slots": self.books.tier.busy,
        }

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """`LoadPlanner.matched_tokens`; how long the request waits for that is measured."""
        tokens = self.loads.matched_tokens(request, computed_tokens)
        if not self.books.hand_overs.knows(request):
            self.held_back.asked(request.request_id, computed_tokens, again=tokens is None)
        return tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave the request blocks and relies on ``external_tokens`` being loaded there."""
        waiting = self.loads.leave(request)
        if waiting is None:  # the engine calls again after the load, when there is nothing to do
            return
        if self.books.spans is not None:
            self.books.spans.allocated(request.request_id, external_tokens)
        end = max(waiting.hoped_tokens, waiting.local * self.books.block_tokens + external_tokens)
        self.held_back.allocated(request.request_id, end, partial(self.loads.computing_s, request))
        load = self.loads.begin(request, waiting, blocks, external_tokens)
        if load is None:
            self._hold_no_longer(request.request_id)
        self.saves.track(request, waiting, load, external_tokens)

    def _hold_no_longer(self, request_id: str) -> None:
        held_back = self.held_back.ended(request_id)
        if held_back is not None and self.books.spans is not None:
            self.books.spans.held_back(request_id, held_back)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that the engine just scheduled, without its saves."""
        self.held_back.step()
        # Loads are taken before anything can fail: if a promised load were lost, its request would be parked for ever.
        return StepPlan(
            loads=self.loads.plan(output.num_scheduled_tokens),
            cancelled=self.loads.take_cancelled(),
            held=self.saves.take_held(),
            reusing=bool(output.preempted_req_ids) or self.books.groups.windows,
            idle=not output.total_num_scheduled_tokens,
        )

    def update(self, output: KVConnectorOutput) -> None:
        """Take in the workers' report of a step."""
        self.loads.lost(output.invalid_block_ids or set(), output.failed_recving or ())
        for request_id in output.finished_recving or ():
            if (load := self.loads.end(request_id)) is not None:
                self._hold_no_longer(request_id)
                self.saves.loaded(request_id, whole=not load.failed)
        for request_id in output.finished_sending or ():
            self.saves.freed(request_id)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.loads.admission.arrived(report.arrived_blocks, report.arriving_seconds)
            self.saves.update(report)

    def finished(self, request: Request) -> bool:
        """Forget the request. True: the engine must keep its blocks until the workers name the request."""
        self.loads.forget(request)
        self.held_back.forget(request.request_id)
        return self.saves.end(request)

    def reset(self) -> None:
        """Make all blocks saved so far unfindable for this engine: the weights may have changed. The blocks of current
        requests are not saved any more."""
        self.books.keys.forget()
        self.books.hand_overs.forget()
        self.books.tier.clear()
        self.books.events.cleared()
        self.loads.reset()
        self.saves.reset()

    def close(self) -> None:
        if self.books.spans is not None:
            self.books.spans.close()
        self.books.hand_overs.close()
        self.books.lookups.close()
