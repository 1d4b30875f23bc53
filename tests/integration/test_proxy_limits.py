"""The proxy's limits that users and operators notice: on concurrent requests, during a drain, and for stalled
readers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT, Server, environment, wait_until
from tests.support.proxies import Asking, ProxyProcess, Reading, StandInEngine, get, post
from tests.support.stand_in_engine import MODEL

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInEngine]:
    found = StandInEngine(tmp_path_factory.mktemp("engine") / "engine.log")
    yield found
    found.kill()


def start(folder: Path, store: Server, engine: StandInEngine, *more: str) -> ProxyProcess:
    engine.behave()
    return ProxyProcess(folder, f"--store={store.endpoint}", f"--decode={engine.url}", "--check-seconds=0.1", *more)


def ask(tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, **more}


def test_requests_beyond_the_limit_are_refused_until_one_ends(
    tcp_server: Server, engine: StandInEngine, tmp_path: Path
) -> None:
    with start(tmp_path, tcp_server, engine, "--max-in-flight=2") as proxy:
        engine.behave(hang_at=1)
        with Reading(proxy.url, COMPLETIONS, ask()) as first, Reading(proxy.url, COMPLETIONS, ask()) as second:
            assert (first.status, second.status) == (200, 200)
            with Asking(proxy.url, COMPLETIONS, ask()) as third:
                refused = third.connection.getresponse()
                assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
                assert "error" in json.loads(refused.read())
            assert get(proxy.url, "/health")[0] == 200, "it is not ill, only full"
        engine.behave()
        wait_until(lambda: post(proxy.url, COMPLETIONS, ask())[0] == 200, what="their places are free again")


def test_answers_unfinished_at_the_drains_end_are_cut_with_an_error(
    tcp_server: Server, engine: StandInEngine, tmp_path: Path
) -> None:
    proxy = start(tmp_path, tcp_server, engine, "--drain-seconds=1")
    engine.behave(gap_s=0.2)
    with Reading(proxy.url, COMPLETIONS, ask(1000)) as reading:
        next(iter(reading))
        proxy.process.terminate()
        chunks = list(reading)
    assert not reading.done and "error" in chunks[-1] and len(chunks) < 50
    assert proxy.process.wait(15) == 0
    proxy.stop()
    assert "cut off" in proxy.log.read_text()
    wait_until(lambda: not engine.seen()["running"], what="the engine is free")


@pytest.mark.parametrize("stream", [True, False])
def test_a_user_who_does_not_read_is_disconnected_after_a_while(
    tcp_server: Server, engine: StandInEngine, tmp_path: Path, stream: bool
) -> None:
    with start(tmp_path, tcp_server, engine, "--user-stall-seconds=1") as proxy:
        engine.behave(pad=100_000)
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.socket() as user:
            user.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            user.connect((host, int(port)))
            body = json.dumps(ask(5000 if stream else 200, stream=stream)).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            user.sendall(f"{head}Content-Length: {len(body)}\r\nx-request-id: stalled\r\n\r\n".encode() + body)
            if stream:
                wait_until(lambda: engine.seen()["running"], what="the engine answers")
                wait_until(lambda: not engine.seen()["running"], what="the engine is freed")
            assert proxy.record("stalled")["outcome"] == "disconnect"
            assert not proxy.status()["in_flight"]
        assert post(proxy.url, COMPLETIONS, ask())[0] == 200


def test_without_its_extra_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['uvicorn'] = None\n"
    hidden += "import runpy; runpy.run_module('kvstore_cli', run_name='__main__')"
    command = [sys.executable, "-c", hidden, "proxy", "--listen", "127.0.0.1:0", "--store", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60, check=False)
    assert done.returncode == 1 and 'pip install "llm-kvstore[serving]"' in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
