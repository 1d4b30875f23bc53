"""The proxy in front of engines that fail: real processes that misbehave on demand; see
`tests.support.stand_in_engine`.

Each token of an answer depends on all tokens before it. So if a token is sent twice or left out, all later tokens are
wrong.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Server, StartServer, wait_until
from tests.support.proxies import (
    Asking,
    ProxyProcess,
    Reading,
    StandInEngine,
    chunks_of,
    get,
    post,
    same_answer,
    text_of,
)
from tests.support.stand_in_engine import MODEL, expected

PROMPT = list(range(100, 140))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "temperature": 0,
        **more,
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StandInEngine]]:
    """Prefill engine p, and decode engines a and b."""
    folder = tmp_path_factory.mktemp("engines")
    found = {name: StandInEngine(folder / f"{name}.log") for name in "pab"}
    yield found
    for engine in found.values():
        engine.kill()


@pytest.fixture(scope="module")
def shared_proxy(
    engines: dict[str, StandInEngine], tcp_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("proxy"), *options(tcp_server, engines)) as proxy:
        yield proxy


def options(store: Server, engines: dict[str, StandInEngine], *more: str) -> list[str]:
    roles = [f"--prefill={engines['p'].url}", *(f"--decode={engines[name].url}" for name in "ab")]
    times = ["--check-seconds=0.1", "--backoff-seconds=0.1", "--idle-seconds=1.5", "--first-byte-seconds=3"]
    return [f"--store={store.endpoint}", "--policy=split", *roles, *times, *more]


@pytest.fixture
def proxy(engines: dict[str, StandInEngine], shared_proxy: ProxyProcess) -> ProxyProcess:
    """A proxy with well-behaved engines, none of which it shuns."""
    for engine in engines.values():
        engine.behave()

    def well() -> bool:
        pools = shared_proxy.status()["pools"]
        return all(each["healthy"] and not each["shunned"] for pool in pools.values() for each in pool)

    wait_until(well, what="all engines take requests")
    # A success makes the proxy forget earlier failures. An idle proxy first chooses the engine that failed last.
    assert post(shared_proxy.url, COMPLETIONS, completion())[0] == 200
    for engine in engines.values():
        engine.behave()
    return shared_proxy


def failures(proxy: ProxyProcess) -> float:
    """Return the failures that the proxy has counted for all engines."""
    return sum(count for name, count in proxy.metrics().items() if "engine_failures_total" in name)


def decoder_of(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> StandInEngine:
    """Return the decode engine that got the last request."""
    return next(engine for engine in engines.values() if engine.seen()["requests"] and engine is not engines["p"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_through_the_proxy_equals_one_engines_stream(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], path: str
) -> None:
    body = (completion if path == COMPLETIONS else chat)(stream_options={"include_usage": True})
    assert same_answer(chunks_of(proxy.url, path, body)) == same_answer(chunks_of(engines["a"].url, path, body))
    chunks = chunks_of(proxy.url, path, body)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_prefill_and_decode_are_sent_together_with_their_flags(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for name in "ab":
        engines[name].behave(delay_s=0.2)  # prefill is abandoned when decode has answered
    status, _ = post(proxy.url, COMPLETIONS, completion(kv_transfer_params={"kvstore": {"priority": 3}}))
    assert status == 200
    [prefill] = engines["p"].seen()["requests"]
    [decode] = decoder_of(proxy, engines).seen()["requests"]
    assert prefill["body"]["max_tokens"] == 1
    assert prefill["body"]["kv_transfer_params"] == {"kvstore": {"priority": 3}, "do_remote_decode": True}
    assert decode["body"]["kv_transfer_params"] == {"kvstore": {"priority": 3}, "do_remote_prefill": True}
    assert decode["body"]["max_tokens"] == 12


def test_the_prefill_engines_token_arrives_before_the_decode_engines(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for name in "ab":
        engines[name].behave(hang_at=0)
    with Reading(proxy.url, COMPLETIONS, completion()) as reading:
        assert text_of([next(iter(reading))]) == expected(PROMPT, 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "failure", [{"end_at": 5}, {"hang_at": 5}, {"malformed_at": 5}, {"error_at": 5}, {"cut_at": 5}, {"error_at": 0}]
)
def test_a_decode_engine_failing_in_a_stream_leaves_the_answer_unchanged(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], path: str, failure: dict[str, Any]
) -> None:
    body = (completion if path == COMPLETIONS else chat)(stream_options={"include_usage": True})
    right = same_answer(chunks_of(engines["a"].url, path, body))
    for name in "ab":
        engines[name].behave(only=12, **failure)
    assert same_answer(chunks_of(proxy.url, path, body)) == right


@pytest.mark.parametrize("more", [{"temperature": 0.7, "seed": 5}, {"stop": ["never"]}, {"presence_penalty": 0.5}])
def test_an_answer_that_cannot_continue_is_repeated_without_its_beginning(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], more: dict[str, Any]
) -> None:
    right = same_answer(chunks_of(engines["a"].url, COMPLETIONS, completion(**more)))
    for name in "ab":
        engines[name].behave(gap_s=0.05)
    with Reading(proxy.url, COMPLETIONS, completion(**more)) as reading:
        chunks = []
        for chunk in reading:
            chunks.append(chunk)
            if len(chunks) == 5:
                decoder_of(proxy, engines).kill()
    assert reading.done
    assert same_answer(chunks) == right


def test_an_answer_that_cannot_be_repeated_ends_with_an_error(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for name in "ab":
        engines[name].behave(end_at=5)
    body = completion(temperature=0.7, n=2)
    with Reading(proxy.url, COMPLETIONS, body) as reading:
        chunks = list(reading)
    assert not reading.done
    assert chunks[-1]["error"]["code"] == 502
    assert text_of(chunks[:-1]) == expected(PROMPT, 5)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_shown_tokens_stay_valid_when_decode_disagrees_with_the_first(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], path: str
) -> None:
    body = (completion if path == COMPLETIONS else chat)(stream_options={"include_usage": True})
    right = same_answer(chunks_of(engines["p"].url, path, body))
    for name in "ab":
        engines[name].behave(only=12, drift=7, delay_s=0.3)
    before = proxy.metrics()["kvstore_proxy_first_token_mismatches_total"]
    assert same_answer(chunks_of(proxy.url, path, body)) == right
    assert proxy.metrics()["kvstore_proxy_first_token_mismatches_total"] == before + 1


@pytest.mark.parametrize("usage", [False, True])
def test_an_answer_of_one_real_token_ends_at_the_prefill_engine(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], usage: bool
) -> None:
    engines["p"].behave(stop_at=1)
    for name in "ab":
        engines[name].behave(hang_at=0)
    chunks = chunks_of(proxy.url, COMPLETIONS, completion(stream_options={"include_usage": usage}))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]] == ["stop"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if not chunk["choices"]] == [1] * usage
    wait_until(lambda: not decoder_of(proxy, engines).seen()["running"], what="decode is given up")


USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("asked", [{}, {"stream": True}, USAGE], ids=["whole", "stream", "stream with usage"])
def test_cached_tokens_of_a_split_prompt_exclude_those_prefill_computed(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], asked: dict[str, Any]
) -> None:
    for name in "ab":
        engines[name].behave(cached=39, delay_s=0.2)

    def cached(name: str) -> int:
        if asked:
            chunks = chunks_of(proxy.url, COMPLETIONS, completion(**asked), **{"x-request-id": name})
            assert len([chunk for chunk in chunks if chunk.get("usage")]) == (asked == USAGE)
        else:
            assert post(proxy.url, COMPLETIONS, completion(), **{"x-request-id": name})[0] == 200
        return int(proxy.record(name)["cached_tokens"])

    engines["p"].behave(cached=16)
    assert cached(f"found {asked}") == 16
    if asked in ({}, USAGE):
        engines["p"].behave(status=500)
        assert cached(f"prefill failed {asked}") == 39


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [{"status": 500}, {"silent": True}, {"cut_at": 0}])
def test_a_failing_prefill_does_not_change_the_answer(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], failure: dict[str, Any], stream: bool
) -> None:
    engines["p"].behave(**failure)
    if stream:
        assert text_of(chunks_of(proxy.url, COMPLETIONS, completion())) == expected(PROMPT, 12)
    else:
        status, body = post(proxy.url, COMPLETIONS, completion())
        assert status == 200 and expected(PROMPT, 12).encode() in body


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_engine_that_fails_at_once_is_replaced(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], stream: bool
) -> None:
    engines["a"].behave(status=500)
    for _ in range(10):
        if stream:
            assert text_of(chunks_of(proxy.url, COMPLETIONS, completion())) == expected(PROMPT, 12)
        else:
            status, body = post(proxy.url, COMPLETIONS, completion())
            assert status == 200 and expected(PROMPT, 12).encode() in body
    assert len(engines["a"].seen()["requests"]) <= 5  # its circuit breaker opens, each time for twice as long


@pytest.mark.parametrize("status", [400, 404, 422])
def test_an_engines_refusal_is_passed_on_unchanged(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], status: int
) -> None:
    for engine in engines.values():
        engine.behave(status=status)
    right = post(engines["a"].url, COMPLETIONS, completion())
    assert post(proxy.url, COMPLETIONS, completion()) == right == post(proxy.url, COMPLETIONS, completion(stream=True))
    assert sum(len(engines[name].seen()["requests"]) for name in "ab") == 3


def test_decodes_refusal_is_passed_on_though_prefill_has_a_token(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for name in "ab":
        engines[name].behave(status=400, delay_s=0.3)
    assert post(proxy.url, COMPLETIONS, completion(stream=True))[0] == 400


@pytest.mark.parametrize("code", [400, 404])
@pytest.mark.parametrize("how", [{"error_at": 0}, {"error_at": 0, "alone": True}, {"no_events": True}])
def test_a_refusal_of_a_multi_part_answer_is_the_reply(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], how: dict[str, Any], code: int
) -> None:
    for name in "ab":
        engines[name].behave(code=code, **how)
    before = failures(proxy)
    id = f"refused-{code}-{'-'.join(how)}"
    status, answer = post(proxy.url, COMPLETIONS, completion(stream=True, n=2), **{"x-request-id": id})
    said = json.loads(answer)
    assert status == code and said.get("error", said)["message"] == "as told"
    record = proxy.record(id)
    assert (record["outcome"], record["status"], record["retries"]) == ("refused", code, 0)
    assert failures(proxy) == before, "the request is to blame, and no engine"


@pytest.mark.parametrize("how", [{"error_at": 0}, {"error_at": 0, "alone": True}])
def test_a_refusal_in_a_started_stream_is_its_last_event(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], how: dict[str, Any]
) -> None:
    for engine in engines.values():
        engine.behave(code=404, **how)
    status, answer = post(proxy.url, COMPLETIONS, completion(stream=True))
    assert status == 200 and b"[DONE]" not in answer
    [event] = answer.removesuffix(b"\n\n").split(b"\n\n")
    said = json.loads(event.removeprefix(b"data: "))
    assert said.get("error", said)["code"] == 404


def test_if_all_engines_fail_the_error_has_openais_form(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    for engine in engines.values():
        engine.behave(status=500)
    named = {"x-request-id": "all-fail"}
    assert post(proxy.url, COMPLETIONS, completion(), **named) == post(engines["a"].url, COMPLETIONS, completion())
    record = proxy.record("all-fail")
    assert (record["outcome"], record["status"], record["retries"]) == ("failed", 500, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_user_who_disconnects_ends_the_requests_at_both_engines(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], stream: bool
) -> None:
    for engine in engines.values():
        engine.behave(silent=True) if stream else engine.behave(delay_s=30)
    id = f"leaves-{stream}"
    asking = Reading if stream else Asking
    with asking(proxy.url, COMPLETIONS, completion(), **{"x-request-id": id}):
        wait_until(lambda: engines["p"].seen()["requests"], what="prefill is asked")
        wait_until(lambda: any(engines[name].seen()["requests"] for name in "ab"), what="decode is asked")
        if stream:
            wait_until(lambda: engines["p"].seen()["running"], what="prefill runs")
    wait_until(lambda: not proxy.status()["in_flight"], what="the proxy has ended it")
    for engine in engines.values():
        wait_until(lambda engine=engine: not engine.seen()["running"], what="the engine has ended it")
    assert proxy.record(id)["outcome"] == "disconnect"


def test_a_slow_user_slows_the_engine_down(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    """The user does not read the answer of 200 MB, so the proxy receives only as much as fits into the sockets'
    buffers."""
    import psutil

    for engine in engines.values():
        engine.behave(pad=100_000)
    process = psutil.Process(proxy.process.pid)
    before = process.memory_info().rss
    with Reading(proxy.url, COMPLETIONS, completion(max_tokens=2000, n=1)) as reading:
        next(iter(reading))
        taken, since = 0, time.monotonic()

        def stopped() -> bool:
            nonlocal taken, since
            now = sum(engines[name].seen()["streamed"] for name in "ab")
            if now != taken:
                taken, since = now, time.monotonic()
            return taken > 0 and time.monotonic() - since > 2

        wait_until(stopped, 60, "the engine waits for the user")
        assert taken < 2000, "it did not send the whole answer"
        assert process.memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    ("named", "kind"), [("logprobs", {"logprobs": 1}), ("two", {"n": 2}), ("chosen", {"temperature": 1.0, "n": 2})]
)
def test_an_error_in_an_unrepeatable_stream_ends_it_and_counts(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], named: str, kind: dict[str, Any]
) -> None:
    for name in "ab":
        engines[name].behave(error_at=3)
    before = failures(proxy)
    body = completion(stream=True, **kind)
    status, answer = post(proxy.url, COMPLETIONS, body, **{"x-request-id": f"error-{named}"})
    assert status == 200 and b"[DONE]" not in answer and b"cut off" in answer
    assert answer.count(b'"error"') == 1 and answer.count(b"choices") == 3
    assert proxy.record(f"error-{named}")["outcome"] == "cut"
    assert failures(proxy) == before + 1


@pytest.mark.parametrize(("name", "media_type"), [("json", "application/json"), ("events", "text/event-stream")])
def test_a_partial_answer_is_not_ended_as_if_complete(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], name: str, media_type: str
) -> None:
    for each in "ab":
        engines[each].behave(media_type=media_type)
    before = failures(proxy)
    with Asking(proxy.url, "/v1/embeddings", {"model": MODEL, "input": "x"}, **{"x-request-id": name}) as asking:
        if name == "json":
            with pytest.raises(http.client.IncompleteRead):
                asking.connection.getresponse().read()
        else:
            assert b"the answer was cut off: the engine failed" in asking.connection.getresponse().read()
    assert proxy.record(name)["outcome"] == "cut"
    assert failures(proxy) == before + 1


def test_a_stalled_body_is_refused(engines: dict[str, StandInEngine], tcp_server: Server, tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, *options(tcp_server, engines, "--user-stall-seconds=0.5")) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: proxy.metrics()["kvstore_proxy_in_flight"] == 0)


def test_bodies_and_headers_have_bounds(proxy: ProxyProcess) -> None:
    status, body = post(proxy.url, COMPLETIONS, b" " * (33 << 20))
    assert status == 413 and b"33554432" in body
    with socket.create_connection((proxy.url.split("/")[2].split(":")[0], int(proxy.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000 + b"\r\n\r\n")
        assert b" 400 " in sock.recv(100)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (completion(kv_transfer_params={"do_remote_prefill": True}), b"do_remote_prefill"),
        (completion(kv_transfer_params={"do_remote_decode": False}), b"do_remote_decode"),
        (completion(prompt=[5, 1 << 63]), b"the token id 9223372036854775808; expected 0 to 2147483647"),
        (completion(prompt=[5, -1]), b"the token id -1; expected 0 to"),
    ],
)
def test_requests_that_no_engine_can_serve_are_refused_by_the_proxy(
    proxy: ProxyProcess, body: Any, says: bytes
) -> None:
    status, reply = post(proxy.url, COMPLETIONS, body)
    assert status == 400 and says in reply


def test_unknown_models_and_paths_are_404(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    assert post(proxy.url, COMPLETIONS, completion(model="other"))[0] == 404
    assert post(proxy.url, "/reset_prefix_cache", {})[0] == 404
    assert get(proxy.url, COMPLETIONS) == get(engines["a"].url, COMPLETIONS), "the engine's own 405"
    assert post(proxy.url, "/tokenize", {"model": MODEL, "prompt": "ab"}) == (200, b'{"tokens":[97,98]}')
    assert MODEL.encode() in get(proxy.url, "/v1/models")[1]


def test_trace_and_request_id_reach_both_engines(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "mine", "authorization": "Bearer k"}
    for name in "ab":
        engines[name].behave(delay_s=0.2)
    post(proxy.url, COMPLETIONS, completion(), **given)
    seen = [engines["p"].seen()["requests"][0], decoder_of(proxy, engines).seen()["requests"][0]]
    spans = set()
    for each in seen:
        version, got, span, flags = each["headers"]["traceparent"].split("-")
        assert (version, got, flags) == ("00", trace, "01")
        spans.add(span)
        assert each["headers"]["x-request-id"] == "mine" and each["headers"]["authorization"] == "Bearer k"
    assert len(spans) == 2 and "b7ad6b7169203331" not in spans
    assert [proxy.record("mine")[name] for name in ("id", "trace", "decision")] == ["mine", trace, "split"]


def test_without_the_store_no_request_is_handed_over(
    engines: dict[str, StandInEngine], start_server: StartServer, tmp_path: Path
) -> None:
    store = start_server()
    for engine in engines.values():
        engine.behave()
    with ProxyProcess(tmp_path, *options(store, engines)) as proxy:

        def decision() -> str:
            name = f"request-{len(proxy.access.read_text().splitlines())}"
            assert post(proxy.url, COMPLETIONS, completion(), **{"x-request-id": name})[0] == 200
            return str(proxy.record(name)["decision"])

        assert decision() == "split" and proxy.metrics()["kvstore_proxy_store_up"] == 1
        store.kill()
        wait_until(lambda: not proxy.status()["store"]["answers"], what="it is noticed")
        assert decision() == "colocate" and proxy.metrics()["kvstore_proxy_store_up"] == 0
        store.restart()
        wait_until(lambda: proxy.status()["store"]["answers"], what="it is noticed")
        assert decision() == "split"
    levels = [line.split()[1] for line in proxy.log.read_text().splitlines() if "the store at" in line]
    assert levels == ["INFO", "WARNING", "INFO"], "only a store that does not answer is a warning"
