"""A node's answers over HTTP: /healthz and /readyz for real shards that are frozen, killed, or not registered yet."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import pytest

import kvstore
from kvstore.node.health import VERDICT_S, WATCH_S
from kvstore.node.web import MAX_REQUESTS, READ_S
from kvstore_client import KVStoreClient
from tests.support.etcd import Etcd
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, make_namespace, wait_until

HTTP = ("--http", "127.0.0.1:0")
SLACK_S = 1.5  # for a machine that is busy


class Answer(NamedTuple):
    """The answer to a request, and how long it took."""

    status: int
    text: str
    seconds: float

    @property
    def document(self) -> Any:
        return json.loads(self.text)


def ask(server: Server, path: str, method: str = "GET") -> Answer:
    request = urllib.request.Request(f"{server.http_url}{path}", method=method)
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    return Answer(status, text, time.monotonic() - started)


@contextmanager
def frozen(*shards: psutil.Process) -> Iterator[None]:
    for shard in shards:
        shard.suspend()
    try:
        yield
    finally:
        for shard in shards:
            shard.resume()


def shard_process(server: Server, number: int) -> psutil.Process:
    """Return the process that serves shard `number`."""
    with KVStoreClient(server.endpoint, make_namespace(64, "m")) as client:
        (pid,) = [shard.pid for shard in client.info().shards if shard.shard == number]
    return psutil.Process(pid)


def deaths(server: Server, number: int) -> int:
    """Return how often the log says that shard `number` died. It may also say that the shard did not answer."""
    return len(re.findall(rf"shard {number} \(pid \d+\) died", server.log_text()))


def test_a_healthy_server_reports_health(start_server: StartServer) -> None:
    server = start_server("--shards", "2", *HTTP)
    assert ask(server, "/healthz")[:2] == (200, "ok\n")
    ready = ask(server, "/readyz")
    assert ready.status == 200
    assert ready.document == {
        "ready": True,
        "reasons": [],
        "shards": [{"shard": shard, "ready": True, "reason": ""} for shard in range(2)],
    }


def test_there_is_a_page_whose_files_come_from_the_server(start_server: StartServer) -> None:
    """tests/integration/test_page.py loads the page in a browser."""
    server = start_server(*HTTP)
    page = ask(server, "/").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"page.js", "page.css", "icon.svg", "metrics", "healthz", "readyz", "status.json"} <= set(loaded)
    assert "<style" not in page and not re.search(r"<script[^>]*>[^<]|\son\w+=|style=", page)  # its policy forbids them
    for path in ("", *loaded, "charts.js"):
        head = ask(server, f"/{path}", "HEAD")
        assert (head.status, head.text) == (200, ""), path
    missing = ask(server, "/metrics/x")
    assert missing.status == 404 and "/readyz" in missing.text
    assert ask(server, "/readyz", "POST").status == 405


def test_a_browser_caches_only_the_pages_files(start_server: StartServer) -> None:
    server = start_server(*HTTP)
    for path in ("/", "/page.js", "/page.css"):
        with urllib.request.urlopen(f"{server.http_url}{path}", timeout=10) as answer:
            assert answer.headers["Cache-Control"] == "no-cache"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            tag = answer.headers["ETag"]
        again = urllib.request.Request(f"{server.http_url}{path}", headers={"If-None-Match": tag})
        with pytest.raises(urllib.error.HTTPError) as unchanged:
            urllib.request.urlopen(again, timeout=10)
        with unchanged.value as answer:
            assert answer.code == 304 and not answer.read()
    with urllib.request.urlopen(f"{server.http_url}/status.json", timeout=10) as answer:
        assert answer.headers["Cache-Control"] == "no-store"


def test_the_json_state_costs_the_shards_nothing(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "2", *HTTP, "--ttl-seconds", "777")
    keys = make_keys(10)
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(keys, blocks_of(keys, 4096))
        assert client.get(keys).hit == 10

        def status() -> Any:
            return ask(server, "/status.json").document

        found = wait_until(lambda: (now := status())["hits"] == 10 and now, what="the next look")
        assert found["version"] == kvstore.__version__ and found["settings"]["ttl_seconds"] == "777"
        assert found["verdict"] == "ok" and found["cluster"] is None
        assert {each["severity"] for each in found["messages"]} <= {"note"}, "such as that this machine is slow"
        assert [shard["shard"] for shard in found["shards"]] == [0, 1]
        assert sum(shard["blocks"] for shard in found["shards"]) == found["namespaces"][0]["blocks"] == 10
        assert found["namespaces"][0]["model"] == client.namespace.model and found["namespaces"][0]["hit_rate"] == 1.0
        (get,) = [row for row in found["requests"] if row["verb"] == "get"]
        assert get["tier"] == "memory" and 0 < get["p50_s"] <= get["p99_s"] < 10
        history = found["history"]
        assert max(rate for rate in history["hit_rate"] if rate is not None) == 1
        assert max(history["bytes_in_per_s"]) > 10 * 4096 / 10 and len(history["time"]) == len(history["hit_rate"])
        with frozen(*server.shards()):
            answers = [ask(server, "/status.json") for _ in range(20)]
        assert all(answer.status == 200 for answer in answers)
        assert max(answer.seconds for answer in answers) < SLACK_S  # no request waited for a shard


def test_the_address_may_be_ipv6(start_server: StartServer) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = start_server("--http", "[::1]:0")
    assert server.http_url.startswith("http://[::1]:")
    assert ask(server, "/readyz").status == 200


def test_a_port_in_use_ends_the_start_and_is_named(start_server: StartServer) -> None:
    taken = start_server(*HTTP).http_url.removeprefix("http://")
    with pytest.raises(AssertionError) as failed:
        start_server("--http", taken)
    assert f"cannot listen on {taken} for HTTP" in str(failed.value)


def test_a_frozen_shard_is_named_and_the_node_stays_alive(start_server: StartServer) -> None:
    server = start_server("--shards", "2", *HTTP)
    with frozen(shard_process(server, 1)):
        ready = ask(server, "/readyz")
        assert ready.status == 503 and ready.seconds < VERDICT_S + SLACK_S
        assert [shard["ready"] for shard in ready.document["shards"]] == [True, False]
        assert "no answer within" in ready.document["shards"][1]["reason"]
        assert ready.document["reasons"] == [f"shard 1: {ready.document['shards'][1]['reason']}"]
        alive = ask(server, "/healthz")
        assert alive.status == 200 and alive.seconds < SLACK_S  # shard 0 answered, and no request waited for shard 1
        assert 'kvstore_shard_up{shard="1"} 0.0' in ask(server, "/metrics").text
        row = wait_until(lambda: (row := ask(server, "/status.json").document["shards"][1])["reason"] and row)
        assert psutil.Process(row["pid"]).status() == psutil.STATUS_STOPPED
    wait_until(lambda: ask(server, "/readyz").status == 200, what="shard 1 answers again")
    assert (
        len(re.findall(r"shard 1 \(pid \d+\) does not answer", server.log_text())) == 1
    )  # the line is not logged for each probe
    assert "shard 1 answers again" in server.log_text()


def test_without_http_the_log_still_names_a_frozen_shard(start_server: StartServer) -> None:
    server = start_server("--shards", "2")
    with frozen(shard_process(server, 1)):
        wait_until(
            lambda: re.search(r"shard 1 \(pid \d+\) does not answer", server.log_text()),
            WATCH_S + VERDICT_S + 10,
            "the log says it",
        )
    wait_until(lambda: "shard 1 answers again" in server.log_text(), WATCH_S + VERDICT_S + 10, "the log says it")
    assert "shard 0 (pid" not in server.log_text()


def test_a_node_with_only_frozen_shards_is_not_alive(start_server: StartServer) -> None:
    server = start_server("--shards", "2", *HTTP)
    with frozen(*server.shards()):
        alive = ask(server, "/healthz")
        assert alive.status == 503 and alive.seconds < VERDICT_S + SLACK_S
    wait_until(lambda: ask(server, "/healthz").status == 200, what="a shard answers again")


def test_a_killed_shard_is_named_until_its_replacement_serves(start_server: StartServer) -> None:
    server = start_server("--shards", "2", *HTTP)
    for died in range(1, 6):
        shard_process(server, 1).kill()
        wait_until(lambda died=died: deaths(server, 1) == died, what="its death is noticed")
        answer = ask(server, "/readyz")
        told = answer.document["shards"][1].get("reason") if answer.status == 503 else None
        if told == "its process died (signal 9); another one is starting":
            break
        # The shard's replacement runs, but may answer slowly because the machine has other work.
        wait_until(lambda: ask(server, "/readyz").status == 200)
    assert told == "its process died (signal 9); another one is starting" and answer.seconds < SLACK_S
    assert [shard["ready"] for shard in answer.document["shards"]] == [True, False]
    wait_until(lambda: ask(server, "/readyz").status == 200, what="another serves in its place")


def test_a_node_is_alive_before_and_ready_after_registration(own_etcd: Etcd, start_server: StartServer) -> None:
    url = own_etcd.url("health")
    own_etcd.stop()
    server = start_server("--cluster", url, "--node-id", "a", *HTTP)
    ready = ask(server, "/readyz")
    assert ready.status == 503
    assert [shard["ready"] for shard in ready.document["shards"]] == [True]
    assert not ready.document["cluster"]["registered"]
    assert ready.document["reasons"] == [f"cluster: {ready.document['cluster']['reason']}"]
    assert "not registered" in ready.document["cluster"]["reason"]
    assert ask(server, "/healthz").status == 200
    own_etcd.start()
    answer = wait_until(lambda: (found := ask(server, "/readyz")).status == 200 and found, what="it registers")
    assert answer.document["cluster"] == {"registered": True, "state": "serving", "reason": ""}


def test_silent_connections_do_not_block_probes(start_server: StartServer) -> None:
    server = start_server(*HTTP)
    host, _, port = server.http_url.removeprefix("http://").rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(2 * MAX_REQUESTS)]
    try:
        for number, sock in enumerate(silent):
            if number % 2:
                sock.sendall(b"GET /metrics HTTP/1.0\r\n")  # and no more
        for _ in range(3):
            answer = ask(server, "/readyz")
            assert answer.status == 200 and answer.seconds < READ_S / 2, "it has not waited until they are closed"
    finally:
        for sock in silent:
            sock.close()


def test_an_address_that_floods_closes_its_own_connections(start_server: StartServer) -> None:
    server = start_server(*HTTP)
    host, _, port = server.http_url.removeprefix("http://").rpartition(":")
    slow = socket.create_connection((host, int(port)), 5)  # the oldest connection
    slow.sendall(b"GET /readyz HTTP/1.0\r\n")
    flood = [socket.create_connection((host, int(port)), 5, ("127.0.0.2", 0)) for _ in range(2 * MAX_REQUESTS)]
    try:
        flood[0].settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert flood[0].recv(1) == b"", "the oldest one of the address that has the most"
        slow.sendall(b"\r\n")
        with slow.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"200"
    finally:
        for sock in (slow, *flood):
            sock.close()


def test_probes_of_a_hanging_shard_do_not_accumulate(start_server: StartServer) -> None:
    server = start_server("--shards", "2", *HTTP)
    supervisor = psutil.Process(server.process.pid)
    before = supervisor.num_threads()
    with frozen(*server.shards()), ThreadPoolExecutor(64) as threads:
        probes = [threads.submit(ask, server, path) for path in ("/readyz", "/metrics") * 64]
        most = 0
        while not all(probe.done() for probe in probes):
            most = max(most, supervisor.num_threads())
            time.sleep(0.02)
        statuses = {probe.result().status for probe in probes if probe.exception() is None}
    assert most <= before + MAX_REQUESTS + 2 + 2  # a thread for each shard, and one or two that are ending
    assert statuses <= {200, 503}
    assert ask(server, "/readyz").seconds < VERDICT_S + SLACK_S
    assert server.stop() == 0


def test_a_stopping_server_stops_answering_and_ends_in_time(start_server: StartServer) -> None:
    server = start_server(*HTTP)
    with socket.create_connection(("127.0.0.1", int(server.http_url.rpartition(":")[2]))):  # sends nothing
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.stop() == 0
        assert time.monotonic() - started < 5.0
