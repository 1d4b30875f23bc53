"""A client that can cause one log line can cause a million, so only a few of each kind are written."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import struct
import time
from collections.abc import Callable

from tests.attack.crowd import OF_ADDRESS, crowd
from tests.attack.scale import FULL
from tests.support.clock import Clock
from tests.support.harness import (
    CONTAINS,
    DELETE,
    GREETING,
    HELLO,
    PROTOCOL,
    Closed,
    RawClient,
    Server,
    StartServer,
    make_keys,
    make_namespace,
    pack,
    ready_command,
    set_frames,
    zmtp_frame,
)

TIMES = 10_000 if FULL else 300
LINES, LINES_S = 20, 10.0  # of one kind, as docs/operations.md promises
NAMESPACE = make_namespace(64, "log")
HELLO_FRAME = zmtp_frame(pack(HELLO, 0, PROTOCOL, NAMESPACE.canonical(), "attacker"), 0)
(KEY,) = make_keys(1)
DAMAGED = set_frames(1, [KEY], [bytes(64)], sums=bytes(8))

# What a client sends on its own connection, and the line that this causes.
SENT: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "no ZMTP greeting"),
    "another mechanism": (GREETING.replace(b"NULL", b"PLAI"), "PLAI"),
    "a frame before READY": (GREETING + zmtp_frame(b"x", 0), "a frame came before READY"),
    "a second READY": (GREETING + 2 * ready_command(), "a second READY"),
    "another socket": (GREETING + ready_command(b"PUB"), "a socket of type"),
    "an error": (GREETING + ready_command() + zmtp_frame(b"\x05ERROR\x02no", 4), "the client reports"),
    "a command in a message": (
        GREETING + ready_command() + HELLO_FRAME + zmtp_frame(DAMAGED[0], 1) + ready_command(),
        "inside a message",
    ),
    "no request": (GREETING + ready_command() + zmtp_frame(b"\xc1" * 9, 0), "refused: the header is not a request"),
    "a request without a namespace": (
        GREETING + ready_command() + zmtp_frame(pack(CONTAINS, 1, 1000, 1, 16), 1) + zmtp_frame(KEY, 0),
        "refused: no namespace yet",
    ),
    "another version": (
        GREETING + ready_command() + zmtp_frame(pack(HELLO, 1, 99), 0),
        "refused: the client speaks version 99 of the protocol",
    ),
    "an overlong frame": (
        GREETING + ready_command() + struct.pack(">BQ", 2, 1 << 40),
        "refused: a frame of 1099511627776 bytes",
    ),
    "damaged blocks": (
        GREETING
        + ready_command()
        + HELLO_FRAME
        + b"".join(zmtp_frame(frame, frame is not DAMAGED[-1]) for frame in DAMAGED)
        + zmtp_frame(pack(DELETE, 2, 1000, 1, 16, True), 1)
        + zmtp_frame(KEY, 0),
        "1 damaged blocks in memory were deleted",
    ),
}


def send_on_a_connection(address: tuple[str, int], data: bytes) -> None:
    """Send the data, and wait until the server has read all of it and closes the connection."""
    with socket.create_connection(address, 10) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def assert_bounded(server: Server, cause: Callable[[], None], line: str) -> None:
    """Check that `TIMES` repetitions of `cause` write this line only a few times, and hardly anything else."""
    before, began = len(server.log_text()), time.monotonic()
    for _ in range(TIMES):
        cause()
    text = server.log_text()[before:]
    most = LINES * (2 + (time.monotonic() - began) // LINES_S)
    assert line in text, text[-2000:]
    assert text.count("\n") <= most < TIMES, f"{text.count(chr(10))} lines\n{text[-2000:]}"


def test_lines_about_what_clients_send_are_bounded(start_server: StartServer, clock: Clock) -> None:
    server = start_server(**clock.environment)
    for data, line in SENT.values():
        clock.advance(LINES_S + 1)  # some of them are of one kind
        assert_bounded(server, functools.partial(send_on_a_connection, (server.host, server.port), data), line)


def test_lines_about_connections_without_a_place_are_bounded(start_server: StartServer) -> None:
    server = start_server()

    def ask() -> None:
        with RawClient(server, source="127.0.0.2") as raw, contextlib.suppress(Closed):
            raw.hello(NAMESPACE.canonical())
            raw.ask(pack(CONTAINS, 1, 1000, 1, 16), KEY)

    with crowd(server, OF_ADDRESS, "127.0.0.2"):
        assert_bounded(server, ask, "refused at a limit: 1024 connections from 127.0.0.2 are open")


def test_lines_about_http_requests_are_bounded(start_server: StartServer) -> None:
    """The requests have an Accept header that prometheus_client cannot parse."""
    server = start_server("--http", "127.0.0.1:0")
    found = re.fullmatch(r"http://(\S+):(\d+)", server.http_url)
    assert found
    request = b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text; version=x\r\n\r\n"
    assert_bounded(server, lambda: send_on_a_connection((found[1], int(found[2])), request), "http: a request failed")
