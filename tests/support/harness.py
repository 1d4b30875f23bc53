"""The base of the tests: real servers in processes of their own, blocks whose bytes can be checked, and a raw client.

A block's bytes follow from its key and a version, so a test can check all of them. `RawClient` implements ZMTP and the
msgpack messages itself, from docs/protocol.md and without code of `kvstore`, so that the two do not share errors.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import xxhash

from kvstore import wire
from kvstore.wire import ShardAddress
from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.ports import free_ports

ROOT = forked.ROOT
environment = forked.environment


def interruptible(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that Ctrl-C ends, even if this process ignores SIGINT, which a child would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.signal(signal.SIGINT, before)


SANITIZED = "ASAN_OPTIONS" in os.environ  # AddressSanitizer keeps freed memory for a while
OVERHEAD_BYTES = 256 << 20  # memory that a shard may take beyond its limit, whatever clients do
START_S = 30.0
STOP_S = 20.0
ANSWER_S = 60.0  # only a failing test waits this long, but a slow machine may need much of it


def wait_until(condition: Callable[[], Any], deadline_s: float = ANSWER_S, what: str = "") -> Any:
    """Poll until `condition()` is true and return its value. Raises `AssertionError` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what or condition}")
        time.sleep(0.01)


def lasts(condition: Callable[[], Any], seconds: float) -> bool:
    """Return whether `condition()` is true now and remains true for this many seconds."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if not condition():
            return False
        time.sleep(min(0.05, seconds - passed))
    return bool(condition())


def stays(condition: Callable[[], Any], seconds: float, what: str = "") -> None:
    """Raise `AssertionError` if `condition()` becomes false within this many seconds."""
    assert lasts(condition, seconds), f"not so for {seconds:g} s: {what or condition}"


# ---- keys and blocks ---------------------------------------------------------------------------------------------


def make_keys(count: int, first: int = 0, key_bytes: int = 16) -> list[bytes]:
    """Return `count` distinct keys that look like hashes. The same arguments give the same keys."""
    return [
        (xxhash.xxh3_128_digest(number.to_bytes(8, "little")) * 4)[:key_bytes] for number in range(first, first + count)
    ]


def block_of(key: bytes, block_bytes: int, version: int = 0) -> bytes:
    """Return the block of a key. Every byte follows from the key and the version."""
    if block_bytes <= 64:  # small blocks are made in large numbers, and making a generator takes 20 us
        return b"".join(xxhash.xxh3_128_digest(key, seed=4 * version + part) for part in range(4))[:block_bytes]
    seed = xxhash.xxh3_64_intdigest(key, seed=version)
    return np.random.Generator(np.random.SFC64(seed)).bytes(block_bytes)


def blocks_of(keys: Iterable[bytes], block_bytes: int, version: int = 0) -> list[bytes]:
    return [block_of(key, block_bytes, version) for key in keys]


def put(client: KVStoreClient, keys: Sequence[bytes]) -> None:
    """Set the blocks of these keys. On return, the store has all of them."""
    assert client.set(keys, blocks_of(keys, client.namespace.block_bytes), deferred=False).error == 0


def put_into(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """Set the blocks of these keys with a new client. On return, the store has all of them."""
    with KVStoreClient(server.endpoint, namespace) as client:
        put(client, keys)


def make_namespace(block_bytes: int, model: str, **fields: Any) -> Namespace:
    return Namespace(model=model, dtype="uint8", block_tokens=16, block_bytes=block_bytes, **fields)


# ---- processes ---------------------------------------------------------------------------------------------------


def server_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore", *arguments]


def alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie, which only waits to be reaped, does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def hung(process: psutil.Process) -> Iterator[None]:
    """Stop one process (SIGSTOP) while the body runs."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


class Server:
    """A real `kvstore-server`. Its standard error goes to the file `log`. `restart` starts another one on the same
    port. Without a Unix socket in the arguments, the server has none, so that clients use TCP.

    `prefix`: a command that executes the server elsewhere, in the same process, e.g. ``ip netns exec NAMESPACE``.
    """

    def __init__(
        self, log: Path, *arguments: str, prefix: Sequence[str] = (), port: int = 0, **extra_environment: str
    ) -> None:
        self.log = log
        self._prefix = prefix
        self._arguments = arguments if "--unix-socket" in arguments else ("--unix-socket", "off", *arguments)
        if any(each.startswith("--host") for each in arguments):  # an address that the test has made
            extra_environment.setdefault("KVSTORE_SERVER_INSECURE", "true")
        self._environment = environment(**extra_environment)
        shards = int(arguments[arguments.index("--shards") + 1]) if "--shards" in arguments else 1
        # The port is not 0: at a restart, another connection or node might have the port that the kernel chose.
        self.port = port or free_ports(shards)[0]
        self.start()

    def start(self) -> None:
        arguments = ["--port", str(self.port), *self._arguments]
        out, theirs = os.pipe()
        self._stdout = stdout = os.fdopen(out)
        with self.log.open("ab") as log, open(theirs, "wb") as says, open(os.devnull, "rb") as nothing:
            self.process = forked.start(
                "kvstore",
                arguments,
                stdin=nothing,
                stdout=says,
                stderr=log,
                env=self._environment,
                prefix=self._prefix,
            )
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True)
        reader.start()
        try:
            self.ready_line = lines.get(timeout=START_S)
        except queue.Empty:
            self.kill()
            raise AssertionError(f"the server was not ready within {START_S} s:\n{self.log_text()}") from None
        ready = re.fullmatch(r"kvstore-server ready (tcp|tls)://(\S+):(\d+) shards=\d+ memory=\d+\n", self.ready_line)
        if ready is None:
            self.kill()
            raise AssertionError(f"the server said {self.ready_line!r}:\n{self.log_text()}")
        self.scheme, self.host, self.port = ready[1], ready[2], int(ready[3])

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def http_url(self) -> str:
        """The URL of the server's HTTP port, http://HOST:PORT, if it was started with --http."""
        found = re.search(r" (https?://\S+:\d+)/[;\s]", self.log_text())
        assert found, self.log_text()
        return found[1]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def shards(self) -> list[psutil.Process]:
        """The shard processes, in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: child.pid)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Send SIGTERM and wait. Returns the exit status."""
        if self.running:
            self.signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not stop within {STOP_S} s:\n{self.log_text()}") from None
        finally:
            self._close()

    def kill(self) -> None:
        """Send SIGKILL to the supervisor, and wait; the kernel ends its shards."""
        shards = self.shards() if self.running else []
        if self.running:
            self.process.kill()
        self.process.wait(STOP_S)
        wait_until(lambda: not any(alive(shard) for shard in shards), STOP_S, "the shards die with their supervisor")
        self._close()

    def _close(self) -> None:
        self._stdout.close()

    def restart(self) -> None:
        """Start another server on the same port."""
        assert not self.running
        self.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all processes of the server (SIGSTOP) while the body runs."""
        processes = [psutil.Process(self.process.pid), *self.shards()]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Fail if, after the body, the shards are other processes or a traceback was logged."""
        shards = [shard.pid for shard in self.shards()]
        before = len(self.log_text())
        yield
        text = self.log_text()[before:]
        assert "Traceback" not in text, text[-4000:]
        assert [shard.pid for shard in self.shards()] == shards, text[-4000:]


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, including the shared pages of the arena."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS")


class MemoryWatch:
    """Samples the resident memory of a server's shards. Fails at the end if a shard took more than `limit_bytes` plus
    `OVERHEAD_BYTES`, except under AddressSanitizer, which needs much more memory."""

    def __init__(self, server: Server, limit_bytes: int) -> None:
        self.bound = limit_bytes + OVERHEAD_BYTES
        self.highest = 0
        self._pids = [shard.pid for shard in server.shards()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            for pid in self._pids:
                if psutil.pid_exists(pid):
                    self.highest = max(self.highest, rss_bytes(pid))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.highest > 0
        assert self.highest <= self.bound or SANITIZED, (
            f"{self.highest >> 20} MiB resident: at most {self.bound >> 20} MiB"
        )


def shard_info(client: KVStoreClient) -> wire.ShardInfo:
    """Return the state of the one shard of a server."""
    (shard,) = client.info().shards
    return shard


def namespace_info(client: KVStoreClient) -> wire.NamespaceInfo:
    """Return the state of this client's namespace on a server with one shard. Waits until the namespace exists, because
    a SET may be in transit."""
    (found,) = wait_until(
        lambda: [each for each in shard_info(client).namespaces if each.id == client.namespace.id],
        what=f"the shard has the namespace {client.namespace.id}",
    )
    return found


StartServer = Callable[..., Server]
MakeNamespace = Callable[..., Namespace]

# ---- the wire, by hand -------------------------------------------------------------------------------------------

HELLO, SET, GET, CONTAINS, MATCH_PREFIX, DELETE, SYNC, INFO, PING, CREDIT, CANCEL = range(1, 12)
HOTTEST, PURGE, RELEASE, SHARE, PROMISE, WITHDRAW = range(13, 19)
WELCOME, SET_REPLY, PART, CONTAINS_REPLY, MATCH_REPLY, DELETE_REPLY, SYNC_REPLY, INFO_REPLY, PONG = range(65, 74)
EXTENT, RETIRED, SHARE_REPLY, TAKEN = range(77, 81)
PROMISE_REPLY, WITHDRAW_REPLY = 82, 83
ERROR = 127
PROTOCOL = 3  # the version in HELLO

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x01" + b"NULL" + bytes(16) + b"\0" + bytes(31)


def zmtp_frame(data: bytes, flags: int) -> bytes:
    if len(data) > 255:
        return struct.pack(">BQ", flags | 2, len(data)) + data
    return struct.pack("BB", flags, len(data)) + data


def ready_command(socket_type: bytes = b"DEALER") -> bytes:
    return zmtp_frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type, 4)


def pack(*fields: Any) -> bytes:
    """A header: a msgpack array."""
    return msgspec.msgpack.encode(fields)


def sums_of(blocks: Iterable[bytes]) -> bytes:
    return b"".join(xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks)


class Closed(Exception):
    """The server closed the connection."""


class RawClient:
    """A connection over a plain socket that can send any bytes. Calls block for up to `ANSWER_S`."""

    def __init__(
        self,
        server: Server | ShardAddress,
        handshake: bool = True,
        receive_buffer: int = 0,
        source: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """server: a server, for its first shard, or the address of a shard. source: the address to connect from. tls:
        connect with TLS."""
        self.sock = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
        if source:
            self.sock.bind((source, 0))
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect((server.host, server.port))
        self._data = b""
        try:
            if tls is not None:
                self.sock = tls.wrap_socket(self.sock, server_hostname=server.host)
            if handshake:
                self._shake_hands()
        except BaseException:
            self.close()
            raise

    def _shake_hands(self) -> None:
        self.sock.sendall(GREETING + ready_command())
        assert self.read(64)[10] == 3
        flags, ready = self.read_frame()
        assert flags == 4 and ready.startswith(b"\x05READY"), ready

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def read(self, size: int) -> bytes:
        while len(self._data) < size:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise Closed(self._data)
            self._data += data
        data, self._data = self._data[:size], self._data[size:]
        return data

    def read_frame(self) -> tuple[int, bytes]:
        flags, size = self.read(2)
        if flags & 2:
            size = int.from_bytes(bytes([size]) + self.read(7), "big")
        return flags & ~2, self.read(size)

    def send(self, *frames: bytes, more: bool = False) -> None:
        """Send one message. With `more`, its last frame is sent later."""
        data = [zmtp_frame(frame, 1) for frame in frames[:-1]]
        data.append(zmtp_frame(frames[-1], 1 if more else 0))
        self.sock.sendall(b"".join(data))

    def reply(self) -> tuple[list[Any], list[bytes]]:
        """Return the next message: the fields of its header, and its other frames. Commands, such as PING, are
        skipped."""
        frames = []
        flags = 1
        while flags & 5:
            flags, data = self.read_frame()
            if not flags & 4:
                frames.append(data)
        return msgspec.msgpack.decode(frames[0]), frames[1:]

    def ask(self, *frames: bytes) -> list[Any]:
        """Send a message. Returns the header of the next reply."""
        self.send(*frames)
        return self.reply()[0]

    def hello(self, canonical: bytes = b"", protocol: int = PROTOCOL) -> list[Any]:
        return self.ask(pack(HELLO, 0, protocol, canonical, "raw"))

    def closed(self) -> bool:
        """Wait until the server closes the connection, and drop all bytes until then. Returns False if it stays
        open."""
        try:
            while True:
                self.read(1)
        except Closed:
            return True
        except TimeoutError:
            return False


def set_frames(
    request_id: int, keys: Sequence[bytes], blocks: Sequence[bytes], sums: bytes | None = None, force: bool = False
) -> list[bytes]:
    """Return the frames of a SET whose blocks all fit into one payload frame."""
    header = pack(SET, request_id, 10_000, len(keys), len(keys[0]), force)
    return [header, b"".join(keys), b"".join(blocks), sums_of(blocks) if sums is None else sums]
