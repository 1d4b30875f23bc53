"""A TLS process buffers little of what its clients send or do not read, however many clients there are."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import psutil
import pytest

from kvstore.tls.relay import RELAY_BUFFERS
from kvstore.tls.secured import RECORD_BYTES
from tests.attack.scale import FULL
from tests.support.certificates import Authority
from tests.support.harness import CONTAINS, PING, PONG, RawClient, Server, make_keys, make_namespace, pack

MiB = 1 << 20
CLIENTS = 600 if FULL else 60
KEYS = b"".join(make_keys(8000, key_bytes=64))
FIRST = 20  # clients that have left before the process is measured
A_CLIENT_BYTES = 4 * RECORD_BYTES + (64 << 10)  # two records in each direction, and Python's own
OTHER_BYTES = 8 * MiB  # what the allocator keeps, and the loop's own memory


def connected(stack: contextlib.ExitStack, server: Server, ca: str, number: int) -> RawClient:
    """Return a client with TLS and a small receive buffer."""
    raw = stack.enter_context(
        RawClient(
            server,
            receive_buffer=16 << 10,
            source=f"127.0.1.{number % 20 + 1}",
            tls=ssl.create_default_context(cafile=ca),
        )
    )
    raw.hello(make_namespace(64, "tls memory").canonical())
    return raw


def flood(server: Server, ca: str, clients: int, rounds: int) -> int:
    """Send lookups, without reading the answers, until no more bytes are accepted. Returns the memory of the TLS
    process, in bytes."""
    with contextlib.ExitStack() as stack:
        raws = [connected(stack, server, ca, number) for number in range(clients)]
        for raw in raws:
            raw.sock.settimeout(0.02)
        for request_id in range(rounds):
            for raw in list(raws):
                try:
                    raw.send(pack(CONTAINS, request_id, 60_000, 8000, 64, False, 0.0), KEYS)
                except OSError:  # the server reads no more from it
                    raws.remove(raw)
        with contextlib.ExitStack() as other:
            assert connected(other, server, ca, 0).ask(pack(PING, 1, 1000))[0] == PONG, "others are served"
        return tls_process(server).memory_info().rss


def tls_process(server: Server) -> psutil.Process:
    [found] = [
        each
        for each in psutil.Process(server.process.pid).children(recursive=True)
        if "kvstore.tls.accepting" in " ".join(each.cmdline())
    ]
    return found


@pytest.mark.timeout(300)
def test_a_tls_process_keeps_little_unread_data(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    server = Server(tmp_path / "log", "--memory", "64MiB", "--tls-cert", issued.cert, "--tls-key", issued.key)
    try:
        before = flood(server, authority.file, FIRST, 2)
        highest = flood(server, authority.file, CLIENTS, 30)
        bound = before + RELAY_BUFFERS + CLIENTS * A_CLIENT_BYTES + OTHER_BYTES
        print(f"{before / MiB:.1f} MiB, then {highest / MiB:.1f} MiB of at most {bound / MiB:.1f} MiB")
        assert highest <= bound
    finally:
        server.kill()
