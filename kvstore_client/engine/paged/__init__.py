"""What any engine needs whose KV cache is in pages, as tensors: nothing here knows which engine that is.

An adapter has two halves, which may run in different processes and exchange the messages of ``plan``.

* Beside the scheduler it assigns slots of the host pool (``host_tier``), says in a ``StepPlan`` what is to be loaded
  and saved, and takes in the ranks' ``WorkerReport``. ``sends_under_way``, ``sharing`` (checks of the weights) and
  ``shared_pool.Passages`` keep what it must remember.
* Beside the model, of each rank, ``worker.WorkerHalf`` moves bytes: KV cache <-> host pool <-> store. ``layout`` sees
  the cache's tensors as blocks of bytes, ``rank_loads`` and ``rank_saves`` move them, ``device`` and ``host_copies``
  make the copies, ``weights`` looks whether the model is still the one that the keys name.

docs/adding-an-engine.md leads to a first hit. Beside `kvstore_client.vllm`, only this package imports torch.
"""
