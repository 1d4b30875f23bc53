"""The summary of the proxy's last requests: percentiles, shares and history, within its bounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from starlette.datastructures import Headers

from kvstore_serving.proxy import recent
from kvstore_serving.proxy.recent import Recent
from kvstore_serving.proxy.record import Record, begin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `Recent` sees, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(recent.time, "monotonic", lambda: now[0])
    return now


def ended(**fields: Any) -> Record:
    record = begin("POST", "/v1/completions", Headers())
    for name, value in {"decision": "split", "outcome": "ok", "stream": True, **fields}.items():
        setattr(record, name, value)
    return record


def test_without_requests_there_are_no_figures(clock: list[float]) -> None:
    status = Recent().status()
    assert status["requests"] == 0 and status["split_share"] is None and status["latency"] == []
    assert set(status["history"]["requests_per_s"]) == {0.0} and set(status["history"]["ttft_p50_s"]) == {None}


def test_percentiles_are_values_that_were_measured(clock: list[float]) -> None:
    some = Recent()
    for number in range(1, 101):  # two in each slot
        clock[0] = 1000.0 + 2.5 * number
        some.add(ended(ttft_s=number / 100, tpot_s=number / 1000))
    (row,) = some.status()["latency"]
    assert (row["ttft_p50_s"], row["ttft_p90_s"], row["ttft_p99_s"]) == (0.5, 0.9, 0.99)
    assert (row["tpot_p50_s"], row["tpot_p90_s"], row["tpot_p99_s"]) == (0.05, 0.09, 0.099)


def test_shares_and_tokens_are_those_of_the_window(clock: list[float]) -> None:
    some = Recent()
    some.add(ended(decision="split", prompt_tokens=100, cached_tokens=40, output_tokens=10, ttft_s=0.1))
    clock[0] += 200
    some.add(ended(decision="colocate", prompt_tokens=100, cached_tokens=100, output_tokens=5, ttft_s=0.3))
    some.add(ended(decision="none", outcome="rejected", stream=False))
    status = some.status()
    assert status["decisions"] == {"split": 1, "colocate": 1, "none": 1}
    assert status["outcomes"] == {"ok": 2, "rejected": 1}
    assert (status["split_share"], status["prompt_tokens"], status["cached_tokens"]) == (0.5, 200, 140)
    assert {row["decision"]: row["ttft_p50_s"] for row in status["latency"]} == {
        "split": 0.1, "colocate": 0.3, "none": None
    }  # fmt: skip
    clock[0] += 105  # the first is too old now
    later = some.status()
    assert later["decisions"] == {"colocate": 1, "none": 1} and later["split_share"] == 0.0


def test_history_puts_each_request_into_its_slot(clock: list[float]) -> None:
    some = Recent()
    for seconds in (0.0, 4.0, 12.0):
        clock[0] = 1000.0 + seconds
        some.add(ended(output_tokens=50, ttft_s=seconds))
    history = some.status()["history"]
    slots = math.ceil(recent.WINDOW_S / recent.SLOT_S)
    assert all(len(values) == slots for values in history.values())
    assert history["requests_per_s"][-3:] == [0.4, 0.0, 0.2]
    assert history["output_tokens_per_s"][-3:] == [20.0, 0.0, 10.0]
    assert history["ttft_p50_s"][-3:] == [0.0, None, 12.0] and history["ttft_p90_s"][-3:] == [4.0, None, 12.0]


def test_a_summary_is_kept_for_a_second(clock: list[float]) -> None:
    some = Recent()
    some.add(ended(ttft_s=0.1))
    assert some.status()["requests"] == 1
    some.add(ended(ttft_s=0.1))
    assert some.status()["requests"] == 1
    clock[0] += recent.FRESH_S
    assert some.status()["requests"] == 2


def test_a_flood_of_requests_is_counted_in_full_and_sampled_fairly(clock: list[float]) -> None:
    random.seed(1)
    some = Recent()
    for number in range(20_000):
        some.add(ended(ttft_s=number / 20_000))
    status = some.status()
    (row,) = status["latency"]
    assert status["requests"] == row["requests"] == 20_000
    assert len(some._slots) == 1 and len(some._slots[0].latencies["split"]) == recent.SAMPLED
    assert 0.3 < row["ttft_p50_s"] < 0.7, "the sample is of the whole slot, not of its beginning or end"


def test_five_minutes_of_any_load_hold_a_bounded_sample(clock: list[float]) -> None:
    some = Recent()
    for slot in range(200):
        clock[0] = 1000.0 + slot * recent.SLOT_S
        for decision in ("split", "colocate", "none"):
            for _ in range(recent.SAMPLED + 10):
                some.add(ended(decision=decision, ttft_s=0.1, tpot_s=0.01))
    slots = recent.WINDOW_S / recent.SLOT_S
    assert len(some._slots) == slots
    assert sum(len(sample) for slot in some._slots for sample in slot.latencies.values()) == 3 * slots * recent.SAMPLED
