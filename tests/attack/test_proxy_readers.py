"""Users of the proxy that stop reading their large answers: how long others wait, and how much memory the proxy
holds.

The wait of other users is measured in the proxy's own processor time between their request and its answer, so the
machine may be busy. It is compared with the same short request when all users read.
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

from tests.attack.scale import FULL
from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine, get, post

READERS = 200
ANSWER_BYTES = 6_000_000
READ_BYTES = 256 << 10  # the most that the proxy's event loop reads of a stream at once
HELD_BYTES = 2 << 20  # the most memory that the proxy may hold for each reader
WORK_S = 2.0 if FULL else 1.0  # of the proxy's processor time, during which others send requests
COMPLETIONS = "/v1/completions"
MiB = 1 << 20
# For each size of a stream's events: the number of events, and the bytes of each event beyond its fields.
KINDS = {"small events": (ANSWER_BYTES // 250, 0), "large events": (60, ANSWER_BYTES // 60)}
SHORT = {"model": "quick", "prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[StandInEngine]]:
    """One engine has the model of the stalled users, and the other that of all other users."""
    found = [StandInEngine(tmp_path / f"{name}.log", f"--adapter={name}") for name in ("slow", "quick")]
    yield found
    for engine in found:
        engine.kill()


def processor_s(proxy: ProxyProcess) -> float:
    """Return the processor time that its process has used."""
    return int(Path(f"/proc/{proxy.process.pid}/schedstat").read_text().split()[0]) / 1e9


def waited_s(proxy: ProxyProcess, path: str, body: dict[str, Any] = SHORT) -> float:
    """Return the proxy's processor time until an answer is complete."""
    before = processor_s(proxy)
    status, _ = post(proxy.url, path, body) if path == COMPLETIONS else get(proxy.url, path)
    assert status == 200
    return processor_s(proxy) - before


@contextlib.contextmanager
def readers(proxy: ProxyProcess, body: dict[str, Any]) -> Iterator[None]:
    """Have READERS users send requests without reading."""
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
def test_stalled_readers_delay_no_other_user_and_take_little_memory(
    tcp_server: Server, engines: list[StandInEngine], tmp_path: Path, kind: str
) -> None:
    tokens, pad = KINDS[kind]
    engines[0].behave(pad=pad, only=tokens, batch_bytes=256 << 10)
    options = [f"--store={tcp_server.endpoint}", *(f"--decode={engine.url}" for engine in engines)]
    with ProxyProcess(tmp_path / "proxy", *options) as proxy:
        process = psutil.Process(proxy.process.pid)
        short_s = statistics.median(waited_s(proxy, COMPLETIONS) for _ in range(9))
        large = {**SHORT, "model": "slow", "max_tokens": tokens, "stream": True}
        piece_s = statistics.median(waited_s(proxy, COMPLETIONS, large) for _ in range(3)) * READ_BYTES / ANSWER_BYTES
        before = process.memory_info().rss
        with readers(proxy, large):
            began, waits, most = processor_s(proxy), [0.0], before
            while processor_s(proxy) - began < WORK_S and len(waits) < 1000:
                waits += waited_s(proxy, "/status"), waited_s(proxy, COMPLETIONS)
                most = max(most, process.memory_info().rss)
        allowed_s = 4 * READERS * (short_s + piece_s)
        print(f"{kind}: waited {max(waits):.3f} s of {allowed_s:.3f} s allowed; {(most - before) / MiB:.0f} MiB")
        assert max(waits) < allowed_s, "more than if each of them had sent some short requests and read some pieces"
        assert most - before < READERS * HELD_BYTES
