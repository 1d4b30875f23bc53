"""The proxy as an HTTP hop: it adds nothing, loses nothing, and holds no more of a request than its limits allow.

The proxy and the stand-in engines are real processes. tests/engine/test_transparent.py compares the proxy with a real
engine.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, Reading, StandInEngine, chunks_of, get, post, same_answer, text_of
from tests.support.stand_in_engine import MODEL, expected

PROMPT = list(range(100, 140))
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MiB = 1 << 20
LATE = {"delay_s": 0.2}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **more}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StandInEngine]]:
    """Prefill engine p and decode engine d, which close idle connections after a second."""
    folder = tmp_path_factory.mktemp("engines")
    found = {name: StandInEngine(folder / f"{name}.log", "--keep-alive-s", "1") for name in "pd"}
    yield found
    for engine in found.values():
        engine.kill()


@pytest.fixture(scope="module")
def shared(
    both: dict[str, StandInEngine], tcp_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("proxy"), *options(tcp_server, both), "--policy=split") as proxy:
        yield proxy


def options(store: Server, engines: dict[str, StandInEngine]) -> list[str]:
    roles = [f"--prefill={engines['p'].url}", f"--decode={engines['d'].url}"]
    times = ["--check-seconds=0.1", "--backoff-seconds=0.1", "--idle-seconds=1.5", "--first-byte-seconds=3"]
    return [f"--store={store.endpoint}", *roles, *times]


@pytest.fixture
def engines(both: dict[str, StandInEngine]) -> dict[str, StandInEngine]:
    for engine in both.values():
        engine.behave()
    return both


@pytest.fixture
def proxy(shared: ProxyProcess, engines: dict[str, StandInEngine]) -> ProxyProcess:
    wait_until(lambda: all(not each["shunned"] and each["healthy"] for each in engines_of(shared)), what="all are well")
    return shared


def engines_of(proxy: ProxyProcess) -> list[dict[str, Any]]:
    return [each for pool in proxy.status()["pools"].values() for each in pool]


def ask(
    url: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers with lower-case names, and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, [(name.lower(), value) for name, value in reply.getheaders()], reply.read()


# ---- what is passed on -------------------------------------------------------------------------------------------


def test_a_request_for_another_protocol_is_served_without_a_warning(proxy: ProxyProcess) -> None:
    asked = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    assert post(proxy.url, COMPLETIONS, completion(), **asked)[0] == 200
    assert "pgrade" not in proxy.log.read_text() and "WebSocket" not in proxy.log.read_text()


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head(proxy: ProxyProcess) -> None:
    """After some requests on a connection, a client delays the acknowledgement of an answer's head by 40 ms. The rest
    of the answer must not wait for it."""
    took = []
    with contextlib.closing(http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)) as connection:
        for _ in range(40):
            began = time.monotonic()
            connection.request("GET", "/v1/models")
            assert connection.getresponse().read()
            took.append(time.monotonic() - began)
    assert min(took[20:]) < 0.035


def test_all_headers_but_hop_by_hop_ones_pass_in_both_directions(proxy: ProxyProcess) -> None:
    sent = {
        "Accept-Language": "de",
        "Authorization": "Bearer k",
        "Content-Type": "text/plain; charset=latin-1",
        "Cookie": "c=1",
        "User-Agent": "somebody",
        "X-Custom": "yes",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "not beyond",
        "Proxy-Authorization": "for you",
        "X-Forwarded-For": "1.2.3.4",
    }
    status, headers, body = ask(proxy.url, "PUT", "/pooling?a=1&b=%20", b"\xff\x00raw", **sent)
    told = json.loads(body)
    came = dict(told["headers"])
    assert (status, told["method"], told["body"], told["query"]) == (200, "PUT", "\xff\x00raw", "a=1&b=%20")
    for name in ("Accept-Language", "Authorization", "Content-Type", "Cookie", "User-Agent", "X-Custom"):
        assert came[name.lower()] == sent[name], name
    assert not {"x-hop", "proxy-authorization", "x-forwarded-for"} & came.keys()
    back = dict(headers)
    assert (back["set-cookie"], back["x-engine"], back["content-language"]) == ("a=1", "yes", "de")
    assert back["x-request-id"] == came["x-request-id"], "so that the user and the engine have one name for it"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models", "/tokenize"])
def test_browsers_have_the_same_access_as_to_the_engine(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], path: str
) -> None:
    question = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    through = ask(proxy.url, "OPTIONS", path, **question)
    itself = ask(engines["d"].url, "OPTIONS", path, **question)
    assert through[0] == itself[0] == 200 and through[2] == itself[2]
    assert cors(through[1]) == cors(itself[1]) and len(cors(itself[1])) >= 2
    body = {COMPLETIONS: completion(), CHAT: completion(), "/tokenize": completion()}.get(path)
    data = None if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    answers = [
        ask(url, method, path, data, **{"Origin": "http://page", "Content-Type": "application/json"})
        for url in (proxy.url, engines["d"].url)
    ]
    assert answers[0][0] == answers[1][0] == 200 and cors(answers[0][1]) == cors(answers[1][1]) != []


def cors(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in headers if name.startswith("access-control-"))


def test_an_engine_behind_a_compressing_sidecar_is_usable(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for engine in engines.values():
        engine.behave(packs=True, cached=3)
    life = time.monotonic() + 1.0
    while time.monotonic() < life:  # during some checks
        assert all(each["healthy"] for each in engines_of(proxy))
        status, headers, body = ask(
            proxy.url, "POST", COMPLETIONS, json.dumps(completion()).encode(), **{"Content-Type": "application/json"}
        )
        assert status == 200 and json.loads(body)["choices"][0]["text"] == expected(PROMPT, 6)
        assert "content-encoding" not in dict(headers)
    assert text_of(chunks_of(proxy.url, COMPLETIONS, completion())) == expected(PROMPT, 6)
    _, headers, body = ask(proxy.url, "POST", "/pooling", b"as it is")
    assert dict(headers)["content-encoding"] == "gzip" and b"as it is" in gzip.decompress(body)
    assert MODEL.encode() in get(proxy.url, "/v1/models")[1]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 1}], ids=str)
def test_an_engines_comments_keep_the_users_connection_alive(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], more: dict[str, Any]
) -> None:
    engines["p"].behave(delay_s=1.0)
    engines["d"].behave(comments=5, gap_s=0.05)
    with Reading(proxy.url, COMPLETIONS, completion(**more)) as reading:
        lines = iter(reading._reply.readline, b"")
        began, first = time.monotonic(), next(lines)
        assert first == b": keep-alive\n" and time.monotonic() - began < 1.0
        rest = list(lines)
    assert rest.count(b": keep-alive\n") == 4 and rest[-2] == b"data: [DONE]\n"


def test_an_engine_that_sends_only_comments_is_given_up(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    engines["d"].behave(only_comments=True)
    began = time.monotonic()
    with Reading(proxy.url, COMPLETIONS, completion()) as reading:
        chunks = list(reading)
    assert time.monotonic() - began < 30 and (not reading.done or text_of(chunks) == expected(PROMPT, 6))
    wait_until(lambda: not engines["d"].seen()["running"], what="its request has ended")


def test_connections_closed_by_an_engine_are_no_failure(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    """The engine closes idle connections a second after its last answer, just when the next request comes."""
    before = proxy.metrics()
    for number in range(20):
        time.sleep(0.98 + number % 5 * 0.01 if number % 2 else 0)
        if number % 2:
            assert post(proxy.url, "/tokenize", {"model": MODEL, "prompt": "ab"})[0] == 200
        else:
            assert post(proxy.url, COMPLETIONS, completion())[0] == 200
    after = proxy.metrics()
    for name in ("failures", "retries"):
        for row in [row for row in after if name in row]:
            assert after[row] == before.get(row, 0.0), row
    assert not any(each["shunned"] for each in engines_of(proxy))


@pytest.mark.parametrize("policy", ["split", "colocate"])
def test_only_streamed_answers_have_a_time_to_the_first_token(proxy: ProxyProcess, policy: str) -> None:
    for stream in (False, True):
        headers = {"x-request-id": f"first-token-{policy}-{stream}", "x-kvstore-policy": policy}
        if stream:
            chunks_of(proxy.url, COMPLETIONS, completion(), **headers)
        else:
            assert post(proxy.url, COMPLETIONS, completion(), **headers)[0] == 200
        record = proxy.record(headers["x-request-id"])
        assert record["stream"] is stream and (record["ttft_s"] is not None) is stream, record


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=str)
def test_users_see_as_cached_what_was_cached_before_their_request(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path, stream: bool, more: dict[str, Any]
) -> None:
    """D finds the blocks that P has just computed for this request. The usage must not count them as cached, because
    the user pays for them."""
    engines["p"].behave(cached=16)
    engines["d"].behave(cached=39, delay_s=0.2)
    with ProxyProcess(tmp_path, *options(tcp_server, engines), "--policy=split") as proxy:
        if stream:
            chunks = chunks_of(proxy.url, COMPLETIONS, completion(stream_options={"include_usage": True}, **more))
            [usage] = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        else:
            usage = json.loads(post(proxy.url, COMPLETIONS, completion(**more))[1])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_prefilled_for_this_request_do_not_count_as_cached(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path, stream: bool
) -> None:
    """D finds P's blocks before P's answer has arrived."""
    engines["p"].behave(cached=0, delay_s=0.1)
    engines["d"].behave(cached=39)
    with ProxyProcess(tmp_path, *options(tcp_server, engines), "--policy=split") as proxy:
        if stream:
            chunks = chunks_of(proxy.url, COMPLETIONS, completion(n=2, stream_options={"include_usage": True}))
            [usage] = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        else:
            usage = json.loads(post(proxy.url, COMPLETIONS, completion(n=2))[1])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("first", ["p", "d"])
@pytest.mark.parametrize("stop_at", [1, 4])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_engines_final_fields_are_in_the_last_event(
    proxy: ProxyProcess,
    engines: dict[str, StandInEngine],
    path: str,
    options: dict[str, Any],
    stop_at: int,
    first: str,
) -> None:
    """The fields are in the last event also if the answer ends with P's token."""
    for name, engine in engines.items():
        engine.behave(stop_at=stop_at, says_last={"system_fingerprint": "f"}, **({} if name == first else LATE))
    body = {**completion(**options), "messages": [{"role": "user", "content": "a"}]}
    through, right = (same_answer(chunks_of(url, path, body)) for url in (proxy.url, engines[first].url))
    assert [set(each) for each in through] == [set(each) for each in right]
    assert [each.get("system_fingerprint") for each in through] == [None] * (len(right) - 1) + ["f"]


def test_invalid_requests_are_refused_in_the_engines_own_words(
    proxy: ProxyProcess, engines: dict[str, StandInEngine]
) -> None:
    for body in (b"{", b"", b"[1]", b"\xff"):
        seen = [post(url, "/pooling", body)[0] for url in (proxy.url, engines["d"].url)]
        assert seen == [200, 200]
        statuses = [post(url, COMPLETIONS, body)[0] for url in (proxy.url, engines["d"].url)]
        assert statuses[0] == statuses[1] == 500, "the stand-in's own error"


# ---- state in an engine ------------------------------------------------------------------------------------------


def test_stateful_requests_stay_with_their_engine(tcp_server: Server, tmp_path: Path) -> None:
    engines = [StandInEngine(tmp_path / f"{number}.log") for number in range(3)]
    roles = [f"--decode={engine.url}" for engine in engines]
    try:
        with ProxyProcess(tmp_path / "proxy", f"--store={tcp_server.endpoint}", "--check-seconds=0.1", *roles) as proxy:
            made = [json.loads(post(proxy.url, RESPONSES, {"model": MODEL, "input": "a"})[1]) for _ in range(12)]
            for first in made:
                status, body = post(proxy.url, RESPONSES, {"model": MODEL, "previous_response_id": first["id"]})
                assert (status, json.loads(body)["engine"]) == (200, first["engine"])
                assert get(proxy.url, f"{RESPONSES}/{first['id']}") == (
                    200,
                    json.dumps({"id": first["id"], "engine": first["engine"]}, separators=(",", ":")).encode(),
                )
            for unknown in ("resp_unknown", made[0]["id"] + "x"):
                status, body = post(proxy.url, RESPONSES, {"model": MODEL, "previous_response_id": unknown})
                assert status == 404 and b"send the whole conversation" in body
            assert get(proxy.url, f"{RESPONSES}/../pooling")[0] == 404
    finally:
        for engine in engines:
            engine.kill()


# ---- engines that misbehave --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [101, 600, 999])
def test_an_invalid_status_is_the_engines_failure(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], status: int
) -> None:
    """The other engine answers instead, or the reply is a 502 with a reason."""
    engines["d"].behave(status=status, headers={})
    code, body = post(proxy.url, COMPLETIONS, completion())
    right = code == 200 and json.loads(body)["choices"][0]["text"] == expected(PROMPT, 6)
    assert right or (code == 502 and json.loads(body)["error"]["message"])


def test_headers_with_any_bytes_are_passed_on(proxy: ProxyProcess, engines: dict[str, StandInEngine]) -> None:
    """HTTP permits bytes above 0x7F in headers (obs-text); the user's program may know their meaning."""
    for engine in engines.values():
        engine.behave(headers={"x-said": "gr\xfc\xdf", "www-authenticate": 'Basic realm="\xe9"'}, status=401)
    status, headers, _ = ask(proxy.url, "POST", COMPLETIONS, json.dumps(completion()).encode())
    assert status == 401
    assert dict(headers)["x-said"].encode("latin-1") == b"gr\xfc\xdf"
    assert dict(headers)["www-authenticate"].encode("latin-1") == b'Basic realm="\xe9"'


@pytest.mark.parametrize(
    "how",
    [
        {"odd_ids": "abc"},
        {"odd_ids": [1, "two"]},
        {"odd_ids": {"a": 1}},
        {"odd_usage": {"prompt_tokens": "many", "completion_tokens": [1]}},
        {"odd_usage": {"prompt_tokens_details": 7}},
    ],
    ids=str,
)
def test_chunks_of_unexpected_types_are_the_engines_failure(
    proxy: ProxyProcess, engines: dict[str, StandInEngine], how: dict[str, Any]
) -> None:
    engines["d"].behave(**how)
    with Reading(proxy.url, COMPLETIONS, completion(stream_options={"include_usage": True})) as reading:
        chunks = list(reading)
    assert reading.status in (200, 502)
    assert reading.done or any("error" in chunk for chunk in chunks)
    assert "Traceback" not in proxy.log.read_text()


# ---- what requests may take --------------------------------------------------------------------------------------


class Sending:
    """Sends a request with only the first part of its body."""

    def __init__(self, url: str, length: int, sent: int) -> None:
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None
        self.sock = socket.create_connection((where.hostname, where.port), 30)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.sock.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + b" " * sent)

    def status(self) -> int:
        """Return the status of the reply, which arrives before the body is complete."""
        self.sock.settimeout(30)
        return int(self.sock.recv(1 << 16).split()[1])

    def close(self) -> None:
        self.sock.close()


def test_incoming_bodies_stay_within_their_memory_bound(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path
) -> None:
    """The bodies that have been arriving for the longest time are dropped to make room. A user with a small body is not
    affected."""
    limits = ["--max-body=16MiB", "--max-bodies=32MiB"]
    with (
        ProxyProcess(tmp_path, *options(tcp_server, engines), *limits) as proxy,
        contextlib.ExitStack() as stack,
    ):
        process = psutil.Process(proxy.process.pid)
        assert post(proxy.url, COMPLETIONS, completion())[0] == 200
        before = process.memory_info().rss
        slow = [stack.enter_context(contextlib.closing(Sending(proxy.url, 16 * MiB, 15 * MiB))) for _ in range(12)]
        assert [each.status() for each in slow[:8]] == [408] * 8
        assert process.memory_info().rss < before + 150 * MiB, "of 180 MiB that were sent"
        began = time.monotonic()
        assert post(proxy.url, COMPLETIONS, completion())[0] == 200 and time.monotonic() - began < 5
        assert post(proxy.url, COMPLETIONS, b" " * (17 * MiB))[0] == 413


def test_endless_bodies_keep_no_other_user_out(
    tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path
) -> None:
    with (
        ProxyProcess(tmp_path, *options(tcp_server, engines), "--max-in-flight=20") as proxy,
        contextlib.ExitStack() as stack,
    ):
        endless = [stack.enter_context(contextlib.closing(Sending(proxy.url, 100, 1))) for _ in range(60)]
        for _ in range(5):
            assert post(proxy.url, COMPLETIONS, completion())[0] == 200
        assert endless[0].status() == 408


def test_a_body_must_make_progress(tcp_server: Server, engines: dict[str, StandInEngine], tmp_path: Path) -> None:
    """A body that arrives byte by byte is too slow, so its connection is closed."""
    with ProxyProcess(tmp_path, *options(tcp_server, engines), "--user-stall-seconds=1") as proxy:
        sending, began = Sending(proxy.url, 10_000, 1), time.monotonic()
        with contextlib.closing(sending), contextlib.suppress(OSError):
            while time.monotonic() - began < 20:
                sending.sock.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() - began < 10, "its connection is closed"
