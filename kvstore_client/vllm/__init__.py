"""The vLLM side of kvstore: the only package here that may import torch or vllm.

``connector.KVStoreConnector`` is what an engine is pointed at; it is one thin class over two halves that live in
different processes and tell each other what ``plan`` holds:

* ``scheduler.SchedulerHalf`` decides, beside the engine's scheduler: what a request may load, which blocks a step
  fills, and where they lie in host memory meanwhile (``host_tier``);
* ``worker.WorkerHalf`` moves bytes, beside the model: KV cache tensors <-> host pool <-> store.

``tier.KVStoreTier`` is the other way in: a secondary tier behind vLLM's own offloading.

``config`` reads the options, ``identity`` says what must agree before bytes are shared, ``keys`` what blocks are
called, ``layout`` turns KV cache tensors into blocks, ``stats`` tells the engine's metrics; ``compat`` is what differs
between vLLM's versions.
"""
