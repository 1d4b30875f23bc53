"""Measures the time to the first token of one long prompt: computed, and loaded from each tier that can have it.

An engine without the connector computes the prompt, and then answers it again from its own cache, which is the limit of
every tier. A second engine computes the prompt and fills the store. A third engine, started after that, finds the
prompt in the store. When this engine gets the prompt again, its CPU tier has the prompt, because its own prefix cache
is off. The engine was warmed up by a short prompt that is not in the store, so the measured load is its first one. The
times are those of the engine's own request metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from benchmarks.remote_kv_cache.engine_checks import Checks
from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS, EngineModel, cacheable_tokens, full_blocks
from benchmarks.remote_kv_cache.engine_process import Answer, Run
from benchmarks.remote_kv_cache.engines import Engine, Store
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case

FIRST_TOKEN: Final = "first token"
COMPUTED: Final = "computed, without the connector"
OWN: Final = "from the engine's own cache"
FILLED: Final = "computed and filled in"
STORE: Final = "from the store, after a restart"
CPU_TIER: Final = "from the CPU tier"
STEPS: Final = 5
OUTPUT_TOKENS: Final = 8
WARM_UP_TOKENS: Final = 200


class Asking:
    """Sends prompts to engines one after the other and checks each answer."""

    def __init__(
        self, store: Store, plain: Engine, checks: Checks, step: Callable[[str], object], tops: int = 0
    ) -> None:
        """plain: the engine without a connector, which judges answers that differ. step: called with the name of each
        request. tops: see `Order`; with them, `plain` needs no second request to judge."""
        self.seconds: dict[str, list[float]] = {}
        self._store = store
        self._plain = plain
        self._checks = checks
        self._step = step
        self._tops = tops
        self._right: list[Answer] = []

    def ask(self, name: str, engine: Engine, prompt: list[int], from_cache: int = 0, from_store: int = 0) -> Run:
        """Send a prompt. from_cache: the number of tokens expected from a cache. from_store: the number of blocks
        expected from the store. All answers must equal the last one of COMPUTED."""
        read_before = self._store.read()
        run = engine.generate([prompt], OUTPUT_TOKENS, self._tops)
        came = self._store.read() - read_before
        self.check(name, prompt, run, from_cache)
        self._checks.that(came == from_store, f"{name}: the store gave {came} blocks, expected {from_store}")
        return run

    def check(self, name: str, prompt: list[int], run: Run, from_cache: int) -> None:
        """Count and check an answer; see `ask`."""
        answers = run.answers
        if name == COMPUTED:
            self._right = answers
        self.seconds.setdefault(name, []).append(answers[0].first_token_s)
        what = f"first token {name}"
        self._checks.tokens(what, [prompt], answers, self._right, self._plain)
        self._checks.cached(what, answers, from_cache, from_cache)
        self._step(f"{what}: {answers[0].first_token_s:.3f} s")


def measure_first_token(
    model: EngineModel,
    prompt_tokens: int,
    rounds: int,
    cpu_bytes: int | None,
    checks: Checks,
    step: Callable[[str], object],
) -> Case:
    """Run the rounds; each uses a new prompt and a new third engine. cpu_bytes: the size of the CPU tier. None stands
    for twice the prompt. With 0 there is no CPU tier, and it is not measured. `step` is called with the name of each
    measurement, at most `STEPS` times a round."""
    blocks = full_blocks(prompt_tokens)
    cached = cacheable_tokens(prompt_tokens)
    room = (blocks + full_blocks(WARM_UP_TOKENS) + 2) * model.block_bytes
    arguments = {
        "max_model_len": max(prompt_tokens, WARM_UP_TOKENS) + 2 * OUTPUT_TOKENS,
        "kv_cache_memory_bytes": room + (64 << 20),
    }
    warm_ups = iter(model.prompts(-1, rounds + 2, WARM_UP_TOKENS))
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(room * (rounds + 2)))
        connector = {"endpoint": endpoint, "cpu_bytes": 2 * room if cpu_bytes is None else cpu_bytes}
        store = stack.enter_context(Store(endpoint))
        plain = stack.enter_context(Engine(model, None, **arguments))
        filler = stack.enter_context(Engine(model, connector, **arguments))
        for engine in (plain, filler):
            engine.generate([next(warm_ups)], OUTPUT_TOKENS)
        asking = Asking(store, plain, checks, step)
        for prompt in model.prompts(0, rounds, prompt_tokens):
            asking.ask(COMPUTED, plain, prompt)
            asking.ask(OWN, plain, prompt, cached)
            before = store.settle()
            asking.ask(FILLED, filler, prompt)
            store.settle(before + blocks)
            with Engine(model, connector, enable_prefix_caching=False, **arguments) as reader:
                reader.generate([next(warm_ups)], OUTPUT_TOKENS)
                store.settle()
                asking.ask(STORE, reader, prompt, cached, cached // BLOCK_TOKENS)
                if connector["cpu_bytes"]:
                    asking.ask(CPU_TIER, reader, prompt, cached)
    return Case(
        name=f"{prompt_tokens} tokens, {model.name} model",
        seconds=asking.seconds,
        limits={name: OWN for name in (STORE, CPU_TIER) if name in asking.seconds},
        references=(COMPUTED,),
        parameters={
            "group": FIRST_TOKEN,
            "model": model.to_json(),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached,
            "output_tokens": OUTPUT_TOKENS,
            "cpu_bytes": connector["cpu_bytes"],
        },
    )
