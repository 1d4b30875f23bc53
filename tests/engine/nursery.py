"""Imports everything that an engine would import. The process that engines are forked from runs this module once.

All objects that exist then are frozen permanently. vLLM runs the garbage collector five times while an engine starts
and twice when it ends. The collector skips frozen objects, and their pages stay shared. vLLM's searches through all
modules are also done here, once. This reduces the processor time of an engine's start and end from 3.8 s to 0.4 s.
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
    """Do nothing. This replaces work that was done here already or is not needed."""


def pause() -> None:
    """Sleep briefly instead of yielding the processor: otherwise an engine's processes poll for each other's messages
    for a whole second."""
    time.sleep(0.001)


# Numba would compile the lookup of drafts for seconds, in each engine that uses it; Python finds the same drafts.
os.environ["NUMBA_DISABLE_JIT"] = "1"
gc.disable()  # imported objects stay
for _name in PRELOAD:
    importlib.import_module(_name)

import torch._dynamo.config  # noqa: E402
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

shm_broadcast.sched_yield = pause
torch._dynamo.config.disable = True  # otherwise each rank of each engine would compile its lookup of tokens for seconds

if hasattr(type(current_platform), "register_triton_kernel_overrides"):  # since vLLM 0.31
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search through all modules also reads deprecated attributes
        current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = nothing
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(20_000, 10, 10)  # engines live for seconds, so collect less often than by default
gc.unfreeze = nothing  # vLLM unfreezes all objects before an engine ends, which only helps processes that continue
