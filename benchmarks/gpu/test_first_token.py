"""The first token of a prompt under a toy transformer with an 8B model's shapes: computed, and loaded by the connector.

What loads and saves is the worker's half of the connector, as in an engine, on a real server. *Computed and saved*:
every chunk's blocks are copied out and sent while the next one is computed. *From host memory*: from the connector's
pool, page-locked. *From the store*: through its staging rows, over shared memory and over TCP. A time ends when the
first token is known; the last block's tokens are always computed: *already in the cache* is the time of that alone. The
limit of a load is one page-locked copy of as many bytes.

After each load the bytes of all blocks are compared with those that were computed, and the logits with those computed
behind these: the result has the largest difference. As a control, another prompt's blocks are loaded in the place of
the first ones, and the logits must be others. Without a CUDA device: a small model and short prompts. Needs torch;
without it nothing is measured.

Each length is kept as soon as it has anything; a failure, or the end of the time, costs what comes after it.
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
_CONTROL_S: Final = 8.0  # what is left for the control, and for the end of the servers
_KEPT_EVERY_S: Final = 15.0  # a length's result, while it grows


@dataclass(frozen=True)
class Length:
    """A prompt's tokens; how often it is loaded; how often it is computed, with and without saving it."""

    tokens: int
    loads: int
    computes: int


LENGTHS: Final = (Length(8192, 7, 3), Length(32768, 7, 3), Length(131072, 3, 2))
SMALL_LENGTHS: Final = (Length(128, 1, 1), Length(320, 1, 1))


class Schedule:
    """The rounds of all lengths, within a time."""

    def __init__(
        self, benchmark: Benchmark, model: ToyModel, about: Callable[[], Mapping[str, Any]], until: float
    ) -> None:
        """about: -> parameters of each case. until: on the clock of `time.monotonic`."""
        self._benchmark = benchmark
        self._model = model
        self._about = about
        self._until = until
        self._took: dict[int, dict[str, float]] = {}  # tokens -> operation -> seconds, with what is not timed
        self._set_up_s: dict[int, float] = {}

    @property
    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def measure(self, length: Length) -> None:
        """All rounds of a length, or as many as there is time for. What was measured is kept, also if it fails."""
        from benchmarks.gpu.toy_prompt import Prompt, make_rig

        name = f"{length.tokens} tokens"
        least_s, all_s = self._estimate(length)
        about = f"about {all_s:.0f} s" if all_s else "a time that nothing has told yet"
        self._benchmark.say(f"{name}: all rounds take {about}, {self._left_s:.0f} s are left")
        if least_s > self._left_s:
            self._benchmark.skip(name, f"one round takes about {least_s:.0f} s, and {self._left_s:.0f} s are left")
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
        """-> seconds for the first two rounds, which are the fewest, and for all; 0 if nothing was measured yet."""
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
        """The first round is not counted, except for what is computed: the model is warm since the first length."""
        warm = bool(self._took)
        took: dict[str, float] = {}
        kept = time.monotonic()
        for number in range(length.loads + 1):
            computes, loads = measured.missing_computes(length.computes), measured.loads
            if number:
                spare = self._left_s - _CONTROL_S
                loading, computing = (sum(took[each.name] for each in some) for some in (loads, computes))
                if loading > spare:
                    self._benchmark.skip(f"{measured.name}, from round {number} on", f"{spare:.0f} s were left")
                    break
                if loading + computing > spare:
                    self._benchmark.skip(f"{measured.name}, computed in round {number}", f"{spare:.0f} s were left")
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
    """What was measured of a prompt."""

    def __init__(self, name: str, prompt: Prompt) -> None:
        self.name = name
        self._prompt = prompt
        self._operations = prompt.operations()
        self._computes = [each for each in self._operations if each.name in _COMPUTES]
        self.loads = [each for each in self._operations if each.name not in _COMPUTES]
        self.seconds: dict[str, list[float]] = {operation.name: [] for operation in self._operations}

    def missing_computes(self, rounds: int) -> list[Operation]:
        """What was computed less often than that."""
        return [each for each in self._computes if len(self.seconds[each.name]) < rounds]

    def case(self, about: Mapping[str, Any]) -> Case | None:
        """All whole rounds. about: further parameters. None: there is nothing yet."""
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
    """Run it, with what goes before and after. -> its own seconds."""
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
        "--within", type=float, default=240.0, metavar="SECONDS", help="begin nothing that takes longer; default: 240"
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
        except Exception as error:  # whatever it is, it costs what is left of this length only
            traceback.print_exc()
            benchmark.skip(f"{length.tokens} tokens, the rest", f"failed: {type(error).__name__}: {error}")
            status = 1
    benchmark.finish(copies=about()["copies"])
    return status


if __name__ == "__main__":
    sys.exit(main())
