"""Imported once, by the process that engines are forked from: all that an engine would import itself.

What is here by then is frozen, for good: the garbage collector, which vLLM calls five times while an engine starts and
twice when it ends, does not walk over it, and its pages stay shared. What vLLM looks up in all modules is looked up
here. All this makes an engine's start and end take 0.4 s of processor time instead of 3.8 s.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
import warnings

PRELOAD = [
    "transformers",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "kvstore_client.vllm.connector.kv_connector",
]


def nothing() -> None:
    """For what is done here already, or for nobody."""


def pause() -> None:
    """Instead of yielding the processor: an engine's processes look for each other's messages for a second in vain."""
    time.sleep(0.001)


# Numba would compile for seconds how drafts are looked up, in each engine that has such; Python finds the same ones.
os.environ["NUMBA_DISABLE_JIT"] = "1"
gc.disable()  # what is imported stays
for _name in PRELOAD:
    importlib.import_module(_name)

import torch._dynamo.config  # noqa: E402
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

shm_broadcast.sched_yield = pause
torch._dynamo.config.disable = True  # ranks would compile how they look tokens up, for seconds, each in each engine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the attributes it asks all modules for, some are deprecated
    current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = nothing
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(20_000, 10, 10)  # engines live for seconds: less often than by default
gc.unfreeze = nothing  # vLLM thaws all before an engine ends, for processes that live on
