"""Finds out how vLLM runs on this machine, and has the sizes of prompts and the engines that are compared."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.remote_kv_cache.engine_checks import TIE, Checks, gap_where_they_part
from benchmarks.remote_kv_cache.engine_models import (
    BLOCK_TOKENS,
    ENGINE_MODELS,
    LARGE,
    EngineModel,
    cacheable_tokens,
    full_blocks,
)
from benchmarks.remote_kv_cache.engines import Engine, Store
from benchmarks.remote_kv_cache.first_token import OUTPUT_TOKENS, WARM_UP_TOKENS, Asking
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case

PROBE: Final = EngineModel("probe", 512, 1024, 2, 4, 2, 4096)
_PROBE_TOKENS: Final = 300
TOPS: Final = 5  # the number of likeliest tokens kept at each place, to judge answers that differ


@dataclass(frozen=True)
class Sizes:
    """The sizes of requests. `rounds`: prompt tokens -> how often each prompt is computed and loaded. `short`: the
    prompt tokens of all parts but *restart*."""

    model: EngineModel
    rounds: dict[int, int]
    short: tuple[int, ...]
    shards: int


GPU: Final = Sizes(LARGE, {8192: 7, 32768: 5, 65536: 3, 131072: 2}, (8192, 32768), 4)
SMALL: Final = Sizes(ENGINE_MODELS["tiny"], {256: 2, 512: 1}, (256,), 1)


@dataclass(frozen=True)
class Way:
    """A way to run vLLM: arguments for its engine, and environment variables."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


_FIRST_RUNNER: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# The best first. Some parts of vLLM may not fit this machine's torch.
WAYS: Final = {
    "as vLLM chooses": Way({}),
    "vLLM's first model runner": Way({}, _FIRST_RUNNER),
    "Triton attention": Way({"attention_backend": "TRITON_ATTN"}),
    "Triton attention, no operators of vLLM's own, first model runner": Way(
        {"attention_backend": "TRITON_ATTN", "compilation_config": {"custom_ops": ["none"]}}, _FIRST_RUNNER
    ),
}


class OutOfTimeError(Exception):
    """The time that is left of --within is too short for the rest."""


class Machine:
    """The state that all parts share: sizes, the arguments of engines, and the time left."""

    def __init__(self, benchmark: Benchmark, sizes: Sizes, on_gpu: bool, checks: Checks) -> None:
        self.benchmark = benchmark
        self.sizes = sizes
        self.on_gpu = on_gpu
        self.checks = checks
        # vLLM takes longer to compile for them than a small model takes for its whole answer.
        self.tops = TOPS if on_gpu else 0
        self.way = Way({})
        self._until = time.monotonic() + benchmark.options.within
        self._begun = time.monotonic()

    def engine(self, connector: dict[str, Any] | None, longest: int, **arguments: Any) -> Engine:
        """Start an engine with room for one prompt of this many tokens and for its warm-up prompt."""
        os.environ.update(self.way.environment)
        model = arguments.pop("model", self.sizes.model)
        room = full_blocks(longest) + full_blocks(WARM_UP_TOKENS) + 4
        gpu = {"gpu_memory_utilization": 0.2, "max_num_batched_tokens": 8192} if self.on_gpu else {}
        return Engine(
            model,
            connector,
            weights=not self.on_gpu,  # vLLM packs weights for CPUs before others can be made
            enable_prefix_caching=False,
            max_model_len=max(longest, WARM_UP_TOKENS) + 2 * OUTPUT_TOKENS,
            max_num_seqs=8,
            kv_cache_memory_bytes=room * model.block_bytes + (64 << 20),
            **{**gpu, **self.way.arguments, **arguments},
        )

    def asking(self, store: Store, plain: Engine) -> Asking:
        """Return the object that sends one prompt to several engines. plain: the engine without the store."""
        return Asking(store, plain, self.checks, self.say, self.tops)

    def say(self, what: str) -> None:
        self.benchmark.say(f"{time.monotonic() - self._begun:6.1f} s  {what}")

    def needs(self, seconds: float) -> None:
        """Raise OutOfTimeError if fewer than `seconds` are left."""
        left = self._until - time.monotonic()
        if self.on_gpu and seconds > left:
            raise OutOfTimeError(f"it takes about {seconds:.0f} s, but {max(0.0, left):.0f} s of --within are left")

    def warm_up(self, *engines: Engine, seed: int = -1) -> None:
        for engine in engines:
            engine.generate(self.sizes.model.prompts(seed, 1, WARM_UP_TOKENS), OUTPUT_TOKENS, self.tops)

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        [prompt] = self.sizes.model.prompts(1000 * seed + tokens, 1, tokens)
        return prompt

    def case(self, part: str, tokens: int, asking: Asking, **parameters: Any) -> None:
        """Keep the measurements of prompts of this length."""
        cached = cacheable_tokens(tokens)
        self.benchmark.keep(
            Case(
                name=f"{part}, {tokens} tokens",
                seconds={name: list(seconds) for name, seconds in asking.seconds.items()},
                parameters={
                    "group": part,
                    "model": self.sizes.model.to_json(),
                    "prompt_tokens": tokens,
                    "cached_tokens": cached,
                    "kv_bytes": cached // BLOCK_TOKENS * self.sizes.model.block_bytes,
                    "output_tokens": OUTPUT_TOKENS,
                    "checks": self.checks.to_json(),
                    **parameters,
                },
            )
        )


def find_way(machine: Machine) -> str:
    """Find out how vLLM runs here, with a small model whose prompt comes from the connector's CPU tier the second time.
    Return the name of the first way that works. Raises RuntimeError with the failures if none does."""
    failed: dict[str, str] = {}
    [prompt] = PROBE.prompts(0, 1, _PROBE_TOKENS)
    for name, way in WAYS.items():
        for variable in machine.way.environment:
            del os.environ[variable]
        machine.way = way
        try:
            with kvstore_server(64 << 20) as endpoint, Store(endpoint) as store:
                connector = {"endpoint": endpoint, "cpu_bytes": 64 << 20}
                with machine.engine(connector, _PROBE_TOKENS, model=PROBE) as engine:
                    [first] = engine.generate([prompt], OUTPUT_TOKENS, TOPS).answers
                    store.settle(full_blocks(_PROBE_TOKENS))
                    [again] = engine.generate([prompt], OUTPUT_TOKENS, TOPS).answers
            equal = gap_where_they_part(again, first) <= TIE
            if not equal or again.cached_tokens != cacheable_tokens(_PROBE_TOKENS):
                raise RuntimeError(f"computed {first}, from the CPU tier {again}")
        except RuntimeError as error:
            failed[name] = str(error)
            machine.benchmark.skip(f"vLLM, {name}", str(error)[-2000:])
            if not machine.on_gpu:
                break
        else:
            machine.say(f"vLLM runs here: {name}")
            return name
    raise RuntimeError(f"vLLM does not run here: {failed}")
