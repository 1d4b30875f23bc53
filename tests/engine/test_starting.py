"""The connector's scheduling half is made from the workers' first reports, and no request waits long for it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.harness import make_namespace, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.engine.paged.plan import RankStore
    from kvstore_client.vllm.connector import starting
    from kvstore_client.vllm.connector.starting import SchedulerStart

STORE = RankStore(make_namespace(64, "starting"), 8)


class Half:
    def __init__(self, ranks: Sequence[RankStore]) -> None:
        self.ranks = list(ranks)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Maker:
    """Makes the scheduling half when the test allows it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def __call__(self, ranks: Sequence[RankStore]) -> Any:
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        return Half(ranks)


@pytest.fixture
def maker() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    maker.may_end.set()


def test_requests_wait_until_all_workers_reported_and_the_half_is_made(maker: Maker) -> None:
    start = SchedulerStart(2, maker)
    assert start.is_coming() and start.half is None
    start.take([STORE])
    maker.may_end.set()
    assert start.is_coming() and start.half is None, "one worker has not told"
    start.take([STORE])
    wait_until(lambda: start.half is not None)
    half: Any = start.half
    assert half.ranks == [STORE, STORE] and not start.is_coming()
    start.close()
    assert half.closed


def test_no_request_waits_long_for_a_slow_half(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "STORE_START_S", 0.2)
    start = SchedulerStart(1, maker)
    start.take([STORE])
    assert start.is_coming()
    wait_until(lambda: not start.is_coming())
    maker.may_end.set()
    wait_until(lambda: start.half is not None)
    start.close()


def test_without_a_half_nothing_is_loaded_and_no_request_waits(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    maker.error = ValueError("the worker of rank 1 and the scheduler hash blocks differently")
    start = SchedulerStart(1, maker)
    start.take([STORE])
    maker.may_end.set()
    wait_until(lambda: not start.is_coming(), 1)
    assert start.half is None
    assert "nothing will be loaded or saved" in caplog.text and "hash blocks differently" in caplog.text
    start.close()
