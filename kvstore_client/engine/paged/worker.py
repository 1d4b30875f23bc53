"""The half of an adapter next to the model. It moves blocks between the KV cache, the host pool and the store.

Threads: the engine makes all calls from the model's thread, which never waits for the network. Transfers run on threads
of their own. A transfer accesses only the blocks and slots that were given to it, and only until it reports its end.

A block may be cut into slices, each with some of its layers. A row of the pool has one slice, and a slot has a row for
each slice.
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
    """The transfers of one rank, which are its `loads` and its `saves`. Call every method from the model's thread.

    This object owns the host pool and closes the guard. The scheduler's half assigns the pool's slots.

    Until all loads, copies and sends have ended, call `saves.take_saved`, `loads.take_loaded` and `take_report` in
    every step, even if the step computes nothing. Copied blocks are sent within these calls.
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
        """Make the host pool, unless it is shared, and start the transfers.

        store: the description of this rank for the scheduler's half.
        timeout_s: how long `close` may continue to send, in seconds.
        replica: the index of this rank among the ranks with the same slice of every block, and the number of these
            ranks. Each block is sent by only one of them.
        store_on_host: whether a server on this host itself copies blocks out of the host pool.
        recompute_whole: whether to report the request instead of the block if a block is missing.
        shared: the host pool, if these ranks share one. If it is None, a pool is made.
        weights: the watch of the rank's weights. If it is None, the weights are not checked.
        number: the number of this rank among all ranks of the engine.
        """
        self._guard = guard
        self._layout = layout
        self._number = number
        self._weights = WeightsWatch(None, "", alone=True) if weights is None else weights
        self._timeout_s = timeout_s
        pool = layout.pool(store.slots * layout.slices, shared=store_on_host) if shared is None else shared.rows.pool
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
        """Carry out the plan of a step, except for its loads."""
        self.saves.avoid(plan.void_jobs)  # before `begin`, because a check may agree under the new name
        self.loads.avoid(plan.void_loads)
        self._weights.begin(plan)
        self.loads.idle = plan.idle
        if plan.ending:
            self.saves.unsent.engine_ends()
        for request_id in plan.cancelled:
            self.loads.cancel(request_id)
        self.saves.begin(plan.saves, plan.held)

    def take_report(self) -> WorkerReport | None:
        """Return the report for the scheduler's half about the time since the last call, or None if there is nothing to
        report."""
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
        """Stop all access to the KV cache until `attach`. Loads in progress end without blocks. Waits for copies."""
        self.loads.avoid_all()
        self._layout.detach()

    def attach(self) -> None:
        """Allow access to the KV cache again."""
        self._layout.attach()

    def close(self) -> AtEnd:
        """Send the waiting blocks for up to `timeout_s`, then end the transfers. Return how many of these blocks were
        sent, and how many were lost."""
        self._weights.finish()
        at_end = self.saves.close(self._timeout_s)
        self.loads.close()
        self._guard.close()
        return at_end
