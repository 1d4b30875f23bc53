"""The rounds of the GPU benchmark of first tokens: which prompt lengths fit into its time, and what is kept if the time
ends or a length fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import bench_first_token
from benchmarks.gpu.bench_first_token import Length, Measured, Schedule, computing_s
from benchmarks.gpu.names import COMPUTED, HOST, PINNED, SAVED
from benchmarks.remote_kv_cache.harness import Operation
from benchmarks.remote_kv_cache.report import Case

ROUNDS = Length(tokens=100, loads=3, computes=2)


class Clock:
    """Replaces the module `time`: a little time passes at every call, and a computation takes its own time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench_first_token, "time", clock)
    return clock


class Recorder:
    """The methods of `Benchmark` that a schedule uses."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.skipped: dict[str, str] = {}

    def say(self, text: str) -> None:
        pass

    def skip(self, what: str, why: str) -> None:
        self.skipped[what] = why

    def keep(self, case: Case) -> None:
        case.to_json()  # ratios use equal counts only
        self.cases.append(case)


class Asked:
    """A prompt that takes this many seconds to compute. fails: the number of the load that fails."""

    tokens, kv_bytes = 100, 1000

    def __init__(self, computing: float = 0.0, fails: int = 0) -> None:
        self._computing = computing
        self._fails = fails
        self._loads = 0

    def operations(self) -> list[Operation]:
        return [
            Operation(COMPUTED, self._compute),
            Operation(SAVED, self._compute),
            Operation(PINNED, lambda: None, 1000),
            Operation(HOST, self._load, 1000, PINNED),
        ]

    def _compute(self) -> None:
        bench_first_token.time.sleep(self._computing)

    def _load(self) -> None:
        self._loads += 1
        if self._loads == self._fails:
            raise RuntimeError("the device is lost")

    def found(self) -> dict[str, Any]:
        return {}


def counts(
    asked: Any, within: float = 100.0, warm: bool = False, fails: bool = False
) -> tuple[dict[str, int], Recorder]:
    """Return how often each operation was measured."""
    recorder: Any = Recorder()
    schedule = Schedule(recorder, SimpleNamespace(), dict, bench_first_token.time.monotonic() + within)  # type: ignore[arg-type]
    if warm:
        schedule._took[10] = {}
    measured = Measured("100 tokens", asked)
    if fails:
        with pytest.raises(RuntimeError):
            schedule._rounds(ROUNDS, measured)
    else:
        schedule._rounds(ROUNDS, measured)
    case = measured.case({})
    recorder.keep(case)
    return {name: len(seconds) for name, seconds in recorder.cases[-1].seconds.items()}, recorder


def test_loads_are_measured_in_later_rounds_and_computing_in_fewer() -> None:
    found, recorder = counts(Asked())
    assert found == {COMPUTED: 2, SAVED: 2, PINNED: 3, HOST: 3} and not recorder.skipped


def test_a_warm_model_is_measured_from_the_first_round() -> None:
    assert counts(Asked(), warm=True)[0] == {COMPUTED: 2, SAVED: 2, PINNED: 3, HOST: 3}


def test_lengths_that_do_not_fit_the_time_are_skipped_and_named() -> None:
    """The benchmark reserves 8 s for its control measurement."""
    found, recorder = counts(Asked(computing=0.3), within=9.0, warm=True)
    assert found == {COMPUTED: 1, SAVED: 1, PINNED: 3, HOST: 3}, "loads need less time"
    assert set(recorder.skipped) == {f"100 tokens, computed, round {number}" for number in (1, 2, 3)}
    found, recorder = counts(Asked(), within=7.0, warm=True)
    assert found == {COMPUTED: 1, SAVED: 1} and list(recorder.skipped) == ["100 tokens, from round 1 on"]


def test_whole_rounds_of_a_failing_length_are_kept() -> None:
    found, _ = counts(Asked(fails=4), fails=True)
    assert found[PINNED] == found[HOST] == 2


def test_a_length_without_time_for_one_round_is_not_started() -> None:
    recorder: Any = Recorder()
    schedule = Schedule(recorder, SimpleNamespace(), dict, bench_first_token.time.monotonic() + 20)  # type: ignore[arg-type]
    schedule._took = {8192: {COMPUTED: 0.5, SAVED: 0.5, HOST: 0.1}, 32768: {COMPUTED: 3.0, SAVED: 3.0, HOST: 0.4}}
    schedule._set_up_s = {32768: 1.0}
    schedule.measure(Length(131072, 3, 2))
    [(what, why)] = recorder.skipped.items()
    assert what == "131072 tokens" and why.startswith("one round takes about 7") and not recorder.cases


def test_computing_grows_with_the_square_of_the_tokens() -> None:
    known = {tokens: 5e-5 * tokens + 6e-10 * tokens**2 for tokens in (8192, 32768)}
    assert computing_s(131072, known) == pytest.approx(5e-5 * 131072 + 6e-10 * 131072**2)
    assert computing_s(32768, {8192: 1.0}) == 4.0
