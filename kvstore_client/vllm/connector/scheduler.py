"""The connector's half beside the engine's scheduler: it decides which blocks are loaded and saved, and in which slots.

What a request may load, and its load, is the `LoadPlanner`'s; what is saved of it is the `SavePlanner`'s. The connector
asks them. Here is what concerns both: a request gets blocks, a step is planned, workers report, a request ends.

Thread: the engine core's, for everything here. Nothing blocks: `PrefixLookups` asks the store in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstore_client.engine.block_names import NOT_SHARED, BlockNames
from kvstore_client.engine.guard import Purges
from kvstore_client.engine.paged.plan import StepPlan, WorkerReport
from kvstore_client.engine.paged.sharing import salt_name
from kvstore_client.vllm.connector.block_groups import NULL_BLOCK
from kvstore_client.vllm.connector.books import Books
from kvstore_client.vllm.connector.engine_cache import EngineCache
from kvstore_client.vllm.connector.held_back import HeldBackTimes
from kvstore_client.vllm.connector.load_planner import LoadPlanner
from kvstore_client.vllm.connector.save_planner import SavePlanner

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

HOW_TO_NAME = (
    "name them in all workers, with collective_rpc('kvstore_new_weights', args=('NAME',)) or POST /kvstore/weights"
)


class SchedulerHalf:
    """The decisions and their state: of each request from its first lookup until the engine reports it finished, of
    each load and save until it is done. Not thread-safe; no method blocks."""

    def __init__(
        self,
        books: Books,
        saves: SavePlanner,
        loads: LoadPlanner,
        *,
        cache: EngineCache | None = None,
        purges: Purges | None = None,
        names_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """cache: the engine's own. purges: what tells of them. names_changed: is told that `block_names` may be others
        now; it must not raise."""
        self.books = books
        self.saves = saves
        self.loads = loads
        self._cache = cache or EngineCache()
        self._purges = purges or Purges()
        self._names_changed = names_changed
        self._reset = False  # and no check has agreed since
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

    def block_names(self, adapter: str = "") -> BlockNames:
        """How this engine names its blocks at this moment. Any thread may ask."""
        sharing = self.books.sharing
        if sharing.stands_still:
            return BlockNames(NOT_SHARED)
        return BlockNames.of(self._purges.now(), salt_name(sharing), adapter)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """`LoadPlanner.matched_tokens`; how long the request waits for that is measured."""
        if self.notice_purge():  # the engine may just have found blocks of before in its own cache: let it look again
            return None
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
        self.held_back.allocated(request.request_id, end, partial(self.loads.work.computing_s, request))
        is_outdated = self._has_outdated(request, blocks)
        load = self.loads.begin(request, waiting, blocks, external_tokens)
        if load is None:
            self._hold_no_longer(request.request_id)
        self.saves.track(request, waiting, load, external_tokens)
        if is_outdated:
            self.saves.tracked[request.request_id].outdated = True

    def _has_outdated(self, request: Request, blocks: KVCacheBlocks) -> bool:
        """Whether some of a request's blocks are an outdated one's, which the engine found in its own cache before they
        could be taken out."""
        outdated = [each for each in self.saves.outdated if each != request.request_id]
        if not outdated:
            return False
        mine = {block for group in blocks.get_block_ids() for block in group}
        return any(mine & self._cache.blocks_of(request_id) - {NULL_BLOCK} for request_id in outdated)

    def _hold_no_longer(self, request_id: str) -> None:
        held_back = self.held_back.ended(request_id)
        if held_back is not None and self.books.spans is not None:
            self.books.spans.held_back(request_id, held_back)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that the engine just scheduled, without its saves; `complete` is to follow."""
        self.held_back.step()
        # Loads are taken before anything can fail: if a promised load were lost, its request would be parked for ever.
        return StepPlan(
            loads=self.loads.plan(output.num_scheduled_tokens),
            cancelled=self.loads.take_cancelled(),
            held=self.saves.take_held(),
            reusing=bool(output.preempted_req_ids) or self.books.groups.windows,
            idle=not output.total_num_scheduled_tokens,
            void_jobs=self.saves.sends.void_below,
            void_loads=self.loads.void_until,
        )

    def complete(self, plan: StepPlan) -> None:
        """The plan has its saves: have a check of the weights made with it, if one is due."""
        if plan.saves is not None:
            plan.saves.generations = self._purges.known
        self.books.sharing.plan(plan, hurries=bool(self.books.hand_overs.under_way))
        if outdated := self.saves.outdated:  # the engine has put into its cache what they fill in this step
            self._cache.evict_of(outdated)

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
            self._update_sharing(report)

    def _update_sharing(self, report: WorkerReport) -> None:
        sharing = self.books.sharing
        before = sharing.agreed
        sharing.take(report)
        if sharing.has_changed(report):
            self.drop_all()
            logger.warning(
                "kvstore: the weights are not those any more that the blocks in the store are named for, so from now "
                "on nothing is loaded or saved. To share again, %s",
                HOW_TO_NAME,
            )
        if (name := sharing.new_name()) is not None:
            self.books.keys.name_weights(salt_name(sharing))
            self.drop_all()
            logger.info("kvstore: the weights are called %s, and blocks are shared under that name", name)
        elif sharing.is_restored():
            self.drop_all()
            logger.info("kvstore: the weights are again those that the blocks are named for: blocks are shared again")
        elif self._reset and sharing.agreed > before and not sharing.stopped:
            logger.info("kvstore: the weights are the same as before the reset: blocks are shared again")
            self._reset = False

    def finished(self, request: Request) -> bool:
        """Forget the request. True: the engine must keep its blocks until the workers name the request."""
        self.loads.forget(request)
        self.held_back.forget(request.request_id)
        tracked = self.saves.tracked.get(request.request_id)
        if tracked is not None and tracked.outdated:
            self._cache.evict_of([request.request_id])
        return self.saves.end(request)

    def reset(self) -> None:
        """vLLM has reset the connector's cache, perhaps because the weights have changed: drop everything, and go on if
        they have not. If that cannot be told, go on only if the operator has named them, and so promised it."""
        sharing = self.books.sharing
        if not self._cache.is_empty:
            logger.info(
                "kvstore: vLLM could not reset its own cache, as requests run. Their blocks are not used for other "
                "requests, and not saved"
            )
        self.drop_all()
        if sharing.checks:
            self._reset = True
            sharing.distrust()
            if not sharing.stopped:
                logger.info(
                    "kvstore: the engine's cache was reset, and what it held of the store with it. Blocks are shared "
                    "again if the next step finds the weights unchanged"
                )
        elif sharing.name and sharing.name == sharing.first_name:  # the option's
            logger.info("kvstore: the engine's cache was reset; blocks of weights %s are still shared", sharing.name)
        elif not sharing.stopped:
            sharing.stop()
            logger.warning(
                "kvstore: the engine's cache was reset, perhaps for new weights, and the weights cannot be looked at, "
                "so from now on nothing is loaded or saved. To share again, %s. If the weights never change while the "
                "engine runs, name them with the option weights_version",
                HOW_TO_NAME,
            )

    def notice_purge(self) -> bool:
        """If somebody has purged the store since the last call, drop everything. -> whether that was so."""
        if not self._purges.noticed():
            return False
        self.drop_all()
        logger.info("kvstore: the store was purged, so what this engine held of it, and in its own caches, is dropped")
        return True

    def drop_all(self) -> None:
        """Forget everything that this engine holds and believes, because what it depends on has changed: its CPU tier,
        what waits to be sent, loads under way, what the store was found to have, its promises, and the engine's own
        cache. Requests that run go on with their blocks, which are neither saved nor found by others."""
        self.books.hand_overs.forget()
        self.books.lookups.forget()
        self.books.tier.clear()
        self.books.events.cleared()
        self.loads.reset()
        self.saves.reset()
        self._cache.evict_all()
        self._names_changed()

    def close(self) -> None:
        if self.books.spans is not None:
            self.books.spans.close()
        self.books.hand_overs.close()
        self.books.lookups.close()
