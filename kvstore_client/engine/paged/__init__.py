"""Modules for any engine whose KV cache consists of tensors with pages. Nothing here depends on a particular engine.

An adapter has two halves, which may run in different processes and exchange the messages of ``plan``.

* The half next to the scheduler assigns slots of the host pool (``host_tier``). It sends a ``StepPlan`` that says what
  to load and save, and processes each ``WorkerReport`` of the ranks. Its state is kept by ``sends_under_way``,
  ``sharing`` (checks of the weights) and ``shared_pool.Passages``.
* The half next to the model, ``worker.WorkerHalf``, runs on each rank and moves bytes between the KV cache, the host
  pool and the store. ``layout`` presents the cache's tensors as blocks of bytes. ``rank_loads`` and ``rank_saves`` move
  the blocks. ``device`` and ``host_copies`` make the copies. ``weights`` checks whether the model is still the one that
  the keys name.

docs/adding-an-engine.md shows how to write an adapter, up to its first hit. Only this package and `kvstore_client.vllm`
import torch.
"""
