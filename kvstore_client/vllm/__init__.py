"""The vLLM side of kvstore: the only package here that may import torch or vllm.

``connector.KVStoreConnector`` is what an engine loads. It is a thin class over two halves, which live in different
processes and send each other what ``plan`` defines:

* ``scheduler.SchedulerHalf`` decides, beside the engine's scheduler: what a request may load, which blocks a step
  fills, and in which slots of host memory they lie meanwhile (``host_tier``);
* ``worker.WorkerHalf`` moves bytes, beside the model: KV cache tensors <-> host pool <-> store.

``tier.KVStoreTier`` is the other way in: a secondary tier behind vLLM's own offloading.

``shared`` is what both need: their common options, the checks that refuse an engine, what names a model, the metrics.
Of the connector alone are ``rank_namespace`` (what must agree before bytes are shared), ``block_keys`` (what a block is
called), ``layout`` (KV cache tensors as blocks), ``stats`` (the engine's metrics) and ``vllm_parts`` (what is not
vLLM's public interface).
"""
