"""The proxy measures the prompt length from which it splits requests. A request may choose either way. The load of
other users counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine, chunks_of, post
from tests.support.stand_in_engine import MODEL

COMPLETIONS = "/v1/completions"


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, StandInEngine]]:
    found = {name: StandInEngine(tmp_path / f"{name}.log") for name in ("p", "d")}
    yield found
    for engine in found.values():
        engine.kill()


class Asked:
    """Sends prompts that no engine has received before to a proxy."""

    def __init__(self, folder: Path, store: Server, engines: dict[str, StandInEngine], *more: str) -> None:
        roles = (f"--prefill={engines['p'].url}", f"--decode={engines['d'].url}")
        self.proxy = ProxyProcess(folder / "proxy", f"--store={store.endpoint}", *roles, "--check-seconds=0.1", *more)
        self._asked = 0

    def __call__(self, tokens: int, **headers: str) -> dict[str, Any]:
        """Send a request with this many tokens, and return its record."""
        self._asked += 1
        prompt = [self._asked] * tokens
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0, "stream": True}
        chunks_of(self.proxy.url, COMPLETIONS, body, **{"x-request-id": str(self._asked), **headers})
        return self.proxy.record(str(self._asked))

    def split_from(self) -> int | None:
        [found] = self.proxy.status()["split_from"]
        return None if found["tokens"] is None else int(found["tokens"])


@pytest.fixture
def ask(tmp_path: Path, tcp_server: Server, engines: dict[str, StandInEngine]) -> Iterator[Asked]:
    found = Asked(tmp_path, tcp_server, engines)
    yield found
    found.proxy.stop()


def test_the_split_threshold_follows_measurements(ask: Asked, engines: dict[str, StandInEngine]) -> None:
    assert ask.split_from() == 512, "nothing is measured yet"
    engines["p"].behave(takes=(0.01, 0.0002))
    engines["d"].behave(takes=(0.01, 0.002), helped_takes=(0.05, 0.0003), cached=0)
    assert {ask(100 + 20 * number)["decision"] for number in range(8)} == {"colocate"}
    assert {ask(520 + 20 * number)["decision"] for number in range(8)} == {"split"}
    least = ask.split_from()
    assert least is not None and least < 100, "the decode engine is ten times as slow"
    assert ask(150)["decision"] == "split"
    metrics = ask.proxy.metrics()
    assert 50 < metrics[f'kvstore_proxy_engine_prefill_tokens_per_second{{engine="{engines["d"].url}"}}'] < 1000
    assert metrics[f'kvstore_proxy_split_tokens{{decode="{engines["d"].url}"}}'] < 200


def test_no_prompt_is_split_if_hand_overs_are_slower_than_computing(
    ask: Asked, engines: dict[str, StandInEngine]
) -> None:
    engines["p"].behave(takes=(0.01, 0.0001))
    engines["d"].behave(takes=(0.01, 0.0001), helped_takes=(0.5, 0.0004), cached=0)
    for number in range(8):
        ask(520 + 20 * number)
        ask(100 + 10 * number)
    assert ask.split_from() is None
    assert ask(2000)["decision"] == "colocate"
    assert ask.proxy.metrics()[f'kvstore_proxy_split_tokens{{decode="{engines["d"].url}"}}'] == float("inf")


def test_a_request_may_choose_either_way(ask: Asked, engines: dict[str, StandInEngine]) -> None:
    header = "x-kvstore-policy"
    assert ask(100, **{header: "split"})["decision"] == "split"
    assert ask(1000, **{header: "colocate"})["decision"] == "colocate"
    assert [ask(tokens, **{header: "auto"})["decision"] for tokens in (100, 1000)] == ["colocate", "split"]
    body = {"model": MODEL, "prompt": [1, 2, 3]}
    status, said = post(ask.proxy.url, COMPLETIONS, body, **{header: "both"})
    assert status == 400 and b"expected one of auto, colocate, split" in said
    seen = [each for engine in engines.values() for each in engine.seen()["requests"]]
    assert seen and not any(header in each["headers"] for each in seen)


def test_requests_from_others_at_an_engine_count(tmp_path: Path, tcp_server: Server) -> None:
    decode = [StandInEngine(tmp_path / f"{number}.log") for number in range(2)]
    try:
        urls = [f"--decode={engine.url}" for engine in decode]
        options = (f"--store={tcp_server.endpoint}", "--check-seconds=0.1")
        with ProxyProcess(tmp_path / "proxy", *options, *urls) as proxy:

            def taken(name: str) -> str:
                body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
                assert post(proxy.url, COMPLETIONS, body, **{"x-request-id": name})[0] == 200
                return str(proxy.record(name)["decode"])

            assert taken("idle") == decode[0].url, "the first of two that are alike"
            decode[0].behave(metrics='vllm:num_requests_running{engine="0"} 7.0\nvllm:num_requests_waiting 2.0\n')
            wait_until(lambda: proxy.status()["pools"]["decode"][0]["others_running"] == 7, what="its load is known")
            assert proxy.status()["pools"]["decode"][0]["others_waiting"] == 2
            assert proxy.metrics()[f'kvstore_proxy_engine_others{{engine="{decode[0].url}"}}'] == 9
            assert taken("busy") == decode[1].url
            decode[0].behave()
            names = map(str, range(10_000))
            wait_until(lambda: taken(next(names)) == decode[0].url, what="its load is gone")
    finally:
        for engine in decode:
            engine.kill()
