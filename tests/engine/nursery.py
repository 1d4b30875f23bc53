"""Imported once, by the process that engines are forked from: all that an engine would import itself.

What is here by then is frozen: the garbage collector, which vLLM calls five times while an engine starts, does not
walk over it, and its pages stay shared. Both together make a start take 0.9 s of processor time instead of 3.8 s.
"""

from __future__ import annotations

import gc
import importlib

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

for _name in PRELOAD:
    importlib.import_module(_name)
gc.collect()
gc.freeze()
