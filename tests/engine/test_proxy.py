"""The proxy before two real vLLM servers and a real store: what users get is what one engine alone would say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.engine.served import MODEL, ServedEngine, post, save_served_model
from tests.support.harness import Server, wait_until
from tests.support.proxies import Asking, ProxyProcess, Reading, answer_of, chunks_of, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.8, "seed": 11}


class Fleet:
    """A store, prefill engine `p`, decode engine `d`, and a proxy that splits everything."""

    def __init__(self, folder: Path) -> None:
        model = save_served_model(folder / "model")
        self.store = Server(folder / "store.log", "--memory", "512MiB")
        self.p, self.d = (ServedEngine(model, folder / f"{name}.log", self.store.endpoint) for name in "pd")
        for engine in (self.p, self.d):
            engine.await_health()
        self.proxy = ProxyProcess(folder / "proxy", *self.options, "--policy=split")

    @property
    def options(self) -> list[str]:
        roles = [f"--prefill={self.p.url}", f"--decode={self.d.url}"]
        return [f"--store={self.store.endpoint}", "--check-seconds=0.2", *roles]

    def stop(self) -> None:
        self.proxy.stop()
        for engine in (self.p, self.d):
            engine.stop()
        self.store.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("fleet"))
    yield found
    found.stop()


def ask(path: str, number: int, **more: Any) -> dict[str, Any]:
    """A request that nobody has made before, unless with the same number."""
    chooser = random.Random(number)
    words = [chooser.randrange(300, 4000) for _ in range(200)]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 32, **more}
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": " ".join(f"w{word}" for word in words[:40])}]}
    return {**body, "prompt": words}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answers_through_the_proxy_are_those_of_one_engine(fleet: Fleet, path: str, sampling: dict[str, Any]) -> None:
    for seed in range(3):
        body = ask(path, seed, **sampling)
        status, whole = post(fleet.proxy.url, path, body)
        right = post(fleet.d.url, path, body)[1]
        assert status == 200 and whole["choices"] == right["choices"]
        body = ask(path, 100 + seed, **sampling, stream_options={"include_usage": True}, return_token_ids=seed == 2)
        chunks = chunks_of(fleet.proxy.url, path, body)
        right_chunks = chunks_of(fleet.d.url, path, body)
        assert answer_of(chunks) == answer_of(right_chunks)


@pytest.mark.timeout(400)
def test_decode_finds_in_the_store_what_prefill_has_saved(fleet: Fleet) -> None:
    body = ask(COMPLETIONS, 50, **GREEDY)
    post(fleet.p.url, COMPLETIONS, {**body, "max_tokens": 1})

    def cached() -> int:
        usage = post(fleet.d.url, COMPLETIONS, {**body, "max_tokens": 1})[1]["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    wait_until(lambda: cached() >= 192, 20, "the prompt is in the store")
    post(fleet.proxy.url, COMPLETIONS, body, **{"x-request-id": "cached"})
    record = fleet.proxy.record("cached")
    assert (record["decision"], record["prompt_tokens"], record["cached_tokens"]) == ("split", 200, 192)


@pytest.mark.timeout(400)
def test_short_and_known_prompts_stay_on_the_decode_engine(fleet: Fleet, tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, *fleet.options, "--split-tokens=150") as proxy:

        def decision(path: str, body: dict[str, Any], name: str) -> tuple[str, str]:
            assert post(proxy.url, path, body, **{"x-request-id": name})[0] == 200
            record = proxy.record(name)
            return record["decision"], record["why"]

        long = ask(COMPLETIONS, 60, **GREEDY)
        assert decision(COMPLETIONS, long, "long") == ("split", "200 uncached tokens")
        assert decision(COMPLETIONS, long, "again") == ("colocate", "8 uncached tokens")
        short = {**long, "prompt": long["prompt"][100:200]}
        assert decision(COMPLETIONS, short, "short") == ("colocate", "100 uncached tokens")
        one = ask(COMPLETIONS, 61, max_tokens=1)
        assert decision(COMPLETIONS, one, "one") == ("colocate", "one token")
        assert proxy.record("one")["decode"] == fleet.p.url
        text = ask(CHAT, 62, **GREEDY)
        split, why = decision(CHAT, text, "chat")
        tokens = post(fleet.d.url, "/tokenize", {"model": MODEL, "messages": text["messages"]})[1]["count"]
        assert (split, why) == ("split", f"{tokens} uncached tokens")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stream", [False, True])
def test_a_user_who_leaves_frees_both_engines(fleet: Fleet, stream: bool) -> None:
    body = ask(COMPLETIONS, 70 + stream, max_tokens=1800, ignore_eos=True, **GREEDY)
    with (Reading if stream else Asking)(fleet.proxy.url, COMPLETIONS, body):
        wait_until(lambda: fleet.d.metric("vllm:num_requests_running"), 30, "the decode engine answers")
    for engine in (fleet.p, fleet.d):
        wait_until(lambda engine=engine: not engine.metric("vllm:num_requests_running"), 10, "the engine is free")


@pytest.mark.timeout(400)
def test_sigterm_lets_streams_finish_and_takes_no_new_requests(fleet: Fleet, tmp_path: Path) -> None:
    proxy = ProxyProcess(tmp_path, *fleet.options, "--policy=split")
    body = ask(COMPLETIONS, 80, max_tokens=200, ignore_eos=True, **GREEDY)
    with Reading(proxy.url, COMPLETIONS, body) as reading:
        chunks = [next(iter(reading))]
        proxy.process.terminate()
        wait_until(lambda: proxy.status()["draining"], 5, "the proxy drains")
        assert post(proxy.url, COMPLETIONS, body)[0] == 503
        chunks += reading
    assert reading.done
    assert text_of(chunks) == text_of(chunks_of(fleet.d.url, COMPLETIONS, body))
    assert proxy.stop() == 0


@pytest.mark.timeout(400)
def test_a_decode_engine_that_is_killed_does_not_change_the_answers(fleet: Fleet) -> None:
    """Last: the decode engine is gone then, and the prefill engine answers alone."""
    asks = [
        (path, ask(path, 90, ignore_eos=True, **sampling))
        for path in (COMPLETIONS, CHAT)
        for sampling in (GREEDY, SEEDED)
    ]
    for _, body in asks:
        body["max_tokens"] = 300
    right = [text_of(chunks_of(fleet.d.url, path, body)) for path, body in asks]
    readings = [Reading(fleet.proxy.url, path, body) for path, body in asks]
    begun = [list(islice(reading, 20)) for reading in readings]
    fleet.d.kill()
    with ThreadPoolExecutor(4) as pool:
        rests = list(pool.map(list, readings))
    for reading in readings:
        assert reading.done
        reading.leave()
    assert [text_of(chunks + rest) for chunks, rest in zip(begun, rests, strict=True)] == right
    metrics = fleet.proxy.metrics()
    assert metrics['kvstore_proxy_retries_total{when="in the stream"}'] == 4
    wait_until(lambda: not fleet.proxy.status()["pools"]["decode"][0]["healthy"], 10, "the decode engine is down")
    path, body = asks[0]
    assert post(fleet.proxy.url, path, body, **{"x-request-id": "alone"})[1]["choices"][0]["text"] == right[0]
    assert fleet.proxy.record("alone")["why"] == "no decode engine"
