"""A client on the server's host: what it reads in the server's memory, and what the server copies from the client's
memory."""

from __future__ import annotations

import asyncio
import gc
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore import wire
from kvstore.node import unix_sockets
from kvstore_client import AsyncKVStoreClient, ConnectionLost, KVStoreClient, Namespace
from kvstore_client._links import going_local
from kvstore_client._links.link import Link
from kvstore_client.memory import host_memory
from tests.support.harness import (
    ERROR,
    PART,
    RELEASE,
    SET,
    SET_REPLY,
    SHARE_REPLY,
    TAKEN,
    MakeNamespace,
    Server,
    StartServer,
    block_of,
    blocks_of,
    environment,
    make_keys,
    namespace_info,
    pack,
    rss_bytes,
    shard_info,
    wait_until,
)
from tests.support.local import RawLocal, memfd

BLOCK = 256 << 10
SEGMENT = 4 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


@pytest.fixture
def local(start_server: StartServer, path: Path) -> Server:
    """A server with a Unix socket at `path`. It has 64 MiB, and lends 32 MiB in total and 16 MiB to each client."""
    return start_server("--unix-socket", str(path))


@pytest.fixture
def client(local: Server, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(local.endpoint, new_namespace(BLOCK), shared_memory=True) as client:
        yield client


def lent(client: KVStoreClient) -> int:
    return shard_info(client).lent_blocks


# ---- which way blocks take -----------------------------------------------------------------------------------------


def test_a_client_on_the_servers_host_uses_its_memory_automatically(local: Server, namespace: Namespace) -> None:
    with (
        KVStoreClient(local.endpoint, namespace) as auto,
        KVStoreClient(local.endpoint, namespace, shared_memory=False) as remote,
    ):
        assert (auto.stats.path, remote.stats.path) == ("shared memory", "tcp")
        keys = make_keys(3)
        assert auto.set(keys[:2], blocks_of(keys[:2], namespace.block_bytes)).created == 2
        assert remote.get(keys).blocks == [*blocks_of(keys[:2], namespace.block_bytes), None]


def test_a_client_that_requires_shared_memory_learns_why_it_is_missing(
    start_server: StartServer, namespace: Namespace, path: Path
) -> None:
    server = start_server()
    with pytest.raises(ConnectionLost, match="shared_memory=True, but the server has no Unix socket"):
        KVStoreClient(server.endpoint, namespace, shared_memory=True)
    server = start_server("--unix-socket", str(path))
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(ConnectionLost, match=f"{path} is not on this host"):
        KVStoreClient(server.endpoint, namespace, shared_memory=True)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.stats.path == "tcp"
    with pytest.raises(ValueError, match="shared_memory='yes'"):
        KVStoreClient(server.endpoint, namespace, shared_memory="yes")  # type: ignore[arg-type]


def test_another_server_on_the_path_is_not_mistaken_for_the_right_one(
    local: Server, start_server: StartServer, path: Path, namespace: Namespace
) -> None:
    other = start_server("--unix-socket", str(path.with_name("other.sock")))
    path.unlink()
    path.with_name("other.sock").rename(path)
    with KVStoreClient(local.endpoint, namespace) as client:
        assert client.stats.path == "tcp" and client.info().shards[0].pid != other.shards()[0].pid
    with pytest.raises(ConnectionLost, match="another server listens"):
        KVStoreClient(local.endpoint, namespace, shared_memory=True)


def test_a_member_whose_socket_path_belongs_to_another_uses_tcp(
    local: Server, start_server: StartServer, path: Path, namespace: Namespace
) -> None:
    start_server("--unix-socket", str(path.with_name("other.sock")))
    path.unlink()
    path.with_name("other.sock").rename(path)  # as on two hosts with the same settings
    with KVStoreClient(local.endpoint, namespace, shared_memory=False) as client:
        name = client.info().shards[0].name
    hello = wire.Hello(0, wire.PROTOCOL_VERSION, namespace.canonical())
    link = Link(name, local.host, local.port, lambda: hello, lambda: None)
    link.fixed_name = True
    link.connect(5.0)
    assert link.path == "tcp"
    link.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_every_shard_of_a_node_has_a_socket(
    shards: int, start_server: StartServer, path: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server("--shards", str(shards), "--unix-socket", str(path), memory=f"{shards * 32}MiB")
    assert sorted(each.name for each in path.parent.glob("kv.sock*")) == sorted(
        ["kv.sock", *(f"kv.sock.{shard}" for shard in range(1, shards))]
    )
    keys, namespace = make_keys(60), new_namespace(4096)
    with KVStoreClient(server.endpoint, namespace, shared_memory=True) as client:
        assert client.set(keys, blocks_of(keys, 4096)).created == 60
        assert client.get(keys).blocks == blocks_of(keys, 4096)
        assert all(link.local for link in client._pool.links)
    server.stop()
    assert not list(path.parent.glob("kv.sock*"))


def test_the_default_socket_folder_is_accessible_only_to_the_servers_user(
    start_server: StartServer, tmp_path: Path, namespace: Namespace
) -> None:
    server = start_server("--unix-socket", "", XDG_RUNTIME_DIR=str(tmp_path))
    (found,) = (tmp_path / "kvstore").iterdir()
    assert found.name == f"127.0.0.1_{server.port}.sock" and (tmp_path / "kvstore").stat().st_mode & 0o777 == 0o700
    server.kill()  # a killed server leaves its socket, which the next server on the same port replaces
    server.restart()
    with KVStoreClient(server.endpoint, namespace, shared_memory=True) as client:
        assert client.stats.path == "shared memory"


def test_a_server_removes_old_sockets_of_killed_servers_and_no_others(
    start_server: StartServer, tmp_path: Path
) -> None:
    running = start_server("--unix-socket", "", XDG_RUNTIME_DIR=str(tmp_path))
    folder = tmp_path / "kvstore"

    def leave(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(folder / name))

    (folder / "a.sock.txt").write_text("no socket")
    leave("old.sock")
    leave("old.sock.1")
    wait_until(lambda: time.time() - (folder / "old.sock.1").lstat().st_ctime > 0.5, what="the sockets are old")
    leave("new.sock")  # perhaps of a server that does not listen yet
    unix_sockets._sweep(folder, older_s=0.4)
    left = {each.name for each in folder.iterdir()}
    assert left == {f"127.0.0.1_{running.port}.sock", "new.sock", "a.sock.txt"}


def test_an_impossible_socket_stops_only_a_server_that_requested_it(
    start_server: StartServer, tmp_path: Path, local: Server, path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for wrong, reason in (("file", "but is not a socket"), ("no/folder", "No such file"), ("kv.sock", "another")):
        with pytest.raises(AssertionError, match=reason):
            start_server("--unix-socket", str(tmp_path / wrong))
    with pytest.raises(AssertionError, match="expected at most 107"):
        start_server("--unix-socket", str(tmp_path / ("x" * 107)))
    (tmp_path / "kvstore").write_text("")
    server = start_server("--unix-socket", "", XDG_RUNTIME_DIR=str(tmp_path))
    assert "they use TCP" in server.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_only_named_users_may_connect(start_server: StartServer, tmp_path: Path, namespace: Namespace) -> None:
    os.chmod(tmp_path, 0o755)
    for parent in list(tmp_path.parents)[:3]:
        if parent != Path("/tmp") and os.stat(parent).st_uid == os.getuid():
            os.chmod(parent, 0o755)
    script = textwrap.dedent(
        """
        import os, socket, sys
        os.setgid(65534); os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(sys.argv[1])
            print(len(sock.recv(64)))
        except OSError as error:
            print(error.strerror)
        """
    )

    def as_nobody(path: Path) -> str:
        done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    mine, all_of_us = tmp_path / "mine.sock", tmp_path / "ours.sock"
    start_server("--unix-socket", str(mine))
    assert as_nobody(mine) == "Permission denied"
    os.chmod(mine, 0o666)
    refusing = start_server("--unix-socket", str(tmp_path / "2.sock"))
    os.chmod(tmp_path / "2.sock", 0o666)
    assert as_nobody(tmp_path / "2.sock") == "0"  # closed, because of the user that the kernel reports
    assert "of user 65534 connected to the Unix socket and was refused" in refusing.log.read_text()
    start_server("--unix-socket", str(all_of_us), "--unix-users", "nobody")
    assert as_nobody(all_of_us) == "64"
    with pytest.raises(AssertionError, match="there is no user 'nobody-else'"):
        start_server("--unix-socket", str(tmp_path / "3.sock"), "--unix-users", "nobody-else")


def test_a_client_without_shared_memory_gets_the_reason_in_one_line(
    start_server: StartServer, path: Path, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for any number of shards, clients and connections. It has none if the server has no socket,
    or the client does not want shared memory."""
    caplog.set_level("INFO", "kvstore_client")

    def said() -> list[tuple[str, str]]:
        return [(each.levelname, each.getMessage()) for each in caplog.records if "shared memory" in each.getMessage()]

    server = start_server("--unix-socket", str(path), "--shards", "3", memory="96MiB")
    hidden = path.with_name("hidden")
    hidden.mkdir()
    for each in path.parent.glob("kv.sock*"):
        each.rename(hidden / each.name)
    for _ in range(2):
        with KVStoreClient(server.endpoint, namespace) as client:
            assert client.stats.path == "tcp" and len(client.shards()) == 3
    ((level, line),) = said()
    assert level == "INFO" and re.search(
        r"^127\.0\.0\.1:\d+: blocks travel over TCP, not in shared memory: its Unix socket "
        rf"{path}(\.\d)? is not on this host, or not mounted in this container$",
        line,
    )
    caplog.clear()
    with KVStoreClient(server.endpoint, namespace, shared_memory=False) as client:
        assert client.stats.path == "tcp"
    with KVStoreClient(start_server("--shards", "2").endpoint, namespace) as client:
        assert client.stats.path == "tcp" and not said()
    for each in hidden.iterdir():
        each.rename(path.with_name(each.name))
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.stats.path == "shared memory" and not said()


@pytest.mark.parametrize(
    ("owner", "mode", "place", "why"),
    [
        (65534, 0o711, "run/kv", ""),
        (
            65534,
            0o711,
            "elsewhere/kv",
            "user 65534 listens there, which may be any user: run the server as user {me} or",
        ),
        (
            65534,
            0o757,
            "run/kv",
            "user 65534 listens there, and every user may write to {folder}, so it may be any process",
        ),
        (1, 0o711, "run/kv", "user 65534 listens there, which may be any user"),
    ],
    ids=["its-own-folder-of-run", "another-folder", "everybody-may-write", "somebody-elses-folder"],
)
def test_a_client_trusts_the_servers_that_the_manual_names(
    owner: int, mode: int, place: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give folders away")
    monkeypatch.setattr(going_local, "RUN", tmp_path / "run")
    (folder := tmp_path / place).mkdir(parents=True)
    os.chown(folder, owner, owner)
    folder.chmod(mode)
    if not why:
        going_local._distrust(str(folder / "kv.sock"), 65534)
        return
    with pytest.raises(OSError, match=re.escape(why.format(me=os.getuid(), folder=folder))):
        going_local._distrust(str(folder / "kv.sock"), 65534)
    going_local._distrust(str(folder / "kv.sock"), 0)


# ---- right bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 1000, 4096, 16 << 10, 917_504, 3 << 20])
@pytest.mark.parametrize("source", ["array", "buffers", "host memory", "rows with gaps"])
def test_blocks_of_any_size_are_read_from_any_memory(
    block_bytes: int, source: str, local: Server, new_namespace: MakeNamespace
) -> None:
    count = max(2, min(300, (12 << 20) // block_bytes))
    keys = make_keys(count)
    expected = np.frombuffer(b"".join(blocks_of(keys, block_bytes)), dtype=np.uint8).reshape(count, block_bytes)
    blocks: object = expected
    if source == "buffers":
        blocks = [row.tobytes() for row in expected]
    elif source == "host memory":
        blocks = host_memory(count, block_bytes)
        blocks[:] = expected
    elif source == "rows with gaps":
        wide = np.zeros((count, block_bytes + 7), dtype=np.uint8)
        blocks = wide[:, :block_bytes]
        blocks[:] = expected
    with KVStoreClient(local.endpoint, new_namespace(block_bytes), shared_memory=True) as client:
        assert client.set(keys, blocks).created == count
        out = np.zeros((count + 1, block_bytes), dtype=np.uint8)
        slots = list(range(count, 0, -1))
        assert client.get_into(keys, out, slots).all()
        assert (out[slots] == expected).all() and not out[0].any()
        assert client.load_prefix(keys, out) == count and (out[:count] == expected).all()
        assert {at: bytes(block) for at, block in client.stream_get(keys)} == dict(enumerate(map(bytes, expected)))
        with client.borrow(keys, verify=True) as borrowed:
            assert [bytes(block) for block in borrowed if block is not None] == list(map(bytes, expected))
        assert lent(client) == 0


def test_host_memory_is_read_in_place_and_other_memory_through_the_ring(client: KVStoreClient) -> None:
    keys = make_keys(20)
    rows = host_memory(20, BLOCK)
    rows[:] = np.frombuffer(b"".join(blocks_of(keys, BLOCK)), dtype=np.uint8).reshape(20, BLOCK)
    assert client.set(keys[:10], rows[:10]).created == 10
    (link,) = client._pool.links
    assert link.staging is not None and link.staging.ring is None
    assert client.set(keys[10:], np.array(rows[10:])).created == 10
    assert link.staging.ring is not None and len(link.staging.shared) == 2
    assert client.get(keys).blocks == blocks_of(keys, BLOCK)


def test_a_set_may_combine_several_kinds_of_memory(client: KVStoreClient) -> None:
    keys, rows, others = make_keys(5), host_memory(2, BLOCK), host_memory(1, BLOCK)
    wanted = blocks_of(keys, BLOCK)
    rows[0], rows[1], others[0] = (np.frombuffer(wanted[at], dtype=np.uint8) for at in (0, 4, 2))
    assert client.set(keys, [rows[0], wanted[1], others[0], wanted[3], rows[1]]).created == 5
    assert client.get(keys).blocks == wanted and client.stats.reconnects == 0


def test_many_threads_set_and_read_concurrently(client: KVStoreClient) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(number: int) -> bool:
        keys = make_keys(8, first=100 * number)
        out = np.zeros((8, BLOCK), dtype=np.uint8)
        for turn in range(5):
            client.set(keys, blocks_of(keys, BLOCK, turn), force=True)
            with client.borrow(keys) as blocks:
                pairs = zip(keys, blocks, strict=True)
                if any(block is not None and bytes(block) != block_of(key, BLOCK, turn) for key, block in pairs):
                    return False
            present = client.get_into(keys, out)
            for at in np.flatnonzero(present).tolist():
                if out[at].tobytes() != block_of(keys[at], BLOCK, turn):
                    return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    wait_until(lambda: lent(client) == 0)


def test_a_read_beyond_the_lending_limit_is_done_in_turns(client: KVStoreClient) -> None:
    keys = make_keys(200)  # 50 MiB of the server's 64
    for at in range(0, 200, 50):
        client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
    out = np.zeros((200, BLOCK), dtype=np.uint8)
    assert client.get_into(keys, out).all()
    assert [row.tobytes() for row in out] == blocks_of(keys, BLOCK)
    assert sum(1 for _ in client.stream_get(keys)) == 200


def test_a_child_process_connects_separately(client: KVStoreClient) -> None:
    keys = make_keys(4)
    client.set(keys, blocks_of(keys, BLOCK))

    def child() -> None:
        right = client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "shared memory"
        client.set(make_keys(1, first=9), blocks_of(make_keys(1, first=9), BLOCK))
        os._exit(0 if right else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert client.get(keys).hit == 4 and client.get(make_keys(1, first=9)).hit == 1


def test_the_asynchronous_client_borrows_too(local: Server, namespace: Namespace) -> None:
    keys, size = make_keys(3), namespace.block_bytes

    async def borrow() -> None:
        async with AsyncKVStoreClient(local.endpoint, namespace, shared_memory=True) as client:
            await client.set(keys[:2], blocks_of(keys[:2], size))
            async with client.borrow(keys) as blocks:
                assert [block and bytes(block) for block in blocks] == [*blocks_of(keys[:2], size), None]

    asyncio.run(borrow())


# ---- leases --------------------------------------------------------------------------------------------------------


def test_borrowed_blocks_are_read_only_views_until_the_with_body_ends(client: KVStoreClient) -> None:
    keys = make_keys(3)
    client.set(keys[:2], blocks_of(keys[:2], BLOCK))
    with client.borrow([*keys, keys[0]]) as blocks:
        assert [block and bytes(block) for block in blocks] == [
            *blocks_of(keys[:2], BLOCK),
            None,
            block_of(keys[0], BLOCK),
        ]
        view = blocks[0]
        assert view is not None and view.readonly and lent(client) == 2
        with pytest.raises(TypeError):
            view[0] = 1
    assert blocks == [None] * 4 and view.tobytes() == block_of(keys[0], BLOCK)  # a view keeps its block
    assert lent(client) == 2
    del view
    wait_until(lambda: lent(client) == 0)
    assert (client.stats.hits, client.stats.misses) == (3, 1)
    with client.borrow([]) as blocks:
        assert blocks == []


def test_an_array_of_a_borrowed_block_keeps_it(client: KVStoreClient) -> None:
    keys = make_keys(2)
    client.set(keys, blocks_of(keys, BLOCK))
    with client.borrow(keys) as blocks:
        kept = np.frombuffer(blocks[0] or b"", dtype=np.uint8)[1000:2000]
    del blocks
    client.delete(keys)
    for at in range(0, 300, 50):  # more than fits, so every free slot is used
        more = make_keys(50, first=1000 + at)
        client.set(more, blocks_of(more, BLOCK))
    assert lent(client) == 2 and kept.tobytes() == block_of(keys[0], BLOCK)[1000:2000]
    del kept
    gc.collect()
    wait_until(lambda: lent(client) == 0)


def test_a_tensor_of_a_borrowed_block_keeps_it(client: KVStoreClient) -> None:
    torch = pytest.importorskip("torch")
    keys = make_keys(2)
    client.set(keys, blocks_of(keys, BLOCK))
    with client.borrow(keys) as blocks, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has no read-only tensors
        tensor = torch.frombuffer(blocks[0], dtype=torch.uint8)
    fill(client)
    assert lent(client) == 2 and tensor.numpy().tobytes() == block_of(keys[0], BLOCK)
    del tensor
    wait_until(lambda: lent(client) == 0)


def fill(client: KVStoreClient, count: int = 300) -> None:
    """Set more blocks than fit into memory, so that every free slot is used."""
    for at in range(0, count, 50):
        more = make_keys(50, first=1000 + at)
        client.set(more, blocks_of(more, BLOCK))


def test_a_borrow_keeps_the_blocks_it_got_by_its_deadline(local: Server, path: Path, client: KVStoreClient) -> None:
    keys = make_keys(6)
    client.set(keys[:5], blocks_of(keys[:5], BLOCK))
    with RawLocal(path) as raw:
        raw.hello(client.namespace.canonical())
        raw.send(pack(SET, 1, 30_000, 1, 16), keys[5], more=True)  # this block is never finished
        wait_until(lambda: namespace_info(client).writing == 1)
        with (
            KVStoreClient(local.endpoint, client.namespace, shared_memory=True, fail_open=True) as other,
            other.borrow(keys, timeout_s=0.3) as blocks,
        ):
            found = [block for block in blocks if block is not None]
            client.delete(keys[:5])
            fill(client)
            assert [bytes(block) for block in found] == blocks_of(keys[: len(found)], BLOCK)
            assert lent(client) == len(found)
            del found
    wait_until(lambda: lent(client) == 0)


def test_a_client_that_holds_loans_can_still_read(client: KVStoreClient) -> None:
    """The loans use the client's whole limit, so the server sends it other blocks, and no call waits."""
    keys = make_keys(150)
    for at in range(0, 150, 50):
        client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
    out = np.zeros((50, BLOCK), dtype=np.uint8)
    with client.borrow(keys[:60]) as blocks:
        assert sum(block is not None for block in blocks) == 60
        assert client.get_into(keys[100:], out, timeout_s=5.0).all()
        with client.borrow(keys[100:]) as more:
            assert [bytes(block) for block in more if block is not None] == blocks_of(keys[100:], BLOCK)
    assert [row.tobytes() for row in out] == blocks_of(keys[100:], BLOCK)


def test_a_slow_stream_reader_gets_all_blocks(client: KVStoreClient) -> None:
    keys = make_keys(150)
    for at in range(0, 150, 50):
        client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
    seen = 0
    timeout_s, began = 1.5, time.monotonic()
    for position, block in client.stream_get(keys, timeout_s=timeout_s):
        assert bytes(block[:100]) == block_of(keys[position], BLOCK)[:100]
        seen += 1
        time.sleep(1.3 * timeout_s / len(keys))
    assert seen == 150 and time.monotonic() - began > timeout_s


def test_a_release_during_another_threads_send_follows_it(client: KVStoreClient) -> None:
    keys = make_keys(8)
    client.set(keys, blocks_of(keys, BLOCK))
    (link,) = client._pool.links
    someone = object()
    with client.borrow(keys) as blocks:
        assert all(block is not None for block in blocks)
        assert link.sending.take(someone, 1.0)
        began = time.monotonic()
    assert time.monotonic() - began < 0.2
    link.sending.owner = None
    link.sending.wake()
    wait_until(lambda: lent(client) == 0)


def test_a_connection_that_ended_with_loans_does_not_harm_the_next(
    local: Server, path: Path, client: KVStoreClient
) -> None:
    keys = make_keys(4)
    client.set(keys, blocks_of(keys, BLOCK))
    with local.unharmed(), RawLocal(path) as raw:
        raw.hello(client.namespace.canonical())
        raw.get(1, keys)
        raw.all_lent()
        raw.sock.sendall(struct.pack(">BQ", 0x82, 1))  # no ZMTP: the server closes
        assert raw.closed()
        client.close()
        for _ in range(3):
            RawLocal(path).close()
    with local.unharmed():
        for _ in range(3):
            RawLocal(path).close()
    with KVStoreClient(local.endpoint, client.namespace, shared_memory=True) as again:
        wait_until(lambda: lent(again) == 0)


@pytest.mark.parametrize("end", ["delete", "purge", "force", "eviction"])
def test_a_lent_block_is_not_overwritten(end: str, client: KVStoreClient, local: Server) -> None:
    keys = make_keys(8)
    client.set(keys, blocks_of(keys, BLOCK))
    with client.borrow(keys) as blocks:
        if end == "delete":
            assert client.delete(keys) == 8
        elif end == "purge":
            assert client.purge() == 8
        elif end == "force":
            assert client.set(keys, blocks_of(keys, BLOCK, 1), force=True).forced == 8
        with KVStoreClient(local.endpoint, client.namespace, shared_memory=False) as other:
            for at in range(0, 300, 50):
                more = make_keys(50, first=1000 + at)
                other.set(more, blocks_of(more, BLOCK))
        assert [bytes(block) for block in blocks if block is not None] == blocks_of(keys, BLOCK)
    wait_until(lambda: lent(client) == 0)


def test_a_client_that_keeps_its_loans_takes_nothing_from_others(
    local: Server, path: Path, client: KVStoreClient
) -> None:
    """A client that never releases anything gets loans of a quarter of the memory; then its GETs wait until their
    deadline. Other clients still get loans. When everything is lent, the server sends them blocks instead."""
    keys = make_keys(200)
    for at in range(0, 200, 50):
        client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
    holders = [RawLocal(path) for _ in range(6)]
    for number, raw in enumerate(holders):
        raw.hello(client.namespace.canonical())
        raw.get(1, keys, deadline_ms=400)
        found = raw.all_lent()
        assert len(found) == (64 if number == 0 else len(found)) and len(found) <= 64
        assert all(raw.bytes_at(place, BLOCK) == block_of(keys[at], BLOCK) for at, place in list(found.items())[:2])
    assert 120 <= lent(client) <= 128
    out = np.zeros((200, BLOCK), dtype=np.uint8)
    assert client.get_into(keys, out).all() and [row.tobytes() for row in out] == blocks_of(keys, BLOCK)
    more = make_keys(300, first=1000)
    for at in range(0, 300, 50):
        assert client.set(more[at : at + 50], blocks_of(more[at : at + 50], BLOCK)).created == 50
    holders[0].send(pack(RELEASE, 1, 10))
    wait_until(lambda: lent(client) <= 118)
    for raw in holders:
        raw.close()
    wait_until(lambda: lent(client) == 0)


def test_a_get_waiting_for_lent_memory_continues_when_it_is_released(
    local: Server, path: Path, client: KVStoreClient
) -> None:
    keys = make_keys(100)
    client.set(keys[:50], blocks_of(keys[:50], BLOCK))
    client.set(keys[50:], blocks_of(keys[50:], BLOCK))
    with RawLocal(path) as raw:
        raw.hello(client.namespace.canonical())
        raw.get(5, keys)
        found, last = raw.lent()
        assert len(found) == 64 and not last
        raw.send(pack(RELEASE, 5, 20))
        more, last = raw.lent()
        assert 0 < len(more) <= 20 and not last and not set(more) & set(found)
        raw.send(pack(RELEASE, 5, 0))
        rest, last = raw.lent()
        assert last and len(found) + len(more) + len(rest) == 100


def test_a_killed_client_leaves_nothing_lent(local: Server, client: KVStoreClient, namespace: Namespace) -> None:
    keys = make_keys(16)
    client.set(keys, blocks_of(keys, BLOCK))
    script = textwrap.dedent(
        """
        import pickle, sys, time
        from kvstore_client import KVStoreClient
        namespace, endpoint, keys = pickle.loads(bytes.fromhex(sys.argv[1]))
        with KVStoreClient(endpoint, namespace, shared_memory=True) as client, client.borrow(keys) as blocks:
            print(sum(block is not None for block in blocks), flush=True)
            time.sleep(60)
        """
    )
    given = pickle.dumps((client.namespace, local.endpoint, keys)).hex()
    holder = subprocess.Popen(
        [sys.executable, "-c", script, given], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "16\n"
        assert lent(client) == 16
        os.kill(holder.pid, signal.SIGSTOP)
        client.delete(keys)
        assert lent(client) == 16
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    wait_until(lambda: lent(client) == 0)


def test_loans_of_a_closed_connection_last_until_the_client_closes_too(
    local: Server, path: Path, client: KVStoreClient
) -> None:
    keys = make_keys(8)
    client.set(keys, blocks_of(keys, BLOCK))
    with RawLocal(path) as raw:
        raw.hello(client.namespace.canonical())
        raw.get(1, keys)
        found = raw.all_lent()
        raw.sock.sendall(b"\x02" + bytes(7) + b"\x01" + b"\xff" * 300)  # an invalid message, which ends the connection
        raw.sock.sendall(struct.pack(">BQ", 0x82, 1))
        assert raw.closed()
        wait_until(lambda: shard_info(client).connections == 1, what="only this client's connection is left")
        client.purge()
        for at in range(0, 300, 50):
            more = make_keys(50, first=1000 + at)
            client.set(more, blocks_of(more, BLOCK))
        assert lent(client) == 8
        assert [raw.bytes_at(found[at], BLOCK) for at in range(8)] == blocks_of(keys, BLOCK)
    wait_until(lambda: lent(client) == 0)


def test_borrowed_memory_outlives_the_server(local: Server, client: KVStoreClient) -> None:
    keys = make_keys(8)
    client.set(keys, blocks_of(keys, BLOCK))
    with client.borrow(keys) as blocks:
        local.kill()
        local.restart()
        assert [bytes(block) for block in blocks if block is not None] == blocks_of(keys, BLOCK)
        client.set(keys, blocks_of(keys, BLOCK, 1), timeout_s=5)
        assert [bytes(block) for block in blocks if block is not None] == blocks_of(keys, BLOCK)
    assert client.get(keys).blocks == blocks_of(keys, BLOCK, 1) and client.stats.path == "shared memory"
    wait_until(lambda: lent(client) == 0)


# ---- what a client can see -----------------------------------------------------------------------------------------


def test_a_client_gets_only_its_namespaces_memory_and_cannot_write(
    path: Path, client: KVStoreClient, local: Server, new_namespace: MakeNamespace
) -> None:
    other_namespace = new_namespace(BLOCK)
    keys = make_keys(8)
    client.set(keys, blocks_of(keys, BLOCK))
    with (
        KVStoreClient(local.endpoint, other_namespace) as other,
        RawLocal(path) as mine,
        RawLocal(path) as theirs,
    ):
        other.set(keys, blocks_of(keys, BLOCK, 1))
        for raw, namespace in ((mine, client.namespace), (theirs, other_namespace)):
            raw.hello(namespace.canonical())
            raw.get(1, keys)
            found = raw.all_lent()
            assert len(found) == 8
            everything = b"".join(
                raw.bytes_at((number, 0), os.fstat(descriptor).st_size) for number, descriptor in raw.files.items()
            )
            version = 0 if raw is mine else 1
            assert block_of(keys[0], BLOCK, version) in everything
            assert block_of(keys[0], BLOCK, 1 - version) not in everything
        assert not set(mine.files) & set(theirs.files)
        for descriptor in mine.files.values():
            for change in (
                lambda fd: os.pwrite(fd, b"x", 0),
                lambda fd: os.ftruncate(fd, 0),
                lambda fd: mmap.mmap(fd, SEGMENT),
                lambda fd: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), SEGMENT),
            ):
                with pytest.raises(OSError):
                    change(descriptor)


@pytest.mark.parametrize("seen_before", [False, True])
def test_another_namespaces_leftover_bytes_are_not_visible(
    seen_before: bool, path: Path, local: Server, new_namespace: MakeNamespace
) -> None:
    """All memory belonged to another namespace before. In one case, that was before the first client on this host
    connected."""
    theirs, mine, keys = new_namespace(BLOCK), new_namespace(BLOCK), make_keys(240)
    secret = b"\xa5" * BLOCK
    if seen_before:
        RawLocal(path).close()
    with KVStoreClient(local.endpoint, theirs, shared_memory=False) as other:
        for at in range(0, 240, 40):
            other.set(keys[at : at + 40], [secret] * 40)
        other.purge()
    with KVStoreClient(local.endpoint, mine, shared_memory=False) as client, RawLocal(path) as raw:
        raw.hello(mine.canonical())
        some = keys[:70]  # the last segment is not filled
        assert client.set(some, [bytes(BLOCK)] * 70).created == 70
        raw.get(1, some[60:], deadline_ms=1000)
        raw.all_lent()
        assert raw.files or not seen_before  # memory that was used before a local client came is not lent
        for number, descriptor in raw.files.items():
            assert secret[:64] not in raw.bytes_at((number, 0), os.fstat(descriptor).st_size)


def test_memory_that_changes_its_namespace_becomes_another_file(
    path: Path, client: KVStoreClient, local: Server, new_namespace: MakeNamespace
) -> None:
    """When a namespace takes a segment from another one, the segment gets a new file. Processes that mapped the old
    file see no later bytes, and the old file has no memory any more."""
    keys = make_keys(150)
    for at in range(0, 150, 50):
        client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
    with RawLocal(path) as raw, KVStoreClient(local.endpoint, new_namespace(BLOCK)) as other:
        raw.hello(client.namespace.canonical())
        raw.get(1, keys, deadline_ms=500)
        raw.all_lent()
        raw.send(pack(RELEASE, 1, 0))
        wait_until(lambda: lent(client) == 0)
        files = len(raw.files)
        assert files >= 3
        for at in range(0, 300, 50):
            more = make_keys(50, first=1000 + at)
            assert other.set(more, blocks_of(more, BLOCK)).created == 50
        raw.get(2, keys, deadline_ms=500)
        raw.all_lent()
        assert len(raw.retired) >= files - 1
        assert all(os.fstat(raw.files[number]).st_size == 0 for number in raw.retired)
        assert rss_bytes(local.shards()[0].pid) < (64 << 20) + (256 << 20)
        assert other.get(make_keys(50, first=1250)).blocks == blocks_of(make_keys(50, first=1250), BLOCK)


# ---- what a client can make the server read ------------------------------------------------------------------------


def entries(*blocks: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<QQQ", *block) for block in blocks)


def test_a_file_must_be_sealed_and_of_the_stated_size(path: Path, local: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    plain = os.open(tmp_path / "file", os.O_RDWR)
    sealed, unsealed, reader = memfd(4096), memfd(4096, 0), os.pipe()
    with local.unharmed(), RawLocal(path) as raw:
        raw.hello()
        for number, (descriptors, nbytes, reason) in enumerate(
            [
                ([], 4096, "without a descriptor"),
                ([plain], 4096, "cannot be used|seals"),
                ([reader[0]], 4096, "cannot be used|seals"),
                ([unsealed], 4096, "sealed against shrinking"),
                ([sealed], 8192, "8192 bytes, sealed"),
            ]
        ):
            fields = raw.share(number, 1, nbytes, *descriptors)
            assert fields[0] == ERROR and any(part in fields[3] for part in reason.split("|")), fields
        assert raw.share(10, 1, 4096, sealed) == [SHARE_REPLY, 10]
        assert raw.share(11, 1, 4096, sealed)[0] == ERROR  # the number is in use
        for number in range(2, 17):
            assert raw.share(number, number, 4096, sealed) == [SHARE_REPLY, number]
        assert "16 files at most" in raw.share(17, 17, 4096, sealed)[3]
    for descriptor in (plain, sealed, unsealed, *reader):
        os.close(descriptor)


def test_a_set_by_reference_is_stored_only_if_its_blocks_are_unchanged(
    path: Path, local: Server, new_namespace: MakeNamespace
) -> None:
    namespace, keys = new_namespace(4096), make_keys(4)
    blocks = blocks_of(keys, 4096)
    sums = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    shared = memfd(16 << 10)
    os.pwrite(shared, b"".join(blocks), 0)
    with local.unharmed(), RawLocal(path) as raw, KVStoreClient(local.endpoint, namespace) as client:
        raw.hello(namespace.canonical())
        raw.share(1, 7, 16 << 10, shared)

        def header(request_id: int, count: int) -> bytes:
            return pack(SET, request_id, 500, count, 16, *(False, 0, False, 0.0, False, b"", b"", 0, b"", 0, b"", True))

        good = [(7, 4096 * at, sums[at]) for at in range(4)]
        wrong = {
            "does not|do not match": entries(*good[:3], (7, 4096 * 3, sums[3] ^ 1)),
            "outside its piece of memory": entries(*good[:3], (7, 4096 * 3 + 1, sums[3])),
            "not shared": entries(*good[:3], (8, 4096 * 3, sums[3])),
            "at most": entries(*good, good[0]),
            "24 bytes for each": entries(*good)[:-1],
            "ends after 3 of 4": entries(*good[:3]),
        }
        for request_id, (reason, frame) in enumerate(wrong.items(), start=2):
            fields = raw.ask(header(request_id, 4), b"".join(keys), frame)
            assert fields[:2] == [ERROR, request_id] and any(part in fields[3] for part in reason.split("|")), fields
            assert not client.contains(keys).any()
        raw.send(header(20, 4), b"".join(keys), entries(*good[:1]), entries(*good[1:]))
        assert raw.reply()[0] == [TAKEN, 20, 1]
        assert raw.reply()[0][:4] == [SET_REPLY, 20, 4, 4]
        assert client.get(keys).blocks == blocks
        raw.send(header(21, 2), b"".join(make_keys(2, first=50)), entries(good[0]), more=True)
        assert raw.closed()  # its deadline has passed
        assert namespace_info(client).writing == 0 and namespace_info(client).blocks == 4
    os.close(shared)


def test_over_tcp_nothing_is_lent_or_shared(server: Server, new_namespace: MakeNamespace) -> None:
    from tests.support.harness import GET, SHARE, RawClient

    namespace, keys = new_namespace(64), make_keys(2)
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        client.set(keys, blocks_of(keys, 64))
        raw.hello(namespace.canonical())
        raw.send(pack(GET, 1, 1000, 2, 16, 0, True, False, False, True), b"".join(keys))
        fields, frames = raw.reply()
        assert fields[0] == PART and fields[9] == b"" and len(frames[0]) == 128
        assert "Unix socket only" in raw.ask(pack(SHARE, 2, 1, 4096))[3]
        assert "expected 0" in raw.ask(pack(GET, 3, 1000, 2, 16, 100, True, False, False, True), b"".join(keys))[3]


def test_memory_shared_by_clients_soon_stops_counting_as_the_servers(local: Server, client: KVStoreClient) -> None:
    keys = make_keys(800)
    rows = host_memory(800, BLOCK)  # 200 MiB, for a server of 64 MiB
    rows[:] = 7
    (shard,) = local.shards()
    before = rss_bytes(shard.pid)
    for at in range(0, 800, 50):
        rows[at : at + 50, 0] = at % 251
        client.set(keys[at : at + 50], rows[at : at + 50])
    assert rss_bytes(shard.pid) < before + (64 << 20) + (48 << 20)


def test_unrequested_descriptors_are_closed_and_end_the_connection(path: Path, local: Server) -> None:
    (shard,) = local.shards()
    before = shard.num_fds()
    with socket.socket() as other:
        for _ in range(20):
            with RawLocal(path) as raw:
                raw.hello()
                socket.send_fds(raw.sock, [b"\x04\x09\x04PING\0\0ab"], [other.fileno()])
                assert raw.read_frame() == (4, b"\x04PONGab")
                socket.send_fds(raw.sock, [b"\x04\x09\x04PING\0\0ab"], [other.fileno()] * 20)
                assert raw.closed()
    wait_until(lambda: shard.num_fds() <= before)
