"""Measures how long an engine's steps wait for the connector, as the time of each call from the engine to the
connector.

An engine gets new prompts, several at a time and in chunks, with a few tokens of output (*nothing stored*); then
another engine gets the same prompts (*all stored*). Every call is timed separately, around the connector's own method.
The time for which the engine's thread was ready to run but had no core is left out, because model, store and connector
share the cores of this machine. The longest call including that time is shown, too. Some of these calls take a
fingerprint of the weights. The share of a round, from the first prompt to the last answer, that all fingerprints take
is shown, too. Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, add_engine_model_option, full_blocks
from benchmarks.remote_kv_cache.engine_process import HASH, TAKE
from benchmarks.remote_kv_cache.engines import Engine, Store
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, console, time_text

NOTHING: Final = "nothing stored"
EVERYTHING: Final = "all stored"
_PROMPTS: Final = 8  # prompts that are sent at once
_TOKENS: Final = 1000
_OUTPUT_TOKENS: Final = 16
_STEP_TOKENS: Final = 512
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts


Taken = list[tuple[float, float]]  # for each call: its seconds, and those for which its thread waited for a core


def _running(taken: Taken) -> npt.NDArray[np.float64]:
    seconds, waited = np.array(taken).T
    return np.subtract(seconds, waited, dtype=np.float64)


def percentiles(calls: dict[str, list[Taken]]) -> dict[str, dict[str, float]]:
    """Return for each call, over all rounds, how often it was made, and its p50, p99 and longest time without the wait
    for a core. Also return its longest time with this wait. In seconds."""
    found = {}
    for name, rounds in calls.items():
        every = [each for taken in rounds for each in taken]
        if every:
            running = _running(every)
            p50, p99 = np.percentile(running, (50, 99))
            found[name] = {
                "calls": len(every),
                "p50": float(p50),
                "p99": float(p99),
                "max": float(running.max()),
                "max_waiting": max(seconds for seconds, _ in every),
            }
    return found


def _looks(takes: Taken, hashes: Taken, seconds: float) -> dict[str, float]:
    """Return for one round: how often a fingerprint was taken, the seconds of one, and the share of the round that all
    took."""
    taken = sum(float(_running(each).sum()) for each in (takes, hashes) if each)
    return {"looks": len(takes), "seconds": taken / max(1, len(takes)), "share": taken / seconds}


def measure(benchmark: Benchmark, model: EngineModel, checks: Checks) -> None:
    """Run rounds of new prompts, each computed by one engine and then loaded by another one."""
    rounds = benchmark.rounds
    blocks = _PROMPTS * (full_blocks(_TOKENS) + 2)
    arguments: dict[str, Any] = {
        "max_model_len": _TOKENS + 2 * _OUTPUT_TOKENS,
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_num_seqs": _PROMPTS,
        "kv_cache_memory_bytes": 2 * blocks * model.block_bytes + (64 << 20),
    }
    calls: dict[str, dict[str, list[Taken]]] = {NOTHING: {}, EVERYTHING: {}}
    looks: dict[str, list[dict[str, float]]] = {NOTHING: [], EVERYTHING: []}
    with ExitStack() as stack, benchmark.steps("rounds", rounds) as step:
        endpoint = stack.enter_context(kvstore_server(blocks * model.block_bytes * (rounds + 2)))
        store = stack.enter_context(Store(endpoint))
        connector = {"endpoint": endpoint}
        engines = {name: stack.enter_context(Engine(model, connector, timed=True, **arguments)) for name in calls}
        for engine in engines.values():
            engine.generate(model.prompts(_WARM_UP, _PROMPTS, _TOKENS), _OUTPUT_TOKENS)
        for number in range(rounds):
            prompts = model.prompts(number, _PROMPTS, _TOKENS)
            answers = []
            for name, engine in engines.items():
                engine.times()  # drops the times of the previous round, whose calls may go on after its answers
                before = store.settle()
                run = engine.generate(prompts, _OUTPUT_TOKENS)
                answers.append(run.answers)
                if name == NOTHING:
                    store.settle(before + _PROMPTS * full_blocks(_TOKENS))
                times = engine.times()
                looks[name].append(_looks(times.pop(TAKE), times.pop(HASH), run.seconds))
                for call, taken in times.items():
                    calls[name].setdefault(call, []).append(taken)
            checks.tokens(f"round {number}", prompts, answers[1], answers[0], engines[NOTHING])
            step()
    for name, timed in calls.items():
        told = percentiles(timed)
        benchmark.add(
            name,
            {call: [float(np.percentile(_running(taken), 99)) for taken in timed[call] if taken] for call in told},
            model=model.to_json(),
            prompts=_PROMPTS,
            prompt_tokens=_TOKENS,
            calls=told,
            fingerprints={key: median(look[key] for look in looks[name]) for key in looks[name][0]},
        )


def show(cases: list[Case]) -> None:
    for case in cases:
        headings = ("call", "calls", "p50", "p99", "longest", "with the wait for a core")
        table = Table(*headings, title=case.name, title_justify="left")
        for name, told in case.parameters["calls"].items():
            times = (time_text(told[key]) for key in ("p50", "p99", "max", "max_waiting"))
            table.add_row(name, f"{told['calls']}", *times)
        console().print(table)
        looks = case.parameters["fingerprints"]
        console().print(
            f"the weights were checked {looks['looks']:.0f} times a round, for {time_text(looks['seconds'])} each: "
            f"{looks['share']:.3%} of its time"
        )


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=add_engine_model_option)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    checks = Checks()
    measure(benchmark, ENGINE_MODELS[benchmark.options.model or "tiny"], checks)
    show(benchmark.cases)
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
