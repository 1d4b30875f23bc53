"""The part of a keeper that runs in the shard. The keeper is a child process (`keeper_process`), which owns the
persistent index.

Only the loop's thread uses a `Keeper`. Only the method `stop` blocks. But `kill`, and `on_readable` after the keeper
has ended, wait up to `_DEATH_S` for the keeper's exit status. Operations are queued in this process, and go to the
socket as the keeper reads them. The shard must bound the queue, `backlog_bytes`, by writing less to the disk while
the queue is long.

The keeper may die at any time, for example because of a damaged index. Then `KeeperFailed` is the last event, and all
events before it remain valid. So the shard may start another keeper with `fresh`, and `put` the entries it knows.
"""

from __future__ import annotations

import itertools
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import kvstore
from kvstore import logs
from kvstore.disk import messages
from kvstore.disk.entries import ENTRY, Entries
from kvstore.disk.messages import Event, IndexedNamespace, KeeperFailed, RecoveryDone

MAX_INDEXED_NAMESPACES: Final = 1024  # the most namespaces in one index at a time
_RECV_BYTES: Final = 1 << 20
_READ_AT_ONCE_BYTES: Final = 8 << 20  # for each turn of the loop, so that other connections do not starve
_SEND_BUFFERS: Final = 64
_DEATH_S: Final = 0.2
# So that the keeper runs the shard's own code, whatever the working directory holds.
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN_KEEPER: Final = (
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
    "from kvstore.disk.keeper_process import main; main()"
)


class TooManyNamespaces(Exception):
    """The error when the index already has `MAX_INDEXED_NAMESPACES` namespaces. A namespace without entries must be
    forgotten before another one can be added."""


def _spawn(
    directory: Path, mode: str, map_bytes: int, lock_fd: int | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a keeper. Call this on the main thread, because the keeper dies with the *thread* that started it
    (parent-death signal)."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _RUN_KEEPER, _CODE, str(directory), str(theirs.fileno()), mode, str(map_bytes)),
                *logs.of_child("keeper"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *(() if lock_fd is None else (lock_fd,))),
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


class Keeper:
    """A shard's persistent index.

    directory: the shard's folder.
    fresh: whether to discard the existing index.
    lock_fd: the descriptor from `lock_shard`. The keeper inherits it, so no other process can use the folder before the
    keeper has ended.
    map_bytes: the maximum size of the index.

    Raises `OSError` if the process cannot be started. Events: `IndexedNamespace` and `Recovered` come first, and then
    `RecoveryDone`, but none of these with `fresh`. `Committed` comes as operations are committed.
    """

    def __init__(self, directory: Path, *, fresh: bool, lock_fd: int, map_bytes: int) -> None:
        self.directory = directory
        self.recovering = not fresh
        self.namespaces_known = fresh
        self.backlog_bytes = 0
        self.failed = False
        self._process, self._sock = _spawn(directory, "fresh" if fresh else "recover", map_bytes, lock_fd)
        self._sock.setblocking(False)
        self._inbox = messages.Inbox(messages.EVENTS)
        self._queue: deque[memoryview] = deque()
        self._ordinals: dict[bytes, int] = {}
        self._namespaces: dict[int, IndexedNamespace] = {}  # by ordinal
        self._sequence = 0
        self._committed = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        return bool(self._queue) and not self.failed

    # ---- what the loop calls -------------------------------------------------------------------------------------

    def on_readable(self) -> list[Event]:
        """Return the events that have arrived, a few MiB at a time. After the event `KeeperFailed`, stop polling and
        call `kill`."""
        events: list[Event] = []
        taken = 0
        while taken < _READ_AT_ONCE_BYTES and not self.failed:
            try:
                data = self._sock.recv(_RECV_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            taken += len(data)
            if data:
                for event in self._inbox.feed(data):
                    self._take(event)
                    events.append(event)
            else:
                self._fail()
                events.append(KeeperFailed(_how_it_ended(self._process)))
        return events

    def on_writable(self) -> None:
        """Send as much of the queue as the socket takes."""
        queue = self._queue
        while queue and not self.failed:
            try:
                sent = self._sock.sendmsg(list(itertools.islice(queue, _SEND_BUFFERS)))
            except BlockingIOError:
                return
            except ConnectionError:
                self._drop_queue()  # the keeper has ended, which `on_readable` reports
                return
            self.backlog_bytes -= sent
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]

    def _take(self, event: Event) -> None:
        """Bring this object up to date with an event."""
        if isinstance(event, messages.Committed):
            self._committed = event.sequence
        elif isinstance(event, IndexedNamespace):
            self._know(event)
        elif isinstance(event, messages.NamespacesKnown):
            self.namespaces_known = True
        elif isinstance(event, RecoveryDone):
            self.recovering = False
        elif isinstance(event, KeeperFailed):
            self._fail()

    def _know(self, namespace: IndexedNamespace) -> None:
        self._ordinals[namespace.canonical] = namespace.ordinal
        self._namespaces[namespace.ordinal] = namespace

    def _fail(self) -> None:
        self.failed = True
        self._drop_queue()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.backlog_bytes = 0

    def _send(self, operation: messages.Operation) -> None:
        if self.failed:
            return
        data = messages.frame(operation)
        self._queue.append(memoryview(data))
        self.backlog_bytes += len(data)

    def _send_next(self, kind: Callable[..., messages.Operation], *fields: object) -> int:
        """Send an operation that has a sequence number. Return the number."""
        self._sequence += 1
        self._send(kind(self._sequence, *fields))
        return self._sequence

    # ---- operations: queued, and applied in this order --------------------------------------------------------------

    def open_namespace(self, canonical: bytes, key_bytes: int, replicas: int = 1) -> int:
        """Return the ordinal of a namespace. A namespace that is not in the index gets a new ordinal.

        replicas: the number of copies of each block. The index keeps the largest number that it was given.

        Raises `RuntimeError` before `namespaces_known`, because the old index might already use a new ordinal. Raises
        `ValueError` if the index already has the namespace with keys of a different length. May also raise
        `TooManyNamespaces`.
        """
        if not self.namespaces_known:
            raise RuntimeError("the namespaces of the old index are not known yet")
        ordinal = self._ordinals.get(canonical)
        if ordinal is not None:
            known = self._namespaces[ordinal]
            if known.key_bytes != key_bytes:
                raise ValueError(f"keys of {key_bytes} bytes: this namespace has keys of {known.key_bytes} bytes")
            if known.replicas >= replicas:
                return ordinal
        elif len(self._ordinals) >= MAX_INDEXED_NAMESPACES:
            raise TooManyNamespaces(f"the index of {self.directory} has the most namespaces: {MAX_INDEXED_NAMESPACES}")
        else:
            ordinal = next(number for number in range(MAX_INDEXED_NAMESPACES) if number not in self._namespaces)
        namespace = IndexedNamespace(ordinal, canonical, key_bytes, replicas)
        self._know(namespace)
        self._send(namespace)
        return ordinal

    def forget_namespace(self, canonical: bytes) -> None:
        """Remove a namespace, if the index has it. Its entries must already be deleted. Its ordinal is used again."""
        ordinal = self._ordinals.pop(canonical, None)
        if ordinal is not None:
            del self._namespaces[ordinal]
            self._send(messages.ForgetNamespace(ordinal))

    def put(self, ordinal: int, keys: bytes, entries: Entries) -> int:
        """Record that block i of `keys` lies at `entries[i]`. This replaces any earlier entry of the block. Return the
        sequence number."""
        key_bytes = self._namespaces[ordinal].key_bytes
        if entries.dtype != ENTRY or len(keys) != len(entries) * key_bytes:
            raise ValueError(
                f"{len(keys)} bytes of keys for {len(entries)} entries: expected {key_bytes} bytes for each entry"
            )
        return self._send_next(messages.Put, ordinal, keys, entries.tobytes())

    def delete(self, ordinal: int, keys: bytes) -> int:
        """Remove the entries of blocks. Keys without an entry are ignored. Return the sequence number."""
        key_bytes = self._namespaces[ordinal].key_bytes
        if len(keys) % key_bytes:
            raise ValueError(f"{len(keys)} bytes of keys: expected a multiple of {key_bytes} bytes")
        return self._send_next(messages.DropEntries, ordinal, keys)

    def sync(self) -> int:
        """Make the keeper commit now. Return the sequence number. When this number is committed, all earlier operations
        are committed, too."""
        return self._send_next(messages.CommitNow)

    # ---- the end -------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> bool:
        """Send the queue, and wait until the keeper has committed it and ended. Kill the keeper after `timeout_s`.
        Blocks.

        Return whether everything was committed. Events that were not read yet are dropped.
        """
        if self.recovering and not self._sequence:
            self.kill()  # the old index is unchanged, and there is nothing to add to it
            return True
        deadline = time.monotonic() + timeout_s
        self._send(messages.Stop())
        poll = select.poll()
        while not self.failed and (left_s := deadline - time.monotonic()) > 0:
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._queue else 0))
            for _, ready in poll.poll(left_s * 1000):
                if ready & select.POLLOUT:
                    self.on_writable()
                if ready & ~select.POLLOUT:
                    self.on_readable()
        self.kill()
        return self._committed == self._sequence

    def kill(self) -> None:
        """End the keeper at once. Uncommitted operations are lost."""
        self.failed = True
        self._drop_queue()
        self._sock.close()
        self._process.kill()
        try:
            self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:  # a hanging disk keeps it in a system call; a thread reaps it later
            threading.Thread(target=self._process.wait, name="keeper-end", daemon=True).start()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Describe how a keeper that closed its connection has ended. The kernel closes the files of a process just before
    it reports the exit."""
    try:
        status = process.wait(_DEATH_S)
    except subprocess.TimeoutExpired:
        return f"the keeper of the index (pid {process.pid}) hung up"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"the keeper of the index (pid {process.pid}) ended: {how}"


def read_index(directory: Path) -> Iterator[Event]:
    """Read the index in a shard's folder, for `kvstore verify`. Changes nothing on disk. Blocks.

    The caller must hold the shard's lock. The last event is `RecoveryDone`, or `KeeperFailed` if the reader died.
    """
    process, sock = _spawn(directory, "read", 0, None)
    inbox = messages.Inbox(messages.EVENTS)
    try:
        while True:
            data = sock.recv(_RECV_BYTES)
            for event in inbox.feed(data):
                yield event
                if isinstance(event, (RecoveryDone, KeeperFailed)):
                    return
            if not data:
                yield KeeperFailed(_how_it_ended(process))
                return
    finally:
        sock.close()
        process.kill()
        process.wait()
