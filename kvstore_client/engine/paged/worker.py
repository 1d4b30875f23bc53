"""The half of an adapter beside the model: it moves blocks between the KV cache, the host pool and the store.

Threads: the engine calls everything here from the model's thread, which never waits for the network. Transfers run on
threads of their own. A transfer touches only blocks and slots that were given to it, until it reports its end.

A block may be in parts of some layers each. A row of the pool is a part, and a slot has as many rows as there are
parts.
"""

from __future__ import annotations

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.paged.plan import RankStore, StepPlan, WorkerReport
from kvstore_client.engine.paged.rank_loads import RankLoads
from kvstore_client.engine.paged.rank_saves import RankSaves
from kvstore_client.engine.paged.shared_pool import SharedPool
from kvstore_client.engine.paged.unsent import AtEnd
from kvstore_client.engine.paged.weights import WeightsWatch


class WorkerHalf:
    """The transfers of one rank: its ``loads`` and its ``saves``. Call every method from the model's thread.

    It owns the host pool, and closes the guard; the scheduler's half assigns the pool's slots.
    """

    def __init__(
        self,
        guard: StoreGuard,
        layout: BlockLayout,
        *,
        store: RankStore,
        timeout_s: float,
        replica: tuple[int, int],
        counters: Counters,
        store_on_host: bool = False,
        recompute_whole: bool = False,
        shared: SharedPool | None = None,
        weights: WeightsWatch | None = None,
        number: int = 0,
    ) -> None:
        """store: what the scheduler's half is told of this rank. timeout_s: how long `close` may send on. replica: the
        index of this rank among the ranks with the same part of every block, and their number; one of them sends each
        block. store_on_host: a server on this host is to copy blocks out of the host pool by itself. recompute_whole: a
        request of which a block is missing is told, not the block. shared: the host pool, if these ranks have one in
        common; None: it is made. weights: what it knows of its weights; None: they are not looked at. number: of this
        rank among all of the engine."""
        self._guard = guard
        self._layout = layout
        self._number = number
        self._weights = WeightsWatch(None, "", alone=True) if weights is None else weights
        self._timeout_s = timeout_s
        pool = layout.pool(store.slots * layout.parts, shared=store_on_host) if shared is None else shared.rows.pool
        self.loads = RankLoads(
            guard,
            layout,
            pool,
            shared=shared,
            recompute_whole=recompute_whole,
            counters=counters,
            weights=self._weights,
        )
        self.saves = RankSaves(
            guard,
            layout,
            pool,
            store=store,
            replica=replica,
            pool_is_shared=shared is not None,
            counters=counters,
            weights=self._weights,
        )

    def begin_step(self, plan: StepPlan) -> None:
        """Take in the step's plan, but for its loads."""
        self.saves.avoid(plan.void_jobs)  # before a check may agree, under a new name, on what is void
        self.loads.avoid(plan.void_loads)
        self._weights.begin(plan)
        self.loads.idle = plan.idle
        if plan.ending:
            self.saves.unsent.engine_ends()
        for request_id in plan.cancelled:
            self.loads.cancel(request_id)
        self.saves.begin(plan.saves, plan.held)

    def take_report(self) -> WorkerReport | None:
        """The report to the scheduler's half: what ended since the last call; None if nothing did."""
        checks = self._weights.take_report()
        report = self.saves.take_report(self.loads.take_pace())
        if checks is None:
            return report
        report = report or WorkerReport()
        report.agreed.update(checks.agreed)
        report.changed.update(checks.changed)
        report.check_seconds = checks.cost_s
        if checks.name is not None:
            report.names[self._number] = checks.name
        return report

    def detach(self) -> None:
        """Touch the KV cache no more, until ``attach``; loads that are under way bring nothing. Waits for copies."""
        self.loads.avoid_all()
        self._layout.detach()

    def attach(self) -> None:
        """The KV cache is there again."""
        self._layout.attach()

    def close(self) -> AtEnd:
        """Send the blocks that wait, for at most as long as a transfer may take; then end the transfers. -> what became
        of those blocks."""
        self._weights.finish()
        at_end = self.saves.close(self._timeout_s)
        self.loads.close()
        self._guard.close()
        return at_end
