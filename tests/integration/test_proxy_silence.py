"""The proxy with engines whose workers have frozen. Such engines accept requests and answer /health, but send nothing
else.

The time-outs have their defaults, which are minutes. Real processes.
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

from kvstore_serving.proxy.silence import ENOUGH_ANSWERS
from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, Reading, StandInEngine, chunks_of, post, text_of
from tests.support.stand_in_engine import MODEL, expected

PROMPT = list(range(100, 140))
COMPLETIONS = "/v1/completions"
SOON_S = 30.0  # far less than the time-outs
USERS = 4
PAUSE_S = 0.05  # between two requests of a user: far less than the permitted silence


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


class Engines(dict[str, StandInEngine]):
    """Starts an engine when a test first names it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> StandInEngine:
        self[name] = StandInEngine(self._folder / f"{name}.log")
        return self[name]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    found = Engines(tmp_path)
    yield found
    for engine in found.values():
        engine.kill()


@contextlib.contextmanager
def serving(
    folder: Path, store: Server, engines: Engines, prefill: str, decode: str, *more: str
) -> Iterator[ProxyProcess]:
    """Run a proxy that has learned the usual times of these engines."""
    roles = [f"--prefill={engines[name].url}" for name in prefill] + [
        f"--decode={engines[name].url}" for name in decode
    ]
    times = ["--check-seconds=0.1", "--backoff-seconds=0.1", "--check-timeout-seconds=1"]
    with ProxyProcess(folder / "proxy", f"--store={store.endpoint}", *roles, *times, *more) as proxy:
        for number in range(4 * ENOUGH_ANSWERS):
            assert answered(proxy, number % 2 == 0)
        yield proxy


def answered(proxy: ProxyProcess, stream: bool) -> bool:
    """Send a request. Returns whether the answer is right."""
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
def test_a_frozen_engine_is_avoided_until_the_proxys_own_probe_succeeds(
    tcp_server: Server, engines: Engines, tmp_path: Path, role: str, stream: bool
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
            while not over.wait(PAUSE_S):
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


def test_a_frozen_stream_continues_elsewhere(tcp_server: Server, engines: Engines, tmp_path: Path) -> None:
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


def test_an_engine_that_is_slow_for_some_requests_is_not_silent(
    tcp_server: Server, engines: Engines, tmp_path: Path
) -> None:
    """The engine delays some requests, but answers the proxy's own probe at once."""
    # A busy machine may take a second to answer that probe; a silent engine is detected in half the delay.
    with serving(tmp_path, tcp_server, engines, "", "a", "--policy=colocate", "--check-timeout-seconds=4") as proxy:
        engines["a"].behave(delay_s=8.0, only=12)
        assert answered(proxy, stream=True) and answered(proxy, stream=False)
        assert not state(proxy, engines["a"])["silent"] and not state(proxy, engines["a"])["shunned"]
    assert "silent" not in proxy.log.read_text()


def test_if_all_engines_are_silent_they_still_get_requests(
    tcp_server: Server, engines: Engines, tmp_path: Path
) -> None:
    with serving(tmp_path, tcp_server, engines, "", "a", "--policy=colocate", "--retries=0") as proxy:
        engines["a"].behave(frozen=True)
        status, body = post(proxy.url, COMPLETIONS, completion())
        assert status == 502 and b"silent" in body
        engines["a"].behave()
        assert answered(proxy, stream=True), "before the proxy's own question"
