"""Measures the time to the first token of a toy transformer with an 8B model's shapes, for prompts that are computed
and prompts that the connector loads.

As in an engine, the worker's half of the connector loads blocks from a real server and saves blocks there. *Computed
and saved* means that every chunk's blocks are copied out and sent while the next chunk is computed. *From host memory*
loads from the connector's page-locked pool. *From the store* loads through the connector's staging rows, over shared
memory and over TCP. Each time includes the computation of the first token. The tokens of the last block are always
computed, and *already in the cache* is the time for only these. The limit of a load is one page-locked copy of the same
number of bytes.

After each load the bytes of all blocks are compared with those that were computed. The logits after the loaded blocks
are compared with those after the computed blocks, and the result has the largest difference. As a control, another
prompt's blocks are loaded in place of the first ones, and the logits must differ. Without a CUDA device, a small model
and short prompts are used. Needs torch; without it nothing is measured.

The result of a prompt length is written as soon as it is measured, so a failure or the time limit loses only the later
ones.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.driver import install
from benchmarks.gpu.names import COMPUTED, SAVED
from benchmarks.remote_kv_cache.copies import no_cuda
from benchmarks.remote_kv_cache.harness import Benchmark, Operation, missing_module
from benchmarks.remote_kv_cache.report import Case

if TYPE_CHECKING:
    from benchmarks.gpu.toy_model import ToyModel
    from benchmarks.gpu.toy_prompt import Prompt

_COMPUTES: Final = (COMPUTED, SAVED)
_CONTROL_S: Final = 8.0  # reserved for the control and for stopping the servers
_KEPT_EVERY_S: Final = 15.0  # how often the growing result of a length is written


@dataclass(frozen=True)
class Length:
    """The number of tokens of a prompt, how often it is loaded, and how often it is computed with and without saving
    it."""

    tokens: int
    loads: int
    computes: int


LENGTHS: Final = (Length(8192, 7, 3), Length(32768, 7, 3), Length(131072, 3, 2))
SMALL_LENGTHS: Final = (Length(128, 1, 1), Length(320, 1, 1))


class Schedule:
    """The rounds of all lengths, within a time limit."""

    def __init__(
        self, benchmark: Benchmark, model: ToyModel, about: Callable[[], Mapping[str, Any]], until: float
    ) -> None:
        """about: returns parameters of each case. until: the time to stop, on the clock of `time.monotonic`."""
        self._benchmark = benchmark
        self._model = model
        self._about = about
        self._until = until
        self._took: dict[int, dict[str, float]] = {}  # tokens -> operation -> all its seconds
        self._set_up_s: dict[int, float] = {}

    @property
    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def measure(self, length: Length) -> None:
        """Run all rounds of a length, or those that fit the time left. If one fails, the results of the earlier ones
        are kept."""
        from benchmarks.gpu.toy_prompt import Prompt, make_rig

        name = f"{length.tokens} tokens"
        least_s, all_s = self._estimate(length)
        about = f"about {all_s:.0f} s" if all_s else "an unknown time"
        self._benchmark.say(f"{name}: all rounds take {about}, {self._left_s:.0f} s are left")
        if least_s > self._left_s:
            self._benchmark.skip(name, f"one round takes about {least_s:.0f} s, but only {self._left_s:.0f} s are left")
            return
        began = time.monotonic()
        with make_rig(self._model, length.tokens) as rig:
            prompt = Prompt(rig, length.tokens)
            self._set_up_s[length.tokens] = time.monotonic() - began
            measured = Measured(name, prompt)
            try:
                self._rounds(length, measured)
                prompt.check_control()
            finally:
                self._keep(measured)

    def _estimate(self, length: Length) -> tuple[float, float]:
        """Return the estimated seconds of the first two rounds (the minimum) and of all rounds; 0 if nothing was
        measured yet."""
        if not self._took:
            return 0.0, 0.0
        computes = sum(
            computing_s(length.tokens, {tokens: took[name] for tokens, took in self._took.items()})
            for name in _COMPUTES
        )
        before = max(self._took)
        longer = length.tokens / before
        loads = longer * sum(seconds for name, seconds in self._took[before].items() if name not in _COMPUTES)
        around = longer * self._set_up_s[before] + _CONTROL_S
        return around + computes + 2 * loads, around + length.computes * computes + (length.loads + 1) * loads

    def _rounds(self, length: Length, measured: Measured) -> None:
        """Run the rounds. In the first one only computing counts, and only if an earlier length has warmed up the
        model."""
        warm = bool(self._took)
        took: dict[str, float] = {}
        kept = time.monotonic()
        for number in range(length.loads + 1):
            computes, loads = measured.missing_computes(length.computes), measured.loads
            if number:
                spare = self._left_s - _CONTROL_S
                loading, computing = (sum(took[each.name] for each in some) for some in (loads, computes))
                if loading > spare:
                    self._benchmark.skip(f"{measured.name}, from round {number} on", f"only {spare:.0f} s were left")
                    break
                if loading + computing > spare:
                    self._benchmark.skip(f"{measured.name}, computed, round {number}", f"only {spare:.0f} s were left")
                    computes = []
            order = [*computes, *loads]
            if number:
                random.Random(number).shuffle(order)
            for operation in order:
                began = time.monotonic()
                elapsed = timed(operation)
                took[operation.name] = time.monotonic() - began
                if number or (warm and operation in computes):
                    measured.seconds[operation.name].append(elapsed)
                self._benchmark.say(f"{measured.name}, round {number}, {operation.name}: {elapsed:.4f} s")
            if time.monotonic() - kept > _KEPT_EVERY_S:
                self._keep(measured)
                kept = time.monotonic()
        self._took[length.tokens] = took

    def _keep(self, measured: Measured) -> None:
        if (case := measured.case(self._about())) is not None:
            self._benchmark.keep(case)


class Measured:
    """The measurements of one prompt."""

    def __init__(self, name: str, prompt: Prompt) -> None:
        self.name = name
        self._prompt = prompt
        self._operations = prompt.operations()
        self._computes = [each for each in self._operations if each.name in _COMPUTES]
        self.loads = [each for each in self._operations if each.name not in _COMPUTES]
        self.seconds: dict[str, list[float]] = {operation.name: [] for operation in self._operations}

    def missing_computes(self, rounds: int) -> list[Operation]:
        """Return the operations that compute the prompt and ran fewer than `rounds` times."""
        return [each for each in self._computes if len(self.seconds[each.name]) < rounds]

    def case(self, about: Mapping[str, Any]) -> Case | None:
        """Return the case of all complete rounds; None if there is none yet. about: further parameters."""
        rounds = min(len(self.seconds[each.name]) for each in self.loads)
        seconds = {
            each.name: self.seconds[each.name][: rounds if each in self.loads else None] for each in self._operations
        }
        there = [each for each in self._operations if seconds[each.name]]
        if not there:
            return None
        prompt, medians = self._prompt, {each.name: median(seconds[each.name]) for each in there}
        return Case(
            name=self.name,
            seconds={each.name: seconds[each.name] for each in there},
            moved={each.name: each.moved for each in there},
            limits={each.name: each.limit for each in there if each.limit},
            parameters={
                "prompt_tokens": prompt.tokens,
                "kv_bytes": prompt.kv_bytes,
                "tokens_per_s": {name: round(prompt.tokens / value) for name, value in medians.items()},
                "kv_gb_per_s": {
                    each.name: round(each.moved / medians[each.name] / 1e9, 3) for each in there if each.moved
                },
                **about,
                **prompt.found(),
            },
        )


def timed(operation: Operation) -> float:
    """Run an operation with its `before` and `after`. Return its own seconds."""
    operation.before()
    gc.collect()
    began = time.perf_counter()
    operation.run()
    elapsed = time.perf_counter() - began
    operation.after()
    return elapsed


def computing_s(tokens: int, known: Mapping[int, float]) -> float:
    """The estimated seconds to compute a prompt: a · tokens + b · tokens², fitted to the two longest measured ones."""
    points = sorted(known.items())[-2:]
    (fewer, short_s), (more, long_s) = points[0], points[-1]
    slope = max(0.0, (long_s / more - short_s / fewer) / (more - fewer)) if more > fewer else 0.0
    seconds: float = tokens * (long_s / more + slope * (tokens - more))
    return seconds


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--within", type=float, default=240.0, metavar="SECONDS", help="start nothing that ends later; default: 240"
    )


def main() -> int:
    began = time.monotonic()
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=_add_options)
    if missing_module("torch"):
        benchmark.skip("everything", missing_module("torch"))
        benchmark.finish()
        return 0
    import torch

    from benchmarks.gpu.toy_model import LLAMA_8B, SMALL, ToyModel

    no_device = no_cuda()
    small = bool(no_device) or benchmark.quick
    shape, lengths = (SMALL, SMALL_LENGTHS) if small else (LLAMA_8B, LENGTHS)
    if small:
        said = ", ".join(str(length.tokens) for length in LENGTHS)
        benchmark.skip(f"prompts of {said} tokens with the shapes of an {LLAMA_8B.name} model", no_device or "--quick")
    copies = None if no_device else install()
    if no_device:
        torch.set_num_threads(1)  # the server needs the other core

    def about() -> dict[str, Any]:
        return {
            "block_bytes": shape.block_bytes,
            "model": shape.name,
            "dtype": "bfloat16",
            "chunk_tokens": shape.chunk,
            "device": "CPU" if no_device else torch.cuda.get_device_name(),
            "copies": "the CPU" if copies is None else copies.how,
        }

    model = ToyModel(shape, 1, "cpu" if no_device else "cuda")
    schedule = Schedule(benchmark, model, about, began + benchmark.options.within)
    status = 0
    for length in lengths:
        rounds = benchmark.options.rounds or length.loads
        try:
            schedule.measure(Length(length.tokens, rounds, min(rounds, length.computes)))
        except Exception as error:  # any error loses only the rest of this length
            traceback.print_exc()
            benchmark.skip(f"{length.tokens} tokens, the rest", f"failed: {type(error).__name__}: {error}")
            status = 1
    benchmark.finish(copies=about()["copies"])
    return status


if __name__ == "__main__":
    sys.exit(main())
