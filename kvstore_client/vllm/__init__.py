"""The vLLM side of kvstore: the only package here that may import torch or vllm.

``connector.KVStoreConnector`` is the class that an engine loads. It is a thin class over two halves, which run in
different processes and exchange the messages that ``plan`` defines:

* ``scheduler.SchedulerHalf`` runs beside the engine's scheduler. It decides which blocks a request may load, which
  blocks a step saves, and which slots of host memory they use meanwhile (``load_planner``, ``save_planner``,
  ``host_tier``);
* ``worker.WorkerHalf`` runs beside the model and moves bytes: KV cache tensors <-> host pool <-> store.

``tier.KVStoreTier`` is the other way to use the store: a secondary tier behind vLLM's own offloading.

``shared`` holds the code of both: common options, the checks that refuse an engine, the identity of a model, the
metrics. The connector alone uses ``rank_namespace`` (what must agree before bytes are shared), ``block_keys`` (the keys
of blocks), ``layout`` (KV cache tensors as blocks), ``stats`` (the engine's metrics) and ``vllm_parts`` (imports that
are not vLLM's public interface).
"""
