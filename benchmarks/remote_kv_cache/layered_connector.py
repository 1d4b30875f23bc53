"""A connector whose loads run during the step that uses their blocks: the model waits for each layer's blocks.

It exists for `bench_layer_loads` and serves one request at a time. `KVStoreConnector` starts a request when its whole
load has ended. This class starts it at once, and `wait_for_layer_load` waits until the layer's slice has been placed.
The scheduler's and the worker's half must be in one process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvstore_client.engine.jobs import State
from kvstore_client.engine.paged.plan import WorkerReport
from kvstore_client.vllm.connector import KVStoreConnector

if TYPE_CHECKING:
    from kvstore_client.engine.paged.rank_load import RankLoad

_POLL_S = 0.0001


class LayeredConnector(KVStoreConnector):
    """See the module's docstring."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_step: dict[str, RankLoad] = {}  # the loads that this step waits for
        self._ended: set[str] = set()  # the requests whose loads ended in this step

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._worker:
            loads = self._worker.loads
            self._in_step = {
                load.request_id: loading
                for load in self._plan().loads
                if (loading := loads._loading.get(load.request_id)) is not None
            }

    def wait_for_layer_load(self, layer_name: str) -> None:
        for loading in self._in_step.values():
            for number, layers in enumerate(loading.layout.layers):
                if layer_name in layers and number < len(loading.jobs):
                    while loading.jobs[number].state is not State.OVER:
                        time.sleep(_POLL_S)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker:
            while self._in_step.keys() & self._worker.loads._loading.keys():
                time.sleep(_POLL_S)
        saved, loaded = super().get_finished(finished_req_ids)
        self._ended, self._in_step = set(loaded or ()), {}
        return saved, None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = super().build_connector_worker_meta()
        if self._ended:
            report = report or WorkerReport()
            report.ended = self._ended  # type: ignore[attr-defined]
        return report

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if (half := self._scheduler) is None:
            return
        for request_id in getattr(connector_output.kv_connector_worker_meta, "ended", ()):
            if (load := half.loads.end(request_id)) is not None:
                half._hold_no_longer(request_id)
                half.saves.loaded(request_id, whole=not load.failed)


KVConnectorFactory.register_connector("LayeredConnector", __name__, "LayeredConnector")
