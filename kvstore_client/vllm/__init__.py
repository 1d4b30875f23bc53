"""The vLLM side of kvstore: the only package here that may import vllm.

``connector.KVStoreConnector`` is the class that an engine loads. It is a thin class over two halves, which run in
different processes and exchange the messages that ``kvstore_client.engine.paged.plan`` defines:

* ``scheduler.SchedulerHalf`` runs beside the engine's scheduler. It decides which blocks a request may load, which
  blocks a step saves, and which slots of host memory they use meanwhile (``load_planner``, ``save_planner``);
* ``WorkerHalf`` of ``engine.paged`` runs beside the model and moves bytes: KV cache tensors <-> host pool <-> store. It
  knows nothing of vLLM.

``new_weights`` says in a worker that its weights have changed, and what they are called now.

``tier.KVStoreTier`` is the other way to use the store: a secondary tier behind vLLM's own offloading.

``shared`` holds the code of both: common options, the checks that refuse an engine, the identity of a model, the
metrics. The connector alone uses ``rank_namespace`` (what must agree before bytes are shared), ``block_keys`` (the keys
of blocks), ``stats`` (the engine's metrics) and ``vllm_parts`` (imports that are not vLLM's public interface).
"""

from __future__ import annotations

import logging

__all__ = ["new_weights"]


def new_weights(version: str) -> None:
    """Say in a worker of an engine with ``KVStoreConnector`` what the weights are called that are loaded now; see
    docs/vllm.md. Call it in all workers, with vLLM's ``collective_rpc``, once the weights are loaded.

    Sharing goes on under that name when all workers were told it: with engines whose weights were given the same name.

    Raises ValueError for an empty name, or one that other weights of this engine had; RuntimeError in a process that
    is no such worker. Thread: the one that the engine calls its worker from, which `collective_rpc` does.
    """
    from kvstore_client.vllm.connector.engine_model import new_weights as name_them  # with torch

    name_them(version)


def _log_like_vllm() -> None:
    """Have what `kvstore_client` logs in an engine go where the engine's own lines go, which vLLM sets up for its own
    loggers alone. Whoever has set up logging for all is left alone."""
    ours, engines = logging.getLogger("kvstore_client"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = engines.handlers
        ours.setLevel(engines.level)


_log_like_vllm()
