"""How the GPU benchmark finds out how vLLM can run on a machine. The stand-in engines here fail in every way that it
handles."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpu import vllm_engines
from benchmarks.gpu.vllm_engines import SMALL, WAYS, Machine, OutOfTimeError, find_way
from benchmarks.remote_kv_cache.engine_checks import Checks, gap_where_they_part
from benchmarks.remote_kv_cache.engine_process import Answer, Run

NAMES = list(WAYS)
TOPS = [{1: -0.1, 2: -3.0}, {2: -0.9, 3: -1.2, 4: -2.0}]
RIGHT = [Answer([1, 2], 0, 0.1, TOPS), Answer([1, 2], 288, 0.1, TOPS)]


class Notes:
    """The parts of a benchmark that the code uses."""

    def __init__(self, within: float = 1000.0) -> None:
        self.options = argparse.Namespace(within=within)
        self.skipped: dict[str, str] = {}

    def skip(self, what: str, why: str) -> None:
        self.skipped[what] = why

    def say(self, text: str) -> None:
        pass


class StandIn:
    """An engine that gives these answers, or fails."""

    def __init__(self, answers: list[Answer] | str) -> None:
        self._answers = answers

    def generate(self, prompts: list[list[int]], output_tokens: int, tops: int = 0) -> Run:
        if isinstance(self._answers, str):
            raise RuntimeError(self._answers)
        return Run(0.0, 0.1, [self._answers.pop(0)])

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoStore:
    """Stands in for the code that counts the blocks of a server."""

    def __init__(self, endpoint: str) -> None:
        pass

    def settle(self, blocks: int) -> int:
        return blocks

    def __enter__(self) -> NoStore:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def server(*_: Any) -> Iterator[str]:
        yield "tcp://127.0.0.1:1"

    monkeypatch.setattr(vllm_engines, "kvstore_server", server)
    monkeypatch.setattr(vllm_engines, "Store", NoStore)


def machine(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[Answer] | str], on_gpu: bool = True) -> Machine:
    """Return a machine with stand-in engines. answers: name of a way to run vLLM -> the answers of that engine, or its
    error."""
    made = Machine(Notes(), SMALL, on_gpu, Checks())  # type: ignore[arg-type]

    def engine(*_: Any, **__: Any) -> StandIn:
        os.environ.update(made.way.environment)
        [name] = [name for name, way in WAYS.items() if way is made.way]
        return StandIn(answers[name])

    monkeypatch.setattr(made, "engine", engine)
    return made


@pytest.mark.usefixtures("no_server")
def test_the_first_way_with_equal_answers_from_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    other = [RIGHT[0], Answer([1, 4], 288, 0.1, TOPS)]
    computed_again = [RIGHT[0], Answer([1, 2], 0, 0.1, TOPS)]
    tried = machine(
        monkeypatch, {NAMES[0]: "no kernel image", NAMES[1]: other, NAMES[2]: computed_again, NAMES[3]: list(RIGHT)}
    )
    assert find_way(tried) == NAMES[3] and tried.way is WAYS[NAMES[3]]
    notes = tried.benchmark.skipped
    assert list(notes) == [f"vLLM, {name}" for name in NAMES[:3]] and notes[f"vLLM, {NAMES[0]}"] == "no kernel image"
    assert os.environ.pop("VLLM_USE_V2_MODEL_RUNNER") == "0"


@pytest.mark.usefixtures("no_server")
def test_a_failed_way_leaves_no_setting_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    tried = machine(monkeypatch, {NAMES[0]: "", NAMES[1]: "", NAMES[2]: list(RIGHT)})
    assert find_way(tried) == NAMES[2]
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ


@pytest.mark.usefixtures("no_server")
def test_if_vllm_cannot_run_every_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    tried = machine(monkeypatch, {name: f"reason {number}" for number, name in enumerate(NAMES)})
    with pytest.raises(RuntimeError, match=r"reason 0.*reason 3"):
        find_way(tried)


@pytest.mark.parametrize(
    ("given", "gap", "is_tie"),
    [([1, 2], 0.0, True), ([1, 3], 0.3, True), ([1, 4], 1.1, False), ([2, 9], 2.9, False), ([1, 7], math.inf, False)],
)
def test_a_different_answer_is_judged_by_the_right_ones_probability(given: list[int], gap: float, is_tie: bool) -> None:
    answer = Answer(given, 0, 0.1, TOPS)
    assert gap_where_they_part(answer, RIGHT[0]) == pytest.approx(gap)
    checks = Checks()
    checks.tokens("test", [[5]], [answer], [RIGHT[0]], None)  # type: ignore[arg-type]  # nobody else is asked
    assert (checks.equal, checks.tied, len(checks.wrong)) == (given == [1, 2], is_tie and given != [1, 2], not is_tie)


def test_nothing_is_started_that_exceeds_the_remaining_time() -> None:
    made = Machine(Notes(within=50.0), SMALL, True, Checks())  # type: ignore[arg-type]
    made.needs(40.0)
    with pytest.raises(OutOfTimeError, match="it takes about 60 s"):
        made.needs(60.0)
