"""The tables that are computed from measured hand-overs: goodput, where two lines cross, and which engine shows the
first token."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.remote_kv_cache.bench_apart import shown
from benchmarks.remote_kv_cache.engine_process import Served
from benchmarks.remote_kv_cache.engine_tables import _attained, _goodput, _sooner


def of_rates(*shares: float) -> list[dict[str, Any]]:
    return [{"requests_per_s": rate, "attained": {"way": {"2": share}}} for rate, share in enumerate(shares, 1)]


@pytest.mark.parametrize(
    ("shares", "goodput"),
    [((1.0, 0.95, 0.85, 0.2), "2.5"), ((0.89, 0.5), "< 1"), ((1.0, 0.9), "> 2"), ((0.92, 0.4, 0.95), "1.0")],
)
def test_goodput_is_the_rate_with_enough_requests_attained(shares: tuple[float, ...], goodput: str) -> None:
    assert _goodput(of_rates(*shares), "way", "2") == goodput


def test_a_share_is_printed_with_its_interval() -> None:
    assert _attained(0.9, 120) == "90 (83 … 94)"
    assert _attained(1.0, 120) == "100 (97 … 100)"


@pytest.mark.parametrize(
    ("sooner_rounds", "said"),
    [
        ((7, 6, 7), "every rate"),
        ((5, 7, 7), "none"),
        ((7, 6, 5), "up to 10 MB/s"),
        ((7, 5, 7), "up to 1 MB/s"),
    ],
)
def test_layer_slices_are_faster_up_to_where_rounds_disagree(sooner_rounds: tuple[int, ...], said: str) -> None:
    rounds = [[(1.0, 2.0)] * count + [(2.0, 1.0)] * (7 - count) for count in sooner_rounds]
    assert _sooner([1e6, 10e6, 100e6], rounds) == said


def test_the_engine_that_has_the_first_token_first_shows_it() -> None:
    decoded = Served([7, 8, 9], [1.5, 1.6, 1.7], 32)
    assert shown(Served([7], [1.2], 0), decoded) == Served([7, 8, 9], [1.2, 1.6, 1.7], 32)
    assert shown(Served([7], [1.9], 0), decoded) == decoded
