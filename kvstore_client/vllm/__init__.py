"""The part of kvstore that runs in vLLM. No other package here may import vllm.

``connector.KVStoreConnector`` is the class that an engine loads. It is a thin layer over two halves. The halves run in
different processes and exchange the messages that ``kvstore_client.engine.paged.plan`` defines:

* ``scheduler.SchedulerHalf`` runs next to the engine's scheduler. It decides which blocks a request may load and which
  blocks a step saves (``load_planner``, ``save_planner``). It also decides which slots of host memory these blocks use
  while they are loaded or saved.
* ``WorkerHalf`` of ``engine.paged`` runs next to the model. It moves bytes between KV cache tensors, the host pool and
  the store, and does not depend on vLLM.

``new_weights`` is called in a worker after its weights have changed, and gives them a new name.

``tier.KVStoreTier`` is the other way to use the store: a secondary tier behind vLLM's own offloading.

``shared`` has the code that the connector and the tier use: common options, the checks that stop an unsuitable engine,
the identity of a model, and the metrics. Four other modules of the connector are:

* ``rank_namespace``: the settings that must agree before bytes are shared
* ``block_keys``: the keys of blocks
* ``stats``: the engine's metrics
* ``vllm_parts``: imports that are not part of vLLM's public interface
"""

from __future__ import annotations

import logging

__all__ = ["new_weights"]


def new_weights(version: str) -> None:
    """Name the weights that a worker of an engine with ``KVStoreConnector`` has loaded; see docs/vllm.md. Call this in
    all workers with vLLM's ``collective_rpc``, after the weights are loaded.

    When all workers have been given the name, sharing resumes under that name, with engines whose weights have the same
    name.

    Raises ValueError for an empty name, and for a name that other weights of this engine had before. Raises
    RuntimeError in a process that has no such worker. Call this only from the thread in which the engine calls its
    worker, as `collective_rpc` does.
    """
    from kvstore_client.vllm.connector.engine_model import new_weights as name_them  # with torch

    name_them(version)


def _log_like_vllm() -> None:
    """Send the log lines of `kvstore_client` to the same place as the engine's own lines, because vLLM sets up only its
    own loggers. Do nothing in a process that has set up logging for all loggers."""
    ours, engines = logging.getLogger("kvstore_client"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = engines.handlers
        ours.setLevel(engines.level)


_log_like_vllm()
