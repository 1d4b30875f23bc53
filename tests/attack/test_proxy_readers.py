"""Users of the proxy who do not read their large answers: how long others wait, and what the proxy holds for them.

How long others wait is told in the proxy's own processor time between their question and its answer, so the machine may
be as busy as it likes. It is compared with what the same short request takes when there are no such users.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine, get, post

READERS = 200
ANSWER_BYTES = 6_000_000
HELD_BYTES = 2 << 20  # for each of them, at most
WORK_S = 2.0  # of the proxy's processor time, during which others ask
COMPLETIONS = "/v1/completions"
MiB = 1 << 20
# By the size of a stream's events: how many there are, and the bytes of each beside what every event has.
KINDS = {"small events": (ANSWER_BYTES // 250, 0), "large events": (60, ANSWER_BYTES // 60)}
SHORT = {"model": "quick", "prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[StandInEngine]]:
    """One has the model of those who do not read, the other one that of all others."""
    found = [StandInEngine(tmp_path / f"{name}.log", f"--adapter={name}") for name in ("slow", "quick")]
    yield found
    for engine in found:
        engine.kill()


def processor_s(proxy: ProxyProcess) -> float:
    """What its process has had of a processor."""
    return int(Path(f"/proc/{proxy.process.pid}/schedstat").read_text().split()[0]) / 1e9


def waited_s(proxy: ProxyProcess, path: str) -> float:
    """-> the processor time of the proxy until a short answer is here."""
    before = processor_s(proxy)
    status, _ = post(proxy.url, path, SHORT) if path == COMPLETIONS else get(proxy.url, path)
    assert status == 200
    return processor_s(proxy) - before


@contextlib.contextmanager
def readers(proxy: ProxyProcess, body: dict[str, Any]) -> Iterator[None]:
    """READERS users ask, and do not read."""
    where, data = urlsplit(proxy.url), json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with contextlib.ExitStack() as stack:
        for _ in range(READERS):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            sock.connect((str(where.hostname), int(where.port or 0)))
            sock.sendall(f"{head}\r\n\r\n".encode() + data)
        wait_until(lambda: proxy.status()["in_flight"] >= READERS, what="all of them are served")
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_readers_who_stand_still_keep_nobody_waiting_and_little_memory(
    tcp_server: Server, engines: list[StandInEngine], tmp_path: Path, kind: str
) -> None:
    tokens, pad = KINDS[kind]
    engines[0].behave(pad=pad, only=tokens, batch_bytes=256 << 10)
    options = [f"--store={tcp_server.endpoint}", *(f"--decode={engine.url}" for engine in engines)]
    with ProxyProcess(tmp_path / "proxy", *options) as proxy:
        process = psutil.Process(proxy.process.pid)
        short_s = statistics.median(waited_s(proxy, COMPLETIONS) for _ in range(9))
        before = process.memory_info().rss
        with readers(proxy, {**SHORT, "model": "slow", "max_tokens": tokens, "stream": True}):
            began, waits, most = processor_s(proxy), [0.0], before
            while processor_s(proxy) - began < WORK_S and len(waits) < 1000:
                waits += waited_s(proxy, "/status"), waited_s(proxy, COMPLETIONS)
                most = max(most, process.memory_info().rss)
        print(f"{kind}: waited {max(waits):.3f} s, others {short_s:.4f} s, {(most - before) / MiB:.0f} MiB")
        assert max(waits) < 4 * READERS * short_s, "more than if each of them had asked for some short answers"
        assert most - before < READERS * HELD_BYTES
