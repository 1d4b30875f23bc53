"""The proxy and engines whose worker has frozen: they accept requests, answer /health, and say nothing else.

With the default time-outs, which are minutes. Real processes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore_serving.proxy.silence import ENOUGH
from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, Reading, StandInEngine, chunks_of, post, text_of
from tests.support.stand_in_engine import MODEL, expected

PROMPT = list(range(100, 140))
COMPLETIONS = "/v1/completions"
SOON_S = 30.0  # far less than the time-outs
USERS = 4


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, StandInEngine]]:
    found = {name: StandInEngine(tmp_path / f"{name}.log") for name in "pqab"}
    yield found
    for engine in found.values():
        engine.kill()


@contextlib.contextmanager
def serving(
    folder: Path, store: Server, engines: dict[str, StandInEngine], prefill: str, decode: str, *more: str
) -> Iterator[ProxyProcess]:
    """A proxy that has learned what is usual."""
    roles = [f"--prefill={engines[name].url}" for name in prefill] + [
        f"--decode={engines[name].url}" for name in decode
    ]
    times = ["--check-seconds=0.1", "--backoff-seconds=0.1", "--check-timeout-seconds=1"]
    with ProxyProcess(folder / "proxy", f"--store={store.endpoint}", *roles, *times, *more) as proxy:
        for number in range(4 * ENOUGH):
            assert answered(proxy, number % 2 == 0)
        yield proxy


def answered(proxy: ProxyProcess, stream: bool) -> bool:
    """Whether a request has the right answer."""
    if stream:
        return text_of(chunks_of(proxy.url, COMPLETIONS, completion())) == expected(PROMPT, 12)
    status, body = post(proxy.url, COMPLETIONS, completion())
    return status == 200 and expected(PROMPT, 12).encode() in body


def state(proxy: ProxyProcess, engine: StandInEngine) -> dict[str, Any]:
    pools = proxy.status()["pools"].values()
    return next(each for pool in pools for each in pool if each["url"] == engine.url)


def asked(engine: StandInEngine) -> int:
    return len(engine.seen()["requests"])


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_a_frozen_engine_is_left_by_all_and_comes_back_by_the_proxys_own_question(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path, role: str, stream: bool
) -> None:
    prefill, decode, policy = ("", "ab", "colocate") if role == "decode" else ("pq", "a", "split")
    frozen = engines["b" if role == "decode" else "p"]
    with (
        serving(tmp_path, tcp_server, engines, prefill, decode, f"--policy={policy}") as proxy,
        ThreadPoolExecutor(USERS) as users,
    ):
        over = threading.Event()

        def ask_on() -> list[bool]:
            answers = []
            while not over.is_set():
                answers.append(answered(proxy, stream))
            return answers

        frozen.behave(frozen=True)
        began = time.monotonic()
        asking = [users.submit(ask_on) for _ in range(USERS)]
        wait_until(lambda: state(proxy, frozen)["silent"], SOON_S, "it is found out")
        assert state(proxy, frozen)["healthy"], "/health says nothing of it"
        wait_until(lambda: not frozen.seen()["running"], what="nobody waits for it")
        before = asked(frozen)
        for _ in range(20):
            assert answered(proxy, stream)
        assert asked(frozen) == before, "no user's request finds out whether it is back"
        over.set()
        assert all(right for each in asking for right in each.result(SOON_S))
        assert time.monotonic() - began < 2 * SOON_S
        frozen.behave()
        wait_until(lambda: not state(proxy, frozen)["silent"], 60, "the proxy's question is answered")

        def used_again() -> bool:
            assert all(users.map(lambda _: answered(proxy, stream), range(USERS)))
            return asked(frozen) > 0

        wait_until(used_again, what="users' requests go there again")
    assert "it is silent" in proxy.log.read_text() and "works again" in proxy.log.read_text()


def test_a_stream_that_freezes_goes_on_elsewhere(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path
) -> None:
    with serving(tmp_path, tcp_server, engines, "", "ab", "--policy=colocate") as proxy:
        began = time.monotonic()
        for name in "ab":
            engines[name].behave(gap_s=0.3)
        with Reading(proxy.url, COMPLETIONS, completion()) as reading:
            chunks = iter(reading)
            first = [next(chunks), next(chunks)]
            [here] = [engines[name] for name in "ab" if engines[name].seen()["running"]]
            here.process.send_signal(signal.SIGSTOP)
            try:
                assert text_of([*first, *chunks]) == expected(PROMPT, 12) and reading.done
            finally:
                here.process.send_signal(signal.SIGCONT)
        assert time.monotonic() - began < SOON_S


def test_an_engine_that_is_slow_for_some_is_not_silent(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path
) -> None:
    """It answers the proxy's own question at once."""
    with serving(tmp_path, tcp_server, engines, "", "a", "--policy=colocate") as proxy:
        engines["a"].behave(delay_s=4.0, only=12)
        assert answered(proxy, stream=True) and answered(proxy, stream=False)
        assert not state(proxy, engines["a"])["silent"] and not state(proxy, engines["a"])["shunned"]
    assert "silent" not in proxy.log.read_text()


def test_if_all_are_silent_they_are_asked_all_the_same(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path
) -> None:
    with serving(tmp_path, tcp_server, engines, "", "a", "--policy=colocate", "--retries=0") as proxy:
        engines["a"].behave(frozen=True)
        status, body = post(proxy.url, COMPLETIONS, completion())
        assert status == 502 and b"silent" in body
        engines["a"].behave()
        assert answered(proxy, stream=True), "before the proxy's own question"
