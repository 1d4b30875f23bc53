"""Files that local clients share with a server cost it neither memory nor descriptors; an impostor's socket gets no
token."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.shard import client_files
from kvstore.wire.remote_memory import DESCRIPTORS, Touched
from kvstore.wire.zmtp import ZMTPError
from kvstore_client import ConnectionLost, KVStoreClient
from tests.support.harness import (
    ERROR,
    SET,
    SET_REPLY,
    SHARE,
    MakeNamespace,
    MemoryWatch,
    StartServer,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    wait_until,
    zmtp_frame,
)
from tests.support.local import RawLocal, memfd

MiB = 1 << 20
NOBODY = 65534
MEMORY = 64 * MiB
BLOCKS = 100_000  # as many pages are 390 MiB
AT_ONCE = 8192
PAGE = 4096

by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("user", ["the server's", pytest.param("another", marks=by_root)])
def test_sparse_files_with_scattered_blocks_cost_a_shard_no_memory(
    start_server: StartServer, folder: Path, user: str
) -> None:
    """Reading a hole in a mapped file allocates a page, so a shard must not read it. Another user's files are not
    mapped at all."""
    path = folder / "kv.sock"
    users = ("--unix-users", "nobody") if user == "another" else ()
    server = start_server("--unix-socket", str(path), *users, memory=str(MEMORY))
    file = memfd(BLOCKS * PAGE)
    namespace, zero = make_namespace(1, "holes"), xxhash.xxh3_64_intdigest(b"\0")
    keys = np.random.Generator(np.random.SFC64(1)).integers(0, 256, (BLOCKS, 16), dtype=np.uint8)
    entries = np.zeros(BLOCKS, dtype=[("file", "<u8"), ("offset", "<u8"), ("sum", "<u8")])
    entries["file"], entries["sum"] = 1, zero
    entries["offset"] = np.arange(BLOCKS, dtype=np.uint64) * PAGE
    with server.unharmed(), MemoryWatch(server, MEMORY), contextlib.ExitStack() as stack:
        with as_nobody() if user == "another" else contextlib.nullcontext():
            raw = stack.enter_context(RawLocal(path))
        raw.hello(namespace.canonical())
        raw.share(1, 1, BLOCKS * PAGE, file)
        for at in range(0, BLOCKS, AT_ONCE):
            some = slice(at, min(at + AT_ONCE, BLOCKS))
            count = some.stop - at
            fields = pack(
                SET, at + 2, 60_000, count, 16, *(False, 0, False, 0.0, False, b"", b"", 0, b"", 0, b"", True)
            )
            named = [entries[part : part + 512].tobytes() for part in range(at, some.stop, 512)]
            raw.send(fields, keys[some].tobytes(), *named)
            while (reply := raw.reply()[0])[0] != SET_REPLY:
                assert reply[0] != ERROR, reply
            assert reply[3] > 0, reply
    if user == "another":
        assert os.fstat(file).st_blocks == 0, "the shard has given it no page"
    os.close(file)


def lingering() -> tuple[socket.socket, socket.socket]:
    """Return a socket that takes as long to close as its owner likes, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30_000))
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))
    return sock, other


def test_a_lingering_socket_keeps_no_descriptor_of_the_shard(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    server = start_server("--unix-socket", str(path))
    (shard,) = server.shards()
    null = os.open(os.devnull, os.O_RDONLY)
    sock, other = lingering()
    with server.unharmed(), other, RawLocal(path) as raw:
        raw.hello()
        before = shard.num_fds()
        message = zmtp_frame(pack(SHARE, 1, 1, 4096), 0)
        with sock:  # the shard has the last descriptor when it receives the rest of the message
            socket.send_fds(raw.sock, [message[:3]], [sock.fileno()])
        raw.sock.sendall(message[3:])
        assert raw.reply()[0][0] == ERROR
        for number in range(2, 500):
            assert raw.share(number, 1, 4096, null)[0] == ERROR
        wait_until(lambda: shard.num_fds() <= before, what="all are closed")
    os.close(null)


def test_a_client_that_sends_unclosable_descriptors_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a descriptor may take for ever, for example on a file system that hangs. The number of descriptors
    that wait to be closed is bounded, for all connections together."""
    goes_on = threading.Event()
    closer = client_files._Closer()
    monkeypatch.setattr(client_files, "_closer", closer)
    monkeypatch.setattr(closer, "close_now", lambda descriptor: (goes_on.wait(), os.close(descriptor)))
    files = client_files.ClientFiles(DESCRIPTORS, Touched())
    came = 0
    try:
        with pytest.raises(ZMTPError, match="wait to be closed"):
            for came in range(1000):  # noqa: B007 - it is looked at below
                files.take([os.open(os.devnull, os.O_RDONLY)])
                files.close()
        assert came == client_files.MOST_TO_CLOSE and not client_files.can_take_files()
    finally:
        goes_on.set()
    wait_until(client_files.can_take_files, what="all are closed")


@by_root
def test_a_client_shows_no_token_to_an_impostor_on_the_socket(
    start_server: StartServer, new_namespace: MakeNamespace, folder: Path
) -> None:
    """The client also reads no memory that another user could truncate, because that would end the client's process."""
    path = folder / "kv.sock"
    server = start_server("--unix-socket", str(path))
    path.unlink()
    with as_nobody(), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        os.seteuid(0)
        keys = make_keys(4)
        with KVStoreClient(server.endpoint, new_namespace(PAGE)) as client:
            client.set(keys, blocks_of(keys, PAGE))
            assert client.get(keys).blocks == blocks_of(keys, PAGE)
            assert client.stats.path == "tcp"
        with pytest.raises(ConnectionLost):
            KVStoreClient(server.endpoint, new_namespace(PAGE), shared_memory=True, timeout_s=1.0)
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(1) == b"", "it has closed the connection, and said nothing"
