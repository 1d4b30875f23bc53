"""The connector's half next to the engine's scheduler. It decides which blocks are loaded and saved, and which slots
they use.

The `LoadPlanner` decides what a request may load, and plans its load. The `SavePlanner` decides which of its blocks are
saved. The connector calls both planners directly. This module handles the events that concern both: a request gets
blocks, a step is planned, workers report, or a request ends.

Only the engine core's thread uses this module. No call blocks, because `PrefixLookups` asks the store in the
background.
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
from kvstore_client.vllm.connector.engine_cache import EngineCache
from kvstore_client.vllm.connector.held_back import HeldBackTimes
from kvstore_client.vllm.connector.load_planner import LoadPlanner
from kvstore_client.vllm.connector.planner_state import PlannerState
from kvstore_client.vllm.connector.save_planner import SavePlanner
from kvstore_client.vllm.shared.releases import failed_requests

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
    """Decides which blocks are loaded and saved, and keeps the records of requests, loads and saves. The state of a
    request is kept from its first lookup until the engine reports its end, and the state of each load and save until it
    has ended. Not thread-safe. No method blocks."""

    def __init__(
        self,
        state: PlannerState,
        saves: SavePlanner,
        loads: LoadPlanner,
        *,
        cache: EngineCache | None = None,
        purges: Purges | None = None,
        names_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`cache`: the engine's own cache. `purges`: notices purges of the store. `names_changed`: a function that is
        called when `block_names` may have changed. It must not raise."""
        self.state = state
        self.saves = saves
        self.loads = loads
        self._cache = cache or EngineCache()
        self._purges = purges or Purges()
        self._names_changed = names_changed
        self._reset = False  # whether a check of the weights must still follow a reset
        self.held_back = HeldBackTimes()

    @property
    def under_way(self) -> dict[str, int]:
        """The number of records of each kind. All are 0 when the engine is idle and its workers have reported."""
        return {
            **self.loads.under_way,
            **self.saves.under_way,
            "hand_overs": self.state.hand_overs.under_way,
            "held_back": len(self.held_back),
            "busy_slots": self.state.tier.busy,
        }

    def block_names(self, adapter: str = "") -> BlockNames:
        """Return how this engine names its blocks at present. Any thread may call this."""
        sharing = self.state.sharing
        if sharing.stands_still:
            return BlockNames(NOT_SHARED)
        return BlockNames.of(self._purges.now(), salt_name(sharing), adapter)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return the result of `LoadPlanner.matched_tokens`, and measure how long the request waits for it."""
        if self.notice_purge():  # the engine may have found older blocks in its cache, so it must query again
            return None
        tokens = self.loads.matched_tokens(request, computed_tokens)
        if not self.state.hand_overs.knows(request):
            self.held_back.asked(request.request_id, computed_tokens, again=tokens is None)
        return tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Note that the engine gave blocks to the request. The engine relies on `external_tokens` tokens being loaded
        into them."""
        waiting = self.loads.leave(request)
        if waiting is None:  # the engine calls this again after the load, when there is nothing to do
            return
        if self.state.spans is not None:
            self.state.spans.allocated(request.request_id, external_tokens)
        end = max(waiting.hoped_tokens, waiting.local * self.state.block_tokens + external_tokens)
        self.held_back.allocated(request.request_id, end, partial(self.loads.work.computing_s, request))
        is_outdated = self._has_outdated(request, blocks)
        load = self.loads.begin(request, waiting, blocks, external_tokens)
        if load is None:
            self._hold_no_longer(request.request_id)
        self.saves.track(request, waiting, load, external_tokens)
        if is_outdated:
            self.saves.tracked[request.request_id].outdated = True

    def _has_outdated(self, request: Request, blocks: KVCacheBlocks) -> bool:
        """Return whether some of a request's blocks belong to an outdated request. The engine may have found such
        blocks in its own cache before they could be removed."""
        outdated = [each for each in self.saves.outdated if each != request.request_id]
        if not outdated:
            return False
        mine = {block for group in blocks.get_block_ids() for block in group}
        return any(mine & self._cache.blocks_of(request_id) - {NULL_BLOCK} for request_id in outdated)

    def _hold_no_longer(self, request_id: str) -> None:
        held_back = self.held_back.ended(request_id)
        if held_back is not None and self.state.spans is not None:
            self.state.spans.held_back(request_id, held_back)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Return the plan of the step that the engine just scheduled, without the step's saves. The caller must then
        add the saves and call `complete`."""
        self.held_back.step()
        # Loads are taken before anything can fail, because if a promised load were lost, its request would wait
        # forever.
        return StepPlan(
            loads=self.loads.plan(output.num_scheduled_tokens),
            cancelled=self.loads.take_cancelled(),
            held=self.saves.take_held(),
            reusing=bool(output.preempted_req_ids) or self.state.groups.windows,
            idle=not output.total_num_scheduled_tokens,
            void_jobs=self.saves.sends.void_below,
            void_loads=self.loads.void_until,
        )

    def complete(self, plan: StepPlan) -> None:
        """Complete a plan that has its saves, and add a check of the weights if one is due."""
        if plan.saves is not None:
            plan.saves.generations = self._purges.known
        self.state.sharing.plan(plan, hurries=bool(self.state.hand_overs.under_way))
        if outdated := self.saves.outdated:  # the engine's cache now has blocks that these requests fill in this step
            self._cache.evict_of(outdated)

    def update(self, output: KVConnectorOutput) -> None:
        """Process the workers' report of a step."""
        self.loads.lost(output.invalid_block_ids or set(), failed_requests(output))
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
        sharing = self.state.sharing
        before = sharing.agreed
        sharing.take(report)
        if sharing.has_changed(report):
            self.drop_all()
            logger.warning(
                "kvstore: the weights differ from those that name the blocks in the store, so from now on nothing is "
                "loaded or saved. To share again, %s",
                HOW_TO_NAME,
            )
        if (name := sharing.new_name()) is not None:
            self.state.keys.name_weights(salt_name(sharing))
            self.drop_all()
            logger.info("kvstore: the weights are called %s, and blocks are shared under that name", name)
        elif sharing.is_restored():
            self.drop_all()
            logger.info("kvstore: the weights are again those that name the store's blocks: blocks are shared again")
        elif self._reset and sharing.agreed > before and not sharing.stopped:
            logger.info("kvstore: the weights are the same as before the reset: blocks are shared again")
            self._reset = False

    def finished(self, request: Request) -> bool:
        """Forget the request. Return whether the engine must keep its blocks until the workers report the request."""
        self.loads.forget(request)
        self.held_back.forget(request.request_id)
        tracked = self.saves.tracked.get(request.request_id)
        if tracked is not None and tracked.outdated:
            self._cache.evict_of([request.request_id])
        return self.saves.end(request)

    def reset(self) -> None:
        """Drop everything, because vLLM has reset the connector's cache, perhaps for new weights. Sharing resumes if a
        check finds that the weights have not changed. If the weights cannot be checked, sharing continues only if the
        operator has named them, which is a promise that they do not change."""
        sharing = self.state.sharing
        if not self._cache.is_empty:
            logger.info(
                "kvstore: vLLM could not reset its own cache, because requests are running. Their blocks are neither "
                "saved nor used for other requests"
            )
        self.drop_all()
        if sharing.checks:
            self._reset = True
            sharing.distrust()
            if not sharing.stopped:
                logger.info(
                    "kvstore: the engine's cache was reset, and its copies of the store's blocks were dropped. Blocks "
                    "are shared again if the next step finds the weights unchanged"
                )
        elif sharing.name and sharing.name == sharing.first_name:  # the name from the option
            logger.info("kvstore: the engine's cache was reset; blocks of weights %s are still shared", sharing.name)
        elif not sharing.stopped:
            sharing.stop()
            logger.warning(
                "kvstore: the engine's cache was reset, perhaps for new weights, and the weights cannot be read, "
                "so from now on nothing is loaded or saved. To share again, %s. If the weights never change while the "
                "engine runs, name them with the option weights_version",
                HOW_TO_NAME,
            )

    def notice_purge(self) -> bool:
        """Drop everything if the store was purged since the last call. Return whether it was."""
        if not self._purges.noticed():
            return False
        self.drop_all()
        logger.info("kvstore: the store was purged, so this engine drops its copies of blocks, also in vLLM's caches")
        return True

    def drop_all(self) -> None:
        """Drop all blocks of this engine and everything that it knows of blocks, because the weights or the store may
        have changed. This includes the CPU tier, blocks that wait to be sent, loads in progress, answers of the store,
        promises, and the engine's own cache. Running requests continue with their blocks, which are neither saved nor
        found by other requests."""
        self.state.hand_overs.forget()
        self.state.lookups.forget()
        self.state.tier.clear()
        self.state.events.cleared()
        self.loads.reset()
        self.saves.reset()
        self._cache.evict_all()
        self._names_changed()

    def close(self) -> None:
        if self.state.spans is not None:
            self.state.spans.close()
        self.state.hand_overs.close()
        self.state.lookups.close()
