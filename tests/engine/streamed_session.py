"""One streaming session with vLLM's `AsyncLLM`, in a process of its own: each input of the session continues what was
said before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine import driver
from tests.engine.engines import ANSWER_S, BLOCK, START_S, nursery

TOKENS = 8  # of each answer


@dataclass
class Said:
    """An answer of the session. cached_tokens: those of the session's first input that came from a cache."""

    token_ids: list[int]
    cached_tokens: int


class Session:
    """An engine with one session. `say` answers an input; `stop` ends the session, and then the engine, which first
    sends its blocks. endpoint: the store's address; None: no store."""

    def __init__(self, model: Path, log: Path, endpoint: str | None) -> None:
        self._log = log
        self._pipe, far_end = nursery().Pipe()
        self._process = nursery().Process(target=run, args=(model, log, endpoint, far_end))
        self._process.start()
        far_end.close()
        assert self._receive(START_S) == "ready"

    def say(self, token_ids: list[int]) -> Said:
        self._pipe.send(token_ids)
        said: Said = self._receive(ANSWER_S)
        return said

    def stop(self) -> None:
        self._pipe.send(None)
        assert self._receive(ANSWER_S) == "ended"
        self._process.join(ANSWER_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End all processes of the engine that are left."""
        if self._process.is_alive():
            process = psutil.Process(self._process.pid)
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.join()

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            pytest.fail(f"no answer within {timeout_s} s; the log ends:\n{self._log_end()}")
        try:
            return self._pipe.recv()
        except EOFError:
            pytest.fail(f"the engine died; its log ends:\n{self._log_end()}")

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def run(model: Path, log: Path, endpoint: str | None, pipe: Connection) -> None:
    """Run the engine and its session until None arrives through the pipe."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        driver.fork_processes()
        asyncio.run(_serve(model, endpoint, pipe))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


async def _serve(model: Path, endpoint: str | None, pipe: Connection) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = None
    if endpoint is not None:
        transfer = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"endpoint": endpoint, "always_load": True, "staging_bytes": 64 << 20},
        )
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=2048,
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            num_gpu_blocks_override=256,
            kv_transfer_config=transfer,
        )
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        while (token_ids := await asyncio.to_thread(pipe.recv)) is not None:
            yield StreamingInput({"type": "token", "prompt_token_ids": token_ids})

    pipe.send("ready")
    answer: list[int] = []
    async for output in engine.generate(inputs(), sampling, "session"):
        answer += output.outputs[0].token_ids
        if len(answer) == TOKENS:
            pipe.send(Said(answer, output.num_cached_tokens))
            answer = []
    engine.shutdown(timeout=30)
    pipe.send("ended")
