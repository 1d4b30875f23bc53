"""Many connections from many addresses: all of 127.0.0.0/8 are addresses of this host."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator

from kvstore_client import Namespace
from tests.support import forked
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    ERROR,
    GET,
    PING,
    PONG,
    SET,
    RawClient,
    Server,
    environment,
    make_keys,
    pack,
)

# The values that docs/operations.md gives.
CLIENTS = 1968
OF_ADDRESS = 1024
DOOR = 16
NO_PLACE = 10
LIMIT = 6

KEYS_64 = b"".join(make_keys(8192, key_bytes=64))


@contextlib.contextmanager
def crowd(server: Server, count: int, host: str, namespace: Namespace | None = None) -> Iterator[list[RawClient]]:
    """Connect this many clients from one address; with a namespace, each of them sends a HELLO for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as stack:
            raws = [stack.enter_context(RawClient(server, source=host)) for _ in range(count)]
            if namespace is not None:
                for raw in raws:
                    raw.hello(namespace.canonical())
            yield raws
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def all_places(server: Server) -> Iterator[list[RawClient]]:
    """Take every place for clients, from two addresses other than 127.0.0.1."""
    with crowd(server, OF_ADDRESS, "127.0.0.2") as some, crowd(server, CLIENTS - OF_ADDRESS, "127.0.0.3") as others:
        yield some + others


def pings(raw: RawClient) -> bool:
    return bool(raw.ask(pack(PING, 1, 1000))[0] == PONG)


def has_place(raw: RawClient) -> bool:
    """Whether the client may ask for blocks. No earlier reply may be pending on its connection."""
    raw.send(pack(CONTAINS, 2, 60_000, 1, 16), bytes(16))
    header, _ = raw.reply()
    assert header[0] == CONTAINS_REPLY or header[:3] == [ERROR, 2, NO_PLACE], header
    return bool(header[0] == CONTAINS_REPLY)


def hold_memory(raws: list[RawClient]) -> None:
    """Take as much memory as possible: send GETs of many blocks that are never finished, and SETs without their
    payload."""
    for raw in raws:
        raw.sock.settimeout(0.02)
        with contextlib.suppress(OSError):
            for request_id in range(20):
                raw.send(pack(GET, request_id, 600_000, 8192, 64, 1), KEYS_64)
            raw.send(pack(SET, 99, 600_000, 8192, 64), KEYS_64, more=True)


def kvstore(*arguments: str, server: Server) -> subprocess.CompletedProcess[str]:
    """Run the operator's command, which connects from 127.0.0.1."""
    return forked.run("kvstore_cli", *arguments, "--endpoint", server.endpoint, env=environment())
