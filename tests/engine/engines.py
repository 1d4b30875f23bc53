"""Real vLLM engines, each in a process of its own, and the model they run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from kvstore.wire import NamespaceInfo
from kvstore_client import KVStoreClient, Namespace
from tests.engine import driver, witness
from tests.engine.driver import Answer, Ask
from tests.support.harness import Server, wait_until

START_S = 170.0  # the first start also imports everything that all engines share
ANSWER_S = 60.0
LONGEST = 4352  # the longest request of the engine of `expected`, in tokens; that of other engines is 2048 by default
BLOCK = 32  # tokens
BLOCK_BYTES = 131072  # for the model of `save_model`, in float32

Expected: TypeAlias = "Callable[..., list[list[int]]]"
StartEngine: TypeAlias = "Callable[..., Engine]"


def prompt(seed: int, tokens: int = 500) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(4096) for _ in range(tokens)]


def full_blocks(tokens: int) -> int:
    """Return how many tokens of a prompt of this length can come from a cache: those of whole blocks, but never the
    last token."""
    return (tokens - 1) // BLOCK * BLOCK


class Engine:
    """A vLLM engine in a process of its own, see ``driver``."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any] | None,
        kv_role: str = "kv_both",
        beside: Sequence[tuple[str, dict[str, Any]]] = (),
        load_failure_policy: str = "",
        environment: dict[str, str] | None = None,
        fork: bool = False,
        wait: bool = True,
        **engine_arguments: Any,
    ) -> None:
        """connector: the connector's options. beside, load_failure_policy: see ``driver.run``. fork: fork the engine's
        own processes, see ``driver.fork_processes``. wait: wait until the engine serves; otherwise call ``ready``
        later."""
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            **(environment or {}),
        }
        spec = {
            "model": str(model),
            "connector": connector,
            "kv_role": kv_role,
            "beside": beside,
            "load_failure_policy": load_failure_policy,
            "fork": fork,
            "environment": settings,
            "engine": engine_arguments,
        }
        self.log = log
        self._has_core = settings["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        context = nursery()
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=driver.run, args=(spec, log, far_end))
        self._process.start()
        far_end.close()
        if wait and not self.ready():
            pytest.fail(f"the engine did not start; its log ends:\n{self.log_text()[-4000:]}")

    def ready(self) -> bool:
        """Wait until the engine has started or failed. Returns whether it serves."""
        return self._receive(START_S) == "ready"

    # These orders do not wait for their results; `result` returns them later.

    def order(self, *prompts: list[int], max_tokens: int = 8) -> None:
        self._send("generate", list(prompts), max_tokens)

    def order_play(self, *asks: Ask) -> None:
        self._send("play", list(asks))

    def result(self) -> Any:
        """Return the result of the last order."""
        result = self._receive(ANSWER_S)
        if result is None:
            pytest.fail(f"the engine died; its log ends:\n{self.log_text()[-4000:]}")
        return result

    # These orders return when the engine has executed them; see `driver.Serving`.

    def generate(self, *prompts: list[int], max_tokens: int = 8) -> list[Answer]:
        self.order(*prompts, max_tokens=max_tokens)
        answers: list[Answer] = self.result()
        return answers

    def play(self, *asks: Ask) -> list[Answer]:
        self.order_play(*asks)
        answers: list[Answer] = self.result()
        return answers

    def begin(self, ask: Ask) -> None:
        self._send("begin", ask)
        self.result()

    def compute(self, tokens: int) -> int:
        self._send("compute", tokens)
        computed: int = self.result()
        return computed

    def reset_prefix_cache(self, connector: bool = False) -> None:
        self._send("reset_prefix_cache", connector)
        assert self.result() is True

    def reset(self, running: bool, connector: bool) -> bool:
        self._send("reset", running, connector)
        return bool(self.result())

    def nap(self, level: int) -> None:
        self._send("nap", level)
        self._receive(ANSWER_S)

    def take_cache_away(self, away: bool) -> None:
        self._send("take_cache_away", away)
        self._receive(ANSWER_S)

    def change_weights(self, seed: int) -> None:
        self._send("change_weights", seed)
        self._receive(ANSWER_S)

    def change_rank(self, rank: int) -> None:
        self._send("change_rank", rank)
        self._receive(ANSWER_S)

    def restore_rank(self, rank: int) -> None:
        self._send("change_rank", rank, True)
        self._receive(ANSWER_S)

    def name_weights(self, name: str) -> None:
        self._send("name_weights", name)
        self._receive(ANSWER_S)

    def set_hope_s(self, seconds: float) -> None:
        self._send("set_hope_s", seconds)
        self._receive(ANSWER_S)

    def tier_keys(self) -> list[bytes]:
        self._send("tier_keys")
        keys: list[bytes] = self.result()
        return keys

    def deliver(self, blocks: int) -> None:
        self._send("deliver", blocks)
        self.result()

    def metrics(self) -> dict[str, float]:
        self._send("metrics")
        numbers: dict[str, float] = self.result()
        return numbers

    def settle(self) -> None:
        """Wait until nothing is in progress: all blocks are saved, and none is held needlessly."""
        self._send("settle")
        state = self.result()
        assert not any(state.values()), f"{state}; the log ends:\n{self.log_text()[-4000:]}"

    def witness(self) -> str:
        """Return what all processes of the engine and all threads of the test are doing. The log gets this report
        too."""
        return witness.ask(self._process.pid, self.log)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def processes(self) -> list[psutil.Process]:
        """The engine's process and the processes that it started."""
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def has_core(self) -> bool:
        """Whether the engine's core runs in the driver's process, as ``settle`` and aborts in a phase require."""
        return self._has_core

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the engine's process (SIGSTOP) while the body runs."""
        process = psutil.Process(self._process.pid)
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def kill(self) -> None:
        """End the engine as a crash would."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> int | None:
        """End the engine and return its exit status."""
        if not self._pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
            self._pipe.close()
            self._process.join(ANSWER_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        return self._process.exitcode

    def _send(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def _receive(self, timeout_s: float) -> Any:
        """Return the engine's next message, or None if the engine has ended."""
        if not self._pipe.poll(timeout_s):
            pytest.fail(f"no answer within {timeout_s} s; the log ends:\n{self.witness()}")
        try:
            return self._pipe.recv()
        except EOFError:
            return None


def check_answers(
    engine: Engine, expected: Expected, *prompts: list[int], cached: int | None = None, tokens: int = 8
) -> None:
    """Send all prompts at once, and check the answers and the number of cached tokens of each."""
    answers = engine.generate(*prompts, max_tokens=tokens)
    assert [answer.token_ids for answer in answers] == expected(*prompts, max_tokens=tokens)
    if cached is not None:
        assert [answer.cached_tokens for answer in answers] == [cached] * len(prompts)


def answers_alone(engine: Engine, *, reset: bool = False) -> Expected:
    """Return ``expected(prompt, ..., max_tokens=8)``, which returns the answers of this engine and computes each only
    once. reset: empty the engine's own cache before each prompt."""
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(*prompts: list[int], max_tokens: int = 8) -> list[list[int]]:
        missing = [[*each] for each in dict.fromkeys(map(tuple, prompts)) if len(known.get(each, ())) < max_tokens]
        while missing:
            asked = missing[:1] if reset else missing[:]
            if reset:
                engine.reset_prefix_cache()
            for each, found in zip(asked, engine.generate(*asked, max_tokens=max_tokens), strict=True):
                known[tuple(each)] = found.token_ids
            del missing[: len(asked)]
        return [known[tuple(prompt)][:max_tokens] for prompt in prompts]

    return answer


class Ledger:
    """The increase of an engine's metrics since this object was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.settle()
        self._before = engine.metrics()

    def __getitem__(self, name: str) -> float:
        self._engine.settle()
        return self._engine.metrics()[name] - self._before[name]


def nursery() -> ForkServerContext:
    """Return the context whose processes are forked from a process that has imported vLLM and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.nursery"])
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    return context


def save_model(folder: Path, *, seed: int = 0, kv_heads: int = 4) -> Path:
    """Save a Qwen2 of 4 layers with random weights. With four KV heads, 32 tokens of its KV cache take `BLOCK_BYTES`.

    The weights are spread so widely that the output depends on every token of the prompt. With the usual spread the
    model would repeat one token for any prompt, and a test could not tell a right cache from a wrong one.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return save_random(Qwen2ForCausalLM, Qwen2Config(**_SHAPE, num_key_value_heads=kv_heads), folder, seed)


def save_windowed_model(folder: Path, window: int) -> Path:
    """Save a Llama of the same shape whose every other layer attends to only `window` tokens. 32 tokens of two layers
    take half of `BLOCK_BYTES`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SHAPE, num_key_value_heads=4)
    config.sliding_window = window
    config.layer_types = ["full_attention", "sliding_attention"] * (_SHAPE["num_hidden_layers"] // 2)
    return save_random(LlamaForCausalLM, config, folder, 0)


_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}


def save_random(kind: Any, config: Any, folder: Path, seed: int = 0) -> Path:
    """Save a model of this configuration with random weights."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def namespaces(server: Server) -> list[NamespaceInfo]:
    """Return the namespaces on the one shard of a server."""
    nobody = Namespace(model="nobody", dtype="uint8", block_tokens=1, block_bytes=1)
    with KVStoreClient(server.endpoint, nobody) as client:
        (shard,) = client.info().shards
        return [namespace for namespace in shard.namespaces if namespace.id != nobody.id]


def stored_blocks(server: Server) -> int:
    """Return the number of blocks stored in all namespaces."""
    return sum(namespace.blocks for namespace in namespaces(server))


def created_blocks(server: Server) -> int:
    """Return the number of blocks that the server has received since its start, for all namespaces."""
    return sum(namespace.created for namespace in namespaces(server))


def until_it_hits(engine: Engine, question: list[int]) -> None:
    """Repeat a request until the engine loads everything that it can: until ``cached_tokens`` has the expected
    number."""

    def hit() -> bool:
        engine.settle()
        before = engine.metrics()
        [answer] = engine.generate(question)
        engine.settle()
        after = engine.metrics()
        missed = after["failed_loads"] - before["failed_loads"]
        return answer.cached_tokens == full_blocks(len(question)) and not missed

    wait_until(hit, what="the engine uses the store")
