"""The parts of a request's time, from the trace files of two engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.remote_kv_cache.test_request_time import (
    COMPUTED,
    D_QUEUE,
    D_STEP,
    FIRST,
    P_QUEUE,
    WAY,
    parts_of,
)
from kvstore_client.engine.trace_file import Slice, TraceFile, trace_events

NOW = 1_790_000_000.0


def write(path: Path, requests: list[list[Slice]]) -> None:
    """A file of these requests, in the order in which they ended."""
    file = TraceFile(path)
    for number, each in enumerate(requests):
        file.write(trace_events(f"{number + 1:032x}", f"r{number}", "here:1", each))
    file.close()


def test_the_parts_are_those_of_each_request_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    p, d = tmp_path / "p.json", tmp_path / "d.json"

    def prefilled(came: float) -> list[Slice]:
        return [
            Slice("P", "queue", NOW + came, NOW + came + 0.1),
            Slice("P", "prefill", NOW + came + 0.1, NOW + came + 1),
        ]

    def decoded(came: float, way: float) -> list[Slice]:
        at = NOW + came
        parts = [("queue", at, at + 0.2), ("load", at + 0.2, at + 1 + way), ("decode", at + 1 + way, at + 3)]
        return [Slice("D", *each) for each in parts]

    # One request before those that count, and one after them, which P has not written; the second ended first.
    write(p, [prefilled(-10), prefilled(5), prefilled(0)])
    write(d, [decoded(-10, 9), decoded(5, 0.02), decoded(0, 0.01), decoded(9, 8)])
    found = parts_of([p, d], np.array([1.5, 1.25]))
    expected = {
        P_QUEUE: [0.1, 0.1],
        COMPUTED: [0.9, 0.9],
        WAY: [0.01, 0.02],
        D_QUEUE: [0.2, 0.2],
        D_STEP: [0.49, 0.23],
        FIRST: [1.5, 1.25],
    }
    assert found.keys() == expected.keys()
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(seconds, abs=1e-4), name


def test_files_without_all_requests_are_an_error(tmp_path: Path) -> None:
    def queued(came: float, row: str) -> list[Slice]:
        return [Slice(row, name, NOW + came, NOW + came + 0.1) for name in ("queue", "prefill", "load")]

    p, d = tmp_path / "p.json", tmp_path / "d.json"
    write(d, [queued(number, "D") for number in range(3)])
    write(p, [queued(1, "P")])
    with pytest.raises(AssertionError, match="1 requests of 1 with queue, prefill: expected 2"):
        parts_of([p, d], np.array([1.0, 1.0]))
    with pytest.raises(AssertionError, match="3 requests came to D: expected more than 3"):
        parts_of([p, d], np.ones(3))
