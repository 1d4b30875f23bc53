"""The vLLM side of kvstore: the only package here that may import torch or vllm.

``connector.KVStoreConnector`` is what an engine is pointed at; it is one thin class over two halves that live in
different processes and share nothing but a step's plan:

* ``scheduler.SchedulerHalf`` decides, beside the engine's scheduler: what a request may load, which blocks a step
  fills;
* ``worker.WorkerHalf`` moves bytes, beside the model: KV cache tensors <-> staging rows <-> store.

``config`` reads the options, ``identity`` says what must agree before bytes are shared, ``layout`` turns KV cache
tensors into blocks, ``guard`` turns every failure of the store into a miss.
"""
