"""The parts of a request's time, from the trace files of two engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.remote_kv_cache.bench_request_time import (
    COMPUTED,
    D_QUEUE,
    D_STEP,
    FIRST,
    P_QUEUE,
    WAY,
    parts_of,
)
from kvstore_client.engine.span_export import SpanSender, to_file
from kvstore_client.engine.spans import Span
from kvstore_client.engine.trace_context import TraceContext

NOW = 1_790_000_000.0


def write(path: Path, requests: list[list[Span]]) -> None:
    """Write a file of these requests, in the order in which they ended."""
    sender = SpanSender("tests", "here:1", [to_file(path)])
    for number, each in enumerate(requests):
        sender.send(TraceContext(f"{number + 1:032x}", "", 1), f"r{number}", each, NOW)
    sender.close()


def part(row: str, name: str, began: float, ended: float) -> Span:
    return Span(name, "internal", row, {}, began, ended)


def test_each_requests_parts_come_in_order(tmp_path: Path) -> None:
    p, d = tmp_path / "p.json", tmp_path / "d.json"

    def prefilled(came: float) -> list[Span]:
        return [
            part("P", "queue", came, came + 0.1),
            part("P", "prefill", came + 0.1, came + 1),
        ]

    def decoded(came: float, way: float) -> list[Span]:
        at = came
        parts = [("queue", at, at + 0.2), ("load", at + 0.2, at + 1 + way), ("decode", at + 1 + way, at + 3)]
        return [part("D", *each) for each in parts]

    # One request comes before those that count. One comes after them, and P has not written it. The second request
    # ended first.
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


def test_files_that_lack_requests_are_an_error(tmp_path: Path) -> None:
    def queued(came: float, row: str) -> list[Span]:
        return [part(row, name, came, came + 0.1) for name in ("queue", "prefill", "load")]

    p, d = tmp_path / "p.json", tmp_path / "d.json"
    write(d, [queued(number, "D") for number in range(3)])
    write(p, [queued(1, "P")])
    with pytest.raises(AssertionError, match="1 requests of 1 with queue, prefill: expected 2"):
        parts_of([p, d], np.array([1.0, 1.0]))
    with pytest.raises(AssertionError, match="3 requests came to D: expected more than 3"):
        parts_of([p, d], np.ones(3))
