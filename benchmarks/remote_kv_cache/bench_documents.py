"""Measures repeated questions about long documents. There are more documents than an engine's cache holds.

*Documents*: there are six documents, and each request has one of them and a new question. The engine's own cache has
room for two documents, its CPU tier for three or none, and the store for all. Requests are sent one, two or four at a
time, in an order that is shuffled for each round. Three engines are used in turn: one without the connector, one with
it, and one with it but without a CPU tier. Their caches keep the blocks of earlier requests. Before the first round,
each document is used once.

*One long prompt*: a prompt of 100 000 tokens is computed without a store, computed while the store is filled, and
loaded after a restart.

Tokens are compared with those of the engine without the connector. Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from typing import Final

from rich.table import Table

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS, ENGINE_MODELS, EngineModel, full_blocks
from benchmarks.remote_kv_cache.engine_process import Answer
from benchmarks.remote_kv_cache.engines import WITHOUT, Engine, Store
from benchmarks.remote_kv_cache.first_token import STEPS, measure_first_token
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import console

DOCUMENTS: Final = "documents"
LONG: Final = "one long prompt"
PARTS: Final = (DOCUMENTS, LONG)
TIERED: Final = "with a CPU tier for three"
STORE_ONLY: Final = "without a CPU tier"
ENGINES: Final = (WITHOUT, TIERED, STORE_ONLY)
COUNT: Final = 6
AT_ONCE: Final = (1, 2, 4)
DOCUMENT_TOKENS: Final = 4096
QUESTION_TOKENS: Final = 32
ASKED: Final = 2  # questions about each document in a round
LONG_TOKENS: Final = 100_000
_OUTPUT_TOKENS: Final = 8
_ROUNDS: Final = 3


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of it")
    parser.add_argument("--long-tokens", type=int, help=f"default: {LONG_TOKENS}; --quick: 1000")


class Library:
    """The documents, and the engines that answer questions about them."""

    def __init__(self, stack: ExitStack, model: EngineModel, tokens: int, checks: Checks) -> None:
        self._model, self._checks = model, checks
        self.documents = model.prompts(1, COUNT, tokens)
        self._question = 0
        blocks = full_blocks(tokens + QUESTION_TOKENS + _OUTPUT_TOKENS) + 1
        document = blocks * model.block_bytes
        endpoint = stack.enter_context(kvstore_server(4 * COUNT * document))
        self.store = stack.enter_context(Store(endpoint))
        arguments = {
            "max_model_len": tokens + QUESTION_TOKENS + 2 * _OUTPUT_TOKENS,
            # Four concurrent requests must fit; two more documents fit in the rest.
            "kv_cache_memory_bytes": (max(AT_ONCE) + 2) * document,
        }
        connectors = {
            WITHOUT: None,
            TIERED: {"endpoint": endpoint, "cpu_bytes": 3 * document},
            STORE_ONLY: {"endpoint": endpoint, "cpu_bytes": 0},
        }
        self.engines = {
            name: stack.enter_context(Engine(model, connector, **arguments)) for name, connector in connectors.items()
        }
        for name, engine in self.engines.items():
            for document_tokens in self.documents:
                engine.generate([[*document_tokens, *self._ask()]], 1)
            if name != WITHOUT:
                self.store.settle()

    def _ask(self) -> list[int]:
        """Return a new question."""
        self._question += 1
        return self._model.prompts(1000 + self._question, 1, QUESTION_TOKENS)[0]

    def round(self, seed: int, at_once: int) -> dict[str, tuple[float, float, float]]:
        """Run one round. Return for each engine the mean seconds to the first token, the total seconds, and the share
        of tokens from a cache."""
        order = [number for number in range(COUNT) for _ in range(ASKED)]
        random.Random(seed).shuffle(order)
        requests = [[*self.documents[number], *self._ask()] for number in order]
        found: dict[str, tuple[float, float, float]] = {}
        right: list[list[Answer]] = []
        for name, engine in self.engines.items():
            first: list[float] = []
            seconds, cached = 0.0, 0
            for start in range(0, len(requests), at_once):
                batch = requests[start : start + at_once]
                run = engine.generate(batch, _OUTPUT_TOKENS)
                first += [answer.first_token_s for answer in run.answers]
                cached += sum(answer.cached_tokens for answer in run.answers)
                seconds += run.seconds
                if name == WITHOUT:
                    right.append(run.answers)
                else:
                    expected = right[start // at_once]
                    what = f"{name}, {at_once} at once, seed {seed}"
                    self._checks.tokens(what, batch, run.answers, expected, self.engines[WITHOUT])
            total = sum(map(len, requests))
            found[name] = sum(first) / len(first), seconds, cached / total
        return found


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=_ROUNDS, add_options=_options)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    checks = Checks()
    model = ENGINE_MODELS["tiny" if benchmark.quick else "mid"]
    if DOCUMENTS in benchmark.options.parts:
        _documents(benchmark, model, 256 if benchmark.quick else DOCUMENT_TOKENS, checks)
    if LONG in benchmark.options.parts:
        tokens = benchmark.options.long_tokens or (1000 if benchmark.quick else LONG_TOKENS)
        with benchmark.steps(f"{tokens} tokens", STEPS) as step:
            case = measure_first_token(ENGINE_MODELS["tiny"], tokens, 1, None, checks, step)
        benchmark.cases.append(case)
        for name in case.seconds:
            console().print(f"{tokens} tokens, {name}: {case.median(name):.3f} s")
    return conclude(benchmark, checks, model=model.to_json())


def _documents(benchmark: Benchmark, model: EngineModel, tokens: int, checks: Checks) -> None:
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    with ExitStack() as stack, benchmark.steps("starting three engines", benchmark.rounds * len(AT_ONCE)) as step:
        library = Library(stack, model, tokens, checks)
        for number in range(benchmark.rounds):
            for at_once in random.Random(number).sample(AT_ONCE, len(AT_ONCE)):
                step(f"round {number + 1}: {at_once} at once", 0)
                for name, values in library.round(100 * number + at_once, at_once).items():
                    found.setdefault((at_once, name), []).append(values)
                step()
    table = Table("at once", "engine", "first token, s", "requests/s", "from a cache", title="Six documents")
    for at_once in AT_ONCE:
        firsts = {name: [values[0] for values in found[at_once, name]] for name in ENGINES}
        benchmark.add(
            f"{at_once} at once",
            firsts,
            references=(WITHOUT,),
            group=DOCUMENTS,
            at_once=at_once,
            documents=COUNT,
            document_tokens=tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            asked=ASKED,
            requests_rps={name: _rate([each[1] for each in found[at_once, name]]) for name in ENGINES},
            cached={name: _mean([each[2] for each in found[at_once, name]]) for name in ENGINES},
        )
        for name in ENGINES:
            rate = benchmark.cases[-1].parameters["requests_rps"][name]
            cached = benchmark.cases[-1].parameters["cached"][name]
            table.add_row(str(at_once), name, f"{_mean(firsts[name]):.3f}", f"{rate:.2f}", f"{cached:.0%}")
    console().print(table)


def _rate(seconds: list[float]) -> float:
    return COUNT * ASKED / _mean(seconds)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
