"""A new client whose node's first shard does not answer: it finds the other shards, within a bounded time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, Namespace, NotAuthorized, Timeout
from tests.support import forked
from tests.support.certificates import Authority
from tests.support.faults import impostor
from tests.support.harness import Server, StartServer, blocks_of, environment, hung, make_keys, pack, wait_until
from tests.support.ports import free_ports

BLOCK = 65536  # the block size of the fixture `namespace`
BOUND_S = 1.5  # docs/python.md promises this
BUSY_S = 1.5  # what a busy machine may add
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + len(b"ROUTER").to_bytes(4, "big") + b"ROUTER"


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < BOUND_S + BUSY_S


def filled(server: Server, namespace: Namespace, **options: object) -> list[bytes]:
    """Set 200 blocks, whose keys are returned."""
    keys = make_keys(200)
    with KVStoreClient(server.endpoint, namespace, **options) as client:  # type: ignore[arg-type]
        assert client.set(keys, blocks_of(keys, BLOCK), deferred=False).created == 200
    return keys


def test_a_new_client_finds_the_other_shards_of_a_node_whose_first_one_hangs(
    start_server: StartServer, namespace: Namespace
) -> None:
    server = start_server("--shards", "2")
    keys = filled(server, namespace)
    with hung(server.shards()[0]):
        with bounded():
            client = KVStoreClient(server.endpoint, namespace, fail_open=True)
        with client:
            assert client.shard_count == 2
            with bounded():
                present = client.contains(keys)
            assert 50 < present.sum() < 150
            assert "it is shard 0 of 2, and another shard of the node answers" in str(client.why_unanswered())
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.contains(keys).all()


def test_a_client_that_found_the_other_shards_uses_the_first_one_when_it_is_back(
    start_server: StartServer, namespace: Namespace
) -> None:
    server = start_server("--shards", "2")
    keys = filled(server, namespace)
    with hung(server.shards()[0]):
        client = KVStoreClient(server.endpoint, namespace, fail_open=True)
    with client:
        wait_until(lambda: client.contains(keys).all(), what="all blocks are found")
        assert client.shard_count == 2


def test_a_client_that_must_not_miss_gets_an_error_that_names_the_shard(
    start_server: StartServer, namespace: Namespace
) -> None:
    server = start_server("--shards", "2")
    with hung(server.shards()[0]), pytest.raises(Timeout, match=r"it is shard 0 of 2, and another shard of the node"):
        KVStoreClient(server.endpoint, namespace, timeout_s=0.5)


def test_many_hung_nodes_delay_a_new_client_no_longer_than_one(namespace: Namespace) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [f"127.0.0.1:{stack.enter_context(impostor())}" for _ in range(20)]
        with bounded():
            client = stack.enter_context(KVStoreClient(nodes, namespace, fail_open=True))
        assert client.shard_count == 20
        with bounded():
            assert not client.contains(make_keys(4)).any()


def test_a_hung_node_does_not_hide_another(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with (
        impostor() as port,
        KVStoreClient([f"127.0.0.1:{port}", server.endpoint], namespace, fail_open=True) as client,
    ):
        keys = make_keys(40)
        with bounded():
            assert client.set(keys, blocks_of(keys, BLOCK), deferred=False).created > 0


def test_another_store_at_the_next_port_is_not_taken_for_a_shard_of_the_node(
    tmp_path: Path, namespace: Namespace
) -> None:
    port = free_ports(2)[0]
    first, second = (Server(tmp_path / f"log-{number}", "--memory", "64MiB", port=port + number) for number in (0, 1))
    try:
        keys = filled(second, namespace)
        with (
            hung(first.shards()[0]),
            KVStoreClient(first.endpoint, namespace, fail_open=True) as client,
        ):
            assert client.shard_count == 1
            assert not client.contains(keys).any()
    finally:
        first.kill()
        second.kill()


def test_a_program_at_the_next_port_gets_no_token_without_tls(namespace: Namespace) -> None:
    port = free_ports(2)[0]
    heard = bytearray()

    def listen() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionResetError):
            sock.sendall(GREETING + READY)
            while data := sock.recv(4096):
                heard.extend(data)

    with impostor(port=port), socket.create_server(("127.0.0.1", port + 1)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        with KVStoreClient(f"127.0.0.1:{port}", namespace, token="a-secret-token", fail_open=True):
            thread.join(10)
    assert b"READY" in heard and b"server" in heard, "it was asked"
    assert b"a-secret-token" not in heard


def test_with_tls_and_logins_the_other_shards_are_found_too(
    start_server: StartServer, tmp_path: Path, namespace: Namespace
) -> None:
    authority, file = Authority(tmp_path), tmp_path / "auth.toml"
    issued, token = authority.issue("server"), add(file, "chat", "chat", ["read", "write"])
    server = start_server(
        *("--shards", "2", "--auth", str(file), "--tls-cert", issued.cert, "--tls-key", issued.key),
    )
    keys = filled(server, namespace, token=token, tls_ca=authority.file)
    shards = [child for child in server.shards() if "shard" in " ".join(child.cmdline())] or server.shards()
    first = next(child for child in shards if any(each.laddr.port == server.port for each in child.net_connections()))
    with (
        hung(first),
        KVStoreClient(server.endpoint, namespace, token=token, tls_ca=authority.file, fail_open=True) as client,
    ):
        assert client.shard_count == 2
        assert 50 < client.contains(keys).sum() < 150


def test_a_purge_does_not_call_a_namespace_unknown_while_a_shard_is_silent(
    start_server: StartServer, namespace: Namespace
) -> None:
    server = start_server("--shards", "2")
    filled(server, namespace)
    with KVStoreClient(server.endpoint, namespace) as client:
        [*shards] = client.shards()
        with hung(server.shards()[0]):
            keys = [key for key in make_keys(200) if client.locate(key, ask=False)[0].shard != shards[0].name]
            client.delete(keys, timeout_s=2.0)
            done = forked.run(
                *("kvstore_cli", "purge", "--model", namespace.model, "--yes", "--timeout", "3"),
                *("--endpoint", server.endpoint),
                env=environment(),
            )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{shards[0].endpoint} did not answer and may" in done.stderr


def test_commands_say_which_shard_does_not_answer(start_server: StartServer) -> None:
    server = start_server("--shards", "2")

    def run(*arguments: str) -> tuple[str, str]:
        done = forked.run("kvstore_cli", *arguments, "--endpoint", server.endpoint, env=environment(COLUMNS="160"))
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout, done.stderr

    with hung(server.shards()[0]):
        for arguments in (("info",), ("top", "--once"), ("top", "--once", "--by", "shard"), ("cluster", "status")):
            shown, error = run(*arguments, "--timeout", "2")
            assert "1 of 2 shards did not answer" in error and "shard 0 of 2" in error, error
            assert "No shard answers" not in shown
        _, error = run("ping", "--timeout", "1")
        assert "it is shard 0 of 2, and another shard of the node answers" in error
        assert json.loads(run("info", "--json", "--timeout", "2")[0])["error"]["kind"] == "unreachable"


def test_a_slow_refusal_is_still_an_error(namespace: Namespace) -> None:
    """A server may take longer over a wrong token than a new client waits for a hung server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(GREETING + READY)
                while b"kvstore-client" not in sock.recv(4096):
                    pass
                refused.wait(1.5)  # longer than FAIL_OPEN_WAIT_S
                header = pack(127, 0, 7, "the token is not valid")
                sock.sendall(bytes([0, len(header)]) + header)
                sock.recv(1)

        refused = threading.Event()
        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(NotAuthorized, match="the token is not valid"):
            KVStoreClient(f"127.0.0.1:{listener.getsockname()[1]}", namespace, token="wrong", fail_open=True)
        thread.join()
