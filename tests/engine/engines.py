"""Real vLLM engines, each in a process of its own, and the model they run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import driver
import pytest

START_S = 90.0
ANSWER_S = 60.0


@dataclass
class Answer:
    """An engine's output for one prompt."""

    token_ids: list[int]
    cached_tokens: int
    preemptions: int


class Engine:
    """A vLLM engine in a process of its own, see ``driver``."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any] | None,
        environment: dict[str, str] | None = None,
        deliver: int | None = None,
        wait: bool = True,
        **engine_arguments: Any,
    ) -> None:
        """connector: its options. deliver: each read from the store gets only so many of the blocks it was promised.
        wait: until the engine serves, else ``ready`` tells."""
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
            "deliver": deliver,
            "environment": settings,
            "engine": engine_arguments,
        }
        self.log = log
        context = nursery()
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=driver.run, args=(spec, log, far_end))
        self._process.start()
        far_end.close()
        if wait and not self.ready():
            pytest.fail(f"the engine did not start; its log ends:\n{self.log_text()[-4000:]}")

    def ready(self) -> bool:
        """Whether the engine came to serve, waiting for it."""
        return self._receive(START_S) == "ready"

    def order(self, *prompts: list[int], max_tokens: int = 8) -> None:
        """Ask for outputs without waiting for them."""
        self._pipe.send({"prompts": prompts, "max_tokens": max_tokens})

    def answers(self) -> list[Answer]:
        outputs = self._receive(ANSWER_S)
        if outputs is None:
            pytest.fail(f"the engine died; its log ends:\n{self.log_text()[-4000:]}")
        return [Answer(**output) for output in outputs]

    def generate(self, *prompts: list[int], max_tokens: int = 8) -> list[Answer]:
        self.order(*prompts, max_tokens=max_tokens)
        return self.answers()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int | None:
        """End the engine and return its exit status."""
        if not self._pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
            self._pipe.close()
            self._process.join(20)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        return self._process.exitcode

    def _receive(self, timeout_s: float) -> Any:
        """What the engine says next; None when it ended."""
        if not self._pipe.poll(timeout_s):
            pytest.fail(f"no answer within {timeout_s} s; the log ends:\n{self.log_text()[-4000:]}")
        try:
            return self._pipe.recv()
        except EOFError:
            return None


def nursery() -> ForkServerContext:
    """Where engines come from: a process that has imported vLLM and nothing else, forked for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(driver.PRELOAD)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    return context


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen2 of 8 layers with random weights: 32 tokens of KV cache are 131072 bytes.

    The weights are spread wide enough that the output depends on every token of the prompt; with the usual spread
    such a model repeats one token whatever it was told, and could not tell a right cache from a wrong one.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=512,
        vocab_size=4096,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
