"""Whatever happens to files that an operator names, or to the reader of standard error, a shard continues to serve."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient
from tests.support.certificates import Authority
from tests.support.harness import (
    ERROR,
    HELLO,
    PROTOCOL,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    wait_until,
)

BLOCK_BYTES = 4096
KEYS = make_keys(8)
PING_S = 0.25  # the promise
MANY = 6000  # principals


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "auth.toml"


def replace(file: Path, text: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o600)
    beside.rename(file)


@contextlib.contextmanager
def served(server: Server, new_namespace: MakeNamespace, **options: str) -> Iterator[Callable[[float], float]]:
    """Check that nothing harms the server in the body, and that its blocks are there afterwards. Yields a function that
    sends PINGs for a number of seconds and returns the longest time until a PONG."""
    with server.unharmed(), KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), **options) as client:  # type: ignore[arg-type]
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))

        def longest(seconds: float) -> float:
            found, end = 0.0, time.monotonic() + seconds
            while time.monotonic() < end:
                found = max(found, client.ping())
                time.sleep(0.002)
            return found

        yield longest
        assert client.get(KEYS).blocks == blocks_of(KEYS, BLOCK_BYTES)


WRONG = {
    "a number of 5000 digits": f"x = {'9' * 5000}",
    "a deep array": f"x = {'[' * 1000}",
    "a deep table": f"x = {'{y = ' * 1000}",
    "a long key": f"x{'.a' * 30_000} = 1",
    "no limit": "[tenants.a]\nrequests_per_s = nan",
    "a limit beyond all": f"[tenants.a]\nmemory = {10**26}",
    "empty": "",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_of_principals_costs_only_a_log_line(
    start_server: StartServer, file: Path, new_namespace: MakeNamespace, kind: str
) -> None:
    token = add(file, "one", "a", ["read", "write", "admin", "monitor"])
    good = file.read_text()
    server = start_server("--auth", str(file))
    with served(server, new_namespace, token=token):
        replace(file, f"{WRONG[kind]}\n{good}" if WRONG[kind] else "")
        wait_until(lambda: "the previous policy stays in force" in server.log_text(), what="it is refused")
        replace(file, good)
        second = add(file, "two", "a", ["read", "monitor"])
        wait_until(lambda: "2 principals is in force" in server.log_text(), what="the right file is in force")
        with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), token=second) as client:
            assert client.info().shards, "what the file limits can be told"


@pytest.mark.exclusive
def test_requests_are_answered_while_a_large_file_of_principals_is_read(
    start_server: StartServer, file: Path, new_namespace: MakeNamespace
) -> None:
    token = add(file, "one", "a", ["read", "write"])
    server = start_server("--auth", str(file))
    with served(server, new_namespace, token=token) as longest:
        good = file.read_text()
        kept = good.partition("tokens = ")[2].splitlines()[0]
        more = [
            f'[[principals]]\nname = "p{number}"\ntenant = "t{number}"\nverbs = ["read"]\ntokens = {kept}\n'
            for number in range(MANY)
        ]
        replace(file, good + "".join(more))
        took = longest(1.0)
        while f"a policy with {MANY + 1} principals is in force" not in server.log_text():
            took = max(took, longest(0.2))
        assert max(took, longest(0.5)) < PING_S


def test_an_audit_log_that_is_a_pipe_or_locked_delays_no_request(
    start_server: StartServer, file: Path, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    token = add(file, "one", "a", ["read", "write"])
    audit = tmp_path / "audit.jsonl"
    server = start_server("--auth", str(file), "--audit", str(audit))
    namespace = new_namespace(BLOCK_BYTES)

    def fail_to_log_in() -> None:
        with RawClient(server) as raw:
            wrong = pack(HELLO, 1, PROTOCOL, namespace.canonical(), "raw", b"kvs_one." + b"A" * 43)
            assert raw.ask(wrong)[0] == ERROR

    with served(server, new_namespace, token=token) as longest:
        with audit.open() as stranger:
            fcntl.flock(stranger, fcntl.LOCK_EX)
            audit.rename(tmp_path / "audit.1")
            fail_to_log_in()
            assert longest(0.2) < 2.0
        audit.unlink(missing_ok=True)
        os.mkfifo(audit)
        fail_to_log_in()
        assert longest(0.2) < 2.0
        wait_until(lambda: "cannot be written" in server.log_text(), what="it is told")
        audit.unlink()
        fail_to_log_in()
        wait_until(lambda: audit.exists() and "login_failed" in audit.read_text(), what="it is written again")


def test_a_certificate_that_is_a_pipe_is_refused_and_connections_continue(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("node")
    server = start_server("--tls-cert", issued.cert, "--tls-key", issued.key, "--http", "127.0.0.1:0")
    with served(server, new_namespace, tls_ca=authority.file) as longest:
        certificate = Path(issued.cert)
        good = certificate.read_bytes()
        certificate.unlink()
        os.mkfifo(certificate)
        wait_until(lambda: server.log_text().count("not a regular file") >= 2, what="both that use it say so")
        assert longest(0.2) < 2.0
        with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), tls_ca=authority.file) as another:
            assert another.set(KEYS, blocks_of(KEYS, BLOCK_BYTES)).created == len(KEYS)
        certificate.unlink()
        certificate.write_bytes(good)
        wait_until(lambda: "was read again" in server.log_text(), what="the right one is in use")


def fill(pipe: Path) -> None:
    """Write until nothing more fits."""
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.close(writer)


def test_an_unread_standard_error_stops_no_shard(tmp_path: Path, new_namespace: MakeNamespace) -> None:
    """Lines that do not fit into the pipe are omitted. When the pipe is read again, the log continues and says how many
    lines are missing."""
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    server = Server(log, "--log-format", "json")

    def strangers() -> None:
        for _ in range(10):
            with socket.create_connection((server.host, server.port), 10) as sock, contextlib.suppress(OSError):
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                sock.recv(1 << 16)

    try:
        with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client:
            client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
            fill(log)
            began = time.monotonic()
            strangers()
            assert client.get(KEYS).blocks == blocks_of(KEYS, BLOCK_BYTES)
            assert time.monotonic() - began < 10.0
            said = os.read(reader, 1 << 16)
            assert b"GET" not in said and b"no ZMTP greeting" not in said
            strangers()
            wait_until(lambda: select.select([reader], [], [], 0)[0], what="the log goes on")
            said = os.read(reader, 1 << 16)
            assert b"10 lines were left out here: standard error was not read" in said, said
    finally:
        server.kill()
        os.close(reader)


def test_a_token_file_that_is_a_pipe_is_an_immediate_error(tmp_path: Path, new_namespace: MakeNamespace) -> None:
    token = tmp_path / "token"
    os.mkfifo(token, 0o600)
    began = time.monotonic()
    with pytest.raises(ValueError, match="not a regular file"):
        KVStoreClient("tcp://127.0.0.1:1", new_namespace(BLOCK_BYTES), token=token, timeout_s=2.0, fail_open=True)
    assert time.monotonic() - began < 2.0
