"""Which blocks the proxy expects to be cached, and when it no longer expects them. Servers are real; engines report
what the test sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import KVStoreClient
from tests.support.harness import Server, StartServer, blocks_of, make_keys, make_namespace, shard_info, wait_until
from tests.support.kv_events import Publisher
from tests.support.proxies import ProxyProcess, StandInEngine, chunks_of, post
from tests.support.stand_in_engine import MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ADAPTER = "adapter"
BLOCK_BYTES = 64 << 10
_numbers = itertools.count()
_prompts = itertools.count(1)


def prompt() -> list[int]:
    """Return 640 tokens that no engine has received before."""
    first = 1000 * next(_prompts)
    return list(range(first, first + 640))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StandInEngine]]:
    """Prefill engine p and decode engine d."""
    folder = tmp_path_factory.mktemp("engines")
    found = {name: StandInEngine(folder / f"{name}.log", f"--adapter={ADAPTER}") for name in "pd"}
    yield found
    for engine in found.values():
        engine.kill()


class Asked:
    """Sends requests to a proxy that splits prompts with 256 or more uncached tokens."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self.proxy = proxy

    def __call__(self, tokens: list[int] | None, path: str = COMPLETIONS, **more: Any) -> tuple[str, str]:
        """Send a request, and return how the proxy has served it, and why."""
        name = f"request-{next(_numbers)}"
        body = {"model": MODEL, "max_tokens": 2, "temperature": 0, **more}
        if tokens is not None:
            body["prompt"] = tokens
        if body.get("stream"):
            chunks_of(self.proxy.url, path, body, **{"x-request-id": name})
        else:
            assert post(self.proxy.url, path, body, **{"x-request-id": name})[0] == 200
        record = self.proxy.record(name)
        return record["decision"], record["why"]

    def learn(self, tokens: list[int]) -> None:
        """Send a prompt until the proxy expects that the engines and the store have it."""
        assert self(tokens) == ("split", "640 uncached tokens")
        assert self(tokens) == ("colocate", "0 uncached tokens")


def options(store: Server, engines: dict[str, StandInEngine], *more: str) -> list[str]:
    roles = [f"--prefill={engines['p'].url}", f"--decode={engines['d'].url}"]
    return [f"--store={store.endpoint}", *roles, "--split-tokens=256", "--check-seconds=0.1", *more]


@pytest.fixture
def ask(engines: dict[str, StandInEngine], tcp_server: Server, tmp_path: Path) -> Iterator[Asked]:
    for engine in engines.values():
        engine.behave()
    with ProxyProcess(tmp_path / "proxy", *options(tcp_server, engines, "--backoff-seconds=0.1")) as proxy:
        yield Asked(proxy)


def fill(client: KVStoreClient, count: int, first: int = 0) -> None:
    keys = make_keys(count, first)
    client.set(keys, blocks_of(keys, BLOCK_BYTES))
    client.sync()


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differs", [{"cache_salt": "tenant"}, {"model": ADAPTER}], ids=["salt", "adapter"])
def test_equal_tokens_with_another_salt_or_adapter_are_not_cached(ask: Asked, differs: dict[str, Any]) -> None:
    tokens = prompt()
    ask.learn(tokens)
    assert ask(tokens, **differs) == ("split", "640 uncached tokens")
    assert ask(tokens, **differs) == ("colocate", "0 uncached tokens")
    if "cache_salt" in differs:
        assert ask(tokens, cache_salt="another tenant")[0] == "split"


IMAGES = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUFB"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QkJC"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QkJC"}, "uuid": "one"},
    {"type": "image_url", "image_url": None, "uuid": "two"},
    {"type": "image_url", "image_url": {"url": "http://a/1.png"}},
    {"type": "image_url", "image_url": {"url": "http://a/2.png"}},
]
SOUNDS = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}} for data in ("QUFB", "QkJC")]
VIDEOS = [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}} for data in ("QUFB", "QkJC")]
EMBEDS = [{"type": "image_embeds", "image_embeds": data} for data in ("QUFB", "QkJC")]


@pytest.mark.parametrize("parts", [IMAGES, SOUNDS, VIDEOS, EMBEDS], ids=["images", "sounds", "videos", "embeddings"])
def test_equal_words_about_another_medium_are_not_cached(ask: Asked, parts: list[dict[str, Any]]) -> None:
    text = {"type": "text", "text": f"what is this? {next(_prompts):0600}"}

    def about(part: dict[str, Any]) -> tuple[str, str]:
        return ask(None, CHAT, messages=[{"role": "user", "content": [part, text]}])

    for part in parts:
        assert about(part)[0] == "split"
        decision, why = about(part)
        assert decision == "colocate" and int(why.split()[0]) < 64


def test_an_engines_events_count_for_requests_of_the_same_kind(
    engines: dict[str, StandInEngine], tcp_server: Server, tmp_path: Path
) -> None:
    for engine in engines.values():
        engine.behave()
    publisher = Publisher()
    try:
        more = f"--events={engines['d'].url}={publisher.live}"
        with ProxyProcess(tmp_path / "proxy", *options(tcp_server, engines, more)) as proxy:
            ask, tokens = Asked(proxy), prompt()

            def heard() -> bool:
                publisher.store(tokens)  # the event reaches the proxy only if the proxy listens already
                return ask([*tokens, next(_numbers)])[1] == "1 uncached tokens"

            wait_until(heard, what="its events are heard")
            for differs in ({"cache_salt": "tenant"}, {"model": ADAPTER}):
                assert ask([*tokens, 7], **differs) == ("split", "641 uncached tokens")
    finally:
        publisher.close()


# ---- what ends beliefs -----------------------------------------------------------------------------------------------


@pytest.fixture
def filled(start_server: StartServer) -> Iterator[tuple[Server, KVStoreClient]]:
    """A store of one shard with 64 MiB, and 100 blocks that an engine has set there."""
    store = start_server("--memory", "64MiB", "--http", "127.0.0.1:0")
    with KVStoreClient(store.endpoint, make_namespace(BLOCK_BYTES, "m"), fail_open=True) as client:
        fill(client, 100)
        yield store, client


def test_a_per_request_policy_relies_on_the_store_no_more_than_others(
    engines: dict[str, StandInEngine], filled: tuple[Server, KVStoreClient], tmp_path: Path
) -> None:
    store, client = filled
    for engine in engines.values():
        engine.behave()
    with ProxyProcess(tmp_path / "proxy", *options(store, engines, "--check-seconds=60", "--policy=split")) as proxy:

        def decided(name: str, tokens: list[int], **more: Any) -> str:
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 2, **more}
            assert post(proxy.url, COMPLETIONS, body, **{"x-request-id": name, "x-kvstore-policy": "auto"})[0] == 200
            return str(proxy.record(name)["why"])

        prompts = [prompt() for _ in range(50)]
        for number, tokens in enumerate(prompts):
            assert decided(f"prefill {number}", tokens, max_tokens=1) == "one token"
        assert decided("kept", prompts.pop()) == "0 uncached tokens"
        client.purge(all_namespaces=True)
        wait_until(  # an answer of the store is valid for a tenth of a second
            lambda: decided(f"purged {len(prompts)}", prompts.pop()) == "640 uncached tokens",
            what="the store is asked",
        )


LOSSES = ["none", "purge", "purge of one namespace", "restart", "eviction", "deletion"]


@pytest.mark.parametrize("loss", LOSSES)
def test_blocks_lost_by_the_store_are_no_longer_expected(
    engines: dict[str, StandInEngine], filled: tuple[Server, KVStoreClient], tmp_path: Path, loss: str
) -> None:
    """The proxy learns of the loss in time although it asks the store only once a minute. For a restart of the store,
    it asks more often here."""
    store, client = filled
    for engine in engines.values():
        engine.behave()
    often = "--check-seconds=0.1" if loss == "restart" else "--check-seconds=60"
    with ProxyProcess(tmp_path / "proxy", *options(store, engines, often)) as proxy:
        ask, prompts = Asked(proxy), [prompt() for _ in range(30)]
        for each in prompts:
            assert ask(each, max_tokens=1) == ("colocate", "one token")  # by the prefill engine
        assert ask(prompts.pop()) == ("colocate", "0 uncached tokens"), "the decode engine loads it from the store"
        if loss.startswith("purge"):
            client.purge(all_namespaces=loss == "purge")
        elif loss == "restart":
            store.kill()
            wait_until(lambda: not proxy.status()["store"]["answers"], what="the store is away")
            store.restart()
            wait_until(lambda: proxy.status()["store"]["answers"], what="the store is back")
        elif loss == "eviction":
            batches = itertools.count(1)

            def evicts() -> bool:
                fill(client, 100, 100 * next(batches))
                return shard_info(client).evicted > 100

            wait_until(evicts, what="others have pushed it out")
        elif loss == "deletion":
            client.delete(make_keys(100))
        if loss == "none":
            assert {ask(each) for each in prompts} == {("colocate", "0 uncached tokens")}
            return
        wait_until(lambda: ask(prompts.pop()) == ("split", "640 uncached tokens"), what=f"{proxy.status()['store']}")
        assert ask(prompts[0])[0] == "split", "nor is any other prompt there"
        assert ask(prompts[0])[0] == "colocate", "it is there anew"


def test_after_a_restart_of_everything_nothing_is_expected(
    engines: dict[str, StandInEngine], filled: tuple[Server, KVStoreClient], tmp_path: Path
) -> None:
    store, _ = filled
    for engine in engines.values():
        engine.behave()
    with ProxyProcess(tmp_path / "proxy", *options(store, engines)) as proxy:

        def healthy() -> set[bool]:
            return {each["healthy"] for pool in proxy.status()["pools"].values() for each in pool}

        ask, tokens = Asked(proxy), prompt()
        ask.learn(tokens)
        for engine in engines.values():
            engine.kill()
        wait_until(lambda: healthy() == {False}, what="the engines are away")
        for engine in engines.values():
            engine.start()
        wait_until(lambda: healthy() == {True}, what="the engines are back")
        assert ask(tokens) == ("colocate", "0 uncached tokens"), "the store has it"
        assert ask([*tokens[:64], *prompt()])[0] == "split"
        store.kill()
        wait_until(lambda: not proxy.status()["store"]["answers"], what="the store is away")
        for engine in engines.values():
            engine.kill()
        wait_until(lambda: healthy() == {False}, what="the engines are away")
        for engine in engines.values():
            engine.start()
        store.restart()
        wait_until(lambda: healthy() == {True} and proxy.status()["store"]["answers"], what="all are back")
        assert ask(tokens) == ("split", "640 uncached tokens")


KINDS = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]


@pytest.mark.parametrize("how", KINDS, ids=["whole", "stream", "stream with usage"])
def test_an_engine_that_finds_less_than_expected_corrects_the_proxy(
    ask: Asked, engines: dict[str, StandInEngine], how: dict[str, Any]
) -> None:
    """The proxy corrects itself whatever the reason is: the engine's cache was reset, the store has evicted the blocks,
    or loads fail."""
    tokens = prompt()
    ask.learn(tokens)
    engines["d"].behave(cached=128)
    assert ask(tokens, **how)[0] == "colocate"
    assert ask(tokens, **how) == ("split", "512 uncached tokens")
    engines["d"].behave(cached=639)
    assert [ask(tokens, **how) for _ in range(2)] == [("colocate", "0 uncached tokens")] * 2, "it has computed it"


def test_users_see_usage_only_if_they_requested_it(ask: Asked, engines: dict[str, StandInEngine]) -> None:
    engines["d"].behave(cached=0)
    for tokens in (prompt()[:64], prompt()):  # colocated, split
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 2, "temperature": 0}
        chunks = chunks_of(ask.proxy.url, COMPLETIONS, body)
        assert all(chunk["choices"] and not chunk.get("usage") for chunk in chunks)


# ---- hand-overs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", KINDS, ids=["whole", "stream", "stream with usage"])
def test_a_prefill_engine_is_avoided_while_its_blocks_do_not_arrive(
    ask: Asked, engines: dict[str, StandInEngine], how: dict[str, Any]
) -> None:
    """Blocks may not arrive after a reset of the prefill engine alone, because the engine then names its blocks
    differently."""

    def decided() -> tuple[str, str]:
        return ask(prompt(), **how)

    engines["d"].behave(cached=0, delay_s=0.2)  # after the prefill
    assert [decided()[0] for _ in range(2)] == ["split"] * 2
    assert decided() == ("colocate", "what is prefilled does not arrive")
    [pair] = ask.proxy.status()["not_arriving"]
    assert (pair["prefill"], pair["decode"]) == (engines["p"].url, engines["d"].url)
    assert "did not arrive at" in ask.proxy.log.read_text()
    wait_until(lambda: decided()[0] == "split", what="it is tried again")
    assert decided()[0] == "colocate", "once"
    engines["d"].behave(cached=639, delay_s=0.2)
    wait_until(lambda: decided()[0] == "split", what="it is tried again")
    assert [decided()[0] for _ in range(3)] == ["split"] * 3
    assert ask.proxy.status()["not_arriving"] == []


def test_another_prefill_engine_replaces_one_whose_blocks_do_not_arrive(
    engines: dict[str, StandInEngine], tcp_server: Server, tmp_path: Path
) -> None:
    other = StandInEngine(tmp_path / "other.log")
    try:
        engines["p"].behave()
        engines["d"].behave(cached=0, delay_s=0.2)
        more = (f"--prefill={other.url}", "--backoff-seconds=100")
        with ProxyProcess(tmp_path / "proxy", *options(tcp_server, engines, *more)) as proxy:
            ask = Asked(proxy)
            assert [ask(prompt())[0] for _ in range(2)] == ["split"] * 2
            engines["d"].behave(cached=639, delay_s=0.2)
            assert [ask(prompt())[0] for _ in range(4)] == ["split"] * 4
            asked = [len(engine.seen()["requests"]) for engine in (engines["p"], other)]
            assert sorted(asked) == [2, 4], "one was left alone"
    finally:
        other.kill()
