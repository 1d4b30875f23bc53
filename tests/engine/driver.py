"""One vLLM engine in a process of its own: ``run`` is the whole life of that process.

The test holds the other end of a pipe. It first gets ``"ready"``; then it sends orders ``{"prompts": [[token, ...],
...], "max_tokens": N}`` and gets, for each, a list of ``{"token_ids": [...], "cached_tokens": N, "preemptions": N}``;
None stops the engine. All the engine says goes to the log file.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Imported once, by the process that engines are forked from: seven seconds that each engine would take.
PRELOAD = [
    "transformers",
    "vllm",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
]


def run(spec: dict[str, Any], log: Path, pipe: Connection) -> None:
    """spec: model (path), connector (its options, or None), deliver (see ``lose_blocks``, or None), environment,
    engine (arguments of ``vllm.LLM``)."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(spec["environment"])
    try:
        serve(spec, pipe)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # past the interpreter's own end, which takes it seconds with all that is imported


def serve(spec: dict[str, Any], pipe: Connection) -> None:
    from vllm import SamplingParams

    if spec["deliver"] is not None:
        lose_blocks(spec["deliver"])
    engine = make_engine(spec)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        outputs = engine.generate(
            [{"prompt_token_ids": tokens} for tokens in order["prompts"]],
            SamplingParams(temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        pipe.send(
            [
                {
                    "token_ids": list(output.outputs[0].token_ids),
                    "cached_tokens": output.num_cached_tokens,
                    "preemptions": output.metrics.num_preemptions,
                }
                for output in outputs
            ]
        )
    engine.llm_engine.engine_core.shutdown()


def make_engine(spec: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = None
    if spec["connector"] is not None:
        connector = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=spec["connector"],
        )
    return LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=connector,
        **{
            "block_size": 32,
            "max_model_len": 2048,
            "gpu_memory_utilization": 0.3,  # of the host's memory, on CPUs
            **spec["engine"],
        },
    )


def lose_blocks(delivered: int) -> None:
    """A fault: every read from the store returns only so many of its blocks, as if the others had been evicted
    between lookup and read."""
    from kvstore_client import KVStoreClient

    get_into = KVStoreClient.get_into

    def get_some(client: Any, keys: Any, out: Any, slots: Any = None) -> Any:
        hits = get_into(client, keys, out, slots)
        hits[delivered:] = False
        out[delivered:] = 0xFF
        return hits

    KVStoreClient.get_into = get_some  # type: ignore[method-assign]
