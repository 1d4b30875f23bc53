"""The proxy's spans, in its file and at a collector. The processes are real, and so is the HTTP server that receives
OTLP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvstore_client.engine.trace_file import Slice, read_trace
from tests.support import forked
from tests.support.harness import ROOT, Server, environment, wait_until
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.proxies import ProxyProcess, StandInEngine, chunks_of, post
from tests.support.stand_in_engine import MODEL

COMPLETIONS = "/v1/completions"
TRACE, USER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT, ERROR = 2, 3, 2  # OTLP's numbers of span kinds and of a status


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(range(100, 140)), "max_tokens": 12, "temperature": 0, **more}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StandInEngine]]:
    """Prefill engine p, and decode engines a and b."""
    folder = tmp_path_factory.mktemp("engines")
    found = {name: StandInEngine(folder / f"{name}.log") for name in "pab"}
    yield found
    for engine in found.values():
        engine.kill()


@pytest.fixture
def calm(engines: dict[str, StandInEngine]) -> dict[str, StandInEngine]:
    """Engines that behave. Decode takes a while here, because the prefill is abandoned when decode has answered."""
    for name, engine in engines.items():
        engine.behave(**({} if name == "p" else {"delay_s": 0.1}))
    return engines


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as found:
        yield found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("store") / "store.log", "--memory", "64MiB")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def options(engines: dict[str, StandInEngine], store: Server) -> list[str]:
    roles = [f"--prefill={engines['p'].url}", *(f"--decode={engines[name].url}" for name in "ab")]
    return [f"--store={store.endpoint}", *roles, "--policy=split", "--backoff-seconds=0.01"]


@pytest.fixture(scope="module")
def proxy(
    options: list[str], receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    folder = tmp_path_factory.mktemp("proxy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        found = ProxyProcess(folder, *options, f"--trace-file={folder}/trace.json", f"--otlp-endpoint={receiver.url}")
    yield found
    found.stop()


def header(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{USER}-{flags}"}


def in_file(proxy: ProxyProcess, trace: str) -> list[Slice]:
    return [each for each in read_trace(proxy.access.parent / "trace.json") if each.trace_id == trace]


def test_a_collector_receives_a_requests_spans(
    proxy: ProxyProcess, calm: dict[str, StandInEngine], receiver: OtlpReceiver
) -> None:
    chunks_of(proxy.url, COMPLETIONS, completion(stream=True), **header(TRACE))
    wait_until(lambda: len(receiver.of(TRACE)) == 4, what="all spans came")
    spans = {each["name"]: each for each in receiver.of(TRACE)}
    root = spans[f"POST {COMPLETIONS}"]
    assert (root["kind"], root["parent"], root["status"]) == (SERVER, USER, 0)
    assert root["resource"]["service.name"] == "kvstore-proxy"
    wanted = {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.output_tokens": 12,
        "kvstore.decision": "split",
        "kvstore.outcome": "ok",
    }
    assert wanted.items() <= root["attributes"].items()
    assert 0 < root["attributes"]["gen_ai.response.time_to_first_chunk"] <= root["ended"] - root["began"]
    for name in ("decide", "prefill", "decode"):
        part = spans[name]
        assert part["parent"] == root["id"] and root["began"] <= part["began"] <= part["ended"] <= root["ended"]
    assert abs(root["ended"] - time.time()) < 30
    for name in ("prefill", "decode"):
        part = spans[name]
        assert part["kind"] == CLIENT and part["began"] <= part["events"]["first token"]["at"] <= part["ended"]
        urls = [f"http://{part['attributes']['server.address']}:{part['attributes']['server.port']}"]
        [asked] = next(each for each in calm.values() if each.url in urls).seen()["requests"]
        assert asked["headers"]["traceparent"] == f"00-{TRACE}-{part['id']}-01"
        assert asked["body"]["kv_transfer_params"]["kvstore"]["traceparent"] == asked["headers"]["traceparent"]


def test_a_retry_and_its_failure_are_recorded(
    proxy: ProxyProcess, calm: dict[str, StandInEngine], receiver: OtlpReceiver
) -> None:
    trace = "1" * 32
    for engine in calm.values():
        engine.behave(status=503)
    assert post(proxy.url, COMPLETIONS, completion(), **header(trace))[0] == 503
    wait_until(lambda: len(receiver.of(trace)) == 6, what="the request, the decision, prefill and three decodes")
    spans = receiver.of(trace)
    decodes = [each for each in spans if each["name"] == "decode"]
    assert [each["status"] for each in decodes] == [ERROR] * 3
    assert [each["attributes"]["error.type"] for each in decodes] == ["503"] * 3
    assert [each["attributes"].get("http.request.resend_count") for each in decodes] == [None, 1, 2]
    assert {each["name"]: each["status"] for each in spans}["prefill"] == ERROR
    assert spans[0]["status"] == ERROR and spans[0]["events"]["retry"]["error.type"] == "503"
    written = wait_until(lambda: in_file(proxy, trace), what="it is written")
    assert {each.name for each in written if each.ended_us is not None} == {each["name"] for each in spans}
    assert [each.name for each in written if each.ended_us is None] == ["retry", "retry"]
    assert {each.request_id for each in written} == {spans[0]["attributes"]["kvstore.request_id"]}


def test_a_request_that_its_caller_did_not_sample_is_not_recorded(
    proxy: ProxyProcess, calm: dict[str, StandInEngine], receiver: OtlpReceiver
) -> None:
    unwanted, wanted = "2" * 32, "3" * 32
    assert post(proxy.url, COMPLETIONS, completion(), **header(unwanted, "00"))[0] == 200
    assert calm["p"].seen()["requests"][0]["headers"]["traceparent"].endswith("-00")
    assert post(proxy.url, COMPLETIONS, completion(), **header(wanted))[0] == 200
    wait_until(lambda: receiver.of(wanted) and in_file(proxy, wanted), what="the later one came")
    assert not receiver.of(unwanted) and not in_file(proxy, unwanted)


def test_two_traceparent_headers_count_as_none(proxy: ProxyProcess, calm: dict[str, StandInEngine]) -> None:
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)
    body = json.dumps(completion()).encode()
    connection.putrequest("POST", COMPLETIONS)
    for name, value in [
        *[("traceparent", header(TRACE)["traceparent"])] * 2,
        ("tracestate", "a=1"),
        ("x-request-id", "two"),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
    ]:
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 200
    connection.close()
    [asked] = calm["p"].seen()["requests"]
    assert TRACE not in asked["headers"]["traceparent"] and "tracestate" not in asked["headers"]
    assert proxy.record("two")["trace"] == asked["headers"]["traceparent"].split("-")[1]


def test_several_tracestate_headers_form_one_list(proxy: ProxyProcess, calm: dict[str, StandInEngine]) -> None:
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)
    body = json.dumps(completion()).encode()
    connection.putrequest("POST", COMPLETIONS)
    given = [("traceparent", header(TRACE)["traceparent"]), ("tracestate", "a=1"), ("tracestate", "b=2")]
    for name, value in [*given, ("content-type", "application/json"), ("content-length", str(len(body)))]:
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 200
    connection.close()
    assert calm["p"].seen()["requests"][0]["headers"]["tracestate"] == "a=1,b=2"


def test_without_options_engines_get_only_the_header(
    options: list[str], calm: dict[str, StandInEngine], tmp_path: Path
) -> None:
    with ProxyProcess(tmp_path, *options) as proxy:
        assert post(proxy.url, COMPLETIONS, completion(), **header(TRACE))[0] == 200
        [asked] = calm["p"].seen()["requests"]
        assert TRACE in asked["headers"]["traceparent"]
        assert asked["body"]["kv_transfer_params"] == {"do_remote_decode": True}
        assert sorted(each.name for each in tmp_path.iterdir()) == ["access.jsonl", "proxy.log"]


def test_an_unreachable_collector_disturbs_neither_requests_nor_the_stop(
    options: list[str], calm: dict[str, StandInEngine], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        proxy = ProxyProcess(tmp_path, *options, "--otlp-endpoint=http://127.0.0.1:9")
    for _ in range(20):
        assert post(proxy.url, COMPLETIONS, completion())[0] == 200
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(8) == 0
    proxy.stop()
    assert "127.0.0.1" in proxy.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace-file=/no/such/file"], "--trace-file: [Errno 2] No such file or directory: '/no/such/file'"),
        (["--trace-file=/dev/null"], "/dev/null is not an ordinary file"),
        (["--otlp-endpoint=collector:4318"], "--otlp-endpoint is 'collector:4318'; expected http://HOST:PORT"),
    ],
)
def test_unusable_options_are_reported_at_the_start(options: list[str], arguments: list[str], says: str) -> None:
    done = forked.run("kvstore_cli", "proxy", "--listen=127.0.0.1:0", *options, *arguments, env=environment())
    assert done.returncode == 2 and says in " ".join(done.stderr.split())


@pytest.mark.parametrize("option", ["--otlp-endpoint=http://h:1", "--trace-file=trace.json"])
def test_a_missing_extra_is_named(options: list[str], option: str) -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; from kvstore_cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "proxy", "--listen=127.0.0.1:0", *options, option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment(), check=False)
    says = f"{option.partition('=')[0]} needs the OpenTelemetry SDK"
    assert done.returncode == 2 and says in (said := " ".join(done.stderr.split()))
    assert 'pip install "llm-kvstore[tracing]"' in said
