"""The shard's side of its keeper, the child process that owns the persistent index (`keeper_process`).

Only the loop's thread uses a `Keeper`. Only `stop` blocks; `kill`, and `on_readable` after the keeper has ended, wait
up to `_DEATH_S` for its exit status. Operations are queued in this process and go to the socket as the keeper reads it.
The shard must bound the queue, `backlog_bytes`, by writing less to the disk while it is long.

The keeper may die at any time, for example of a damaged index: `KeeperFailed` is then the last event. All events before
it remain valid, so the shard may start another keeper with `fresh` and put the entries that it knows.
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

MAX_NAMESPACES: Final = 1024  # in one index at a time
_RECV_BYTES: Final = 1 << 20
_READ_AT_ONCE_BYTES: Final = 8 << 20  # in one turn of the loop, so that its other connections do not starve
_SEND_BUFFERS: Final = 64
_DEATH_S: Final = 0.2
# The keeper runs the shard's own code, whatever the working directory holds.
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN: Final = (
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
    "from kvstore.disk.keeper_process import main; main()"
)


class TooManyNamespaces(Exception):
    """The index has `MAX_NAMESPACES` namespaces: forget one that has no entries."""


def _spawn(
    directory: Path, mode: str, map_bytes: int, lock_fd: int | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a keeper. It dies with the calling *thread* (parent-death signal), which must be the main thread."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _RUN, _CODE, str(directory), str(theirs.fileno()), mode, str(map_bytes)),
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

    directory: the shard's folder. fresh: discard the existing index. lock_fd: from `lock_shard`; the keeper inherits
    it, so nobody else can use the folder before the keeper has ended. map_bytes: the size limit of the index.

    Raises `OSError` when the process cannot be started. Events: first `IndexedNamespace` and `Recovered`, then
    `RecoveryDone` (none of these with `fresh`), and `Committed` as operations are committed.
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
        """-> the events that have arrived, a few MiB at a time. After `KeeperFailed`, stop polling and call `kill`."""
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
                self._drop_queue()  # the keeper has ended: `on_readable` reports it
                return
            self.backlog_bytes -= sent
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]

    def _take(self, event: Event) -> None:
        """Update this object from an event."""
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
        """Send an operation that has a sequence number. -> the number."""
        self._sequence += 1
        self._send(kind(self._sequence, *fields))
        return self._sequence

    # ---- operations: queued, and applied in this order --------------------------------------------------------------

    def open_namespace(self, canonical: bytes, key_bytes: int, replicas: int = 1) -> int:
        """-> the namespace's ordinal: its present one, or a new one if the index does not have the namespace.

        replicas: copies of each block; the index keeps the largest number that it was given.
        Raises `RuntimeError` before `namespaces_known`, because a new ordinal might be one of the old index,
        `ValueError` when the index has the namespace with keys of another length, and `TooManyNamespaces`.
        """
        if not self.namespaces_known:
            raise RuntimeError("the namespaces of the old index are not known yet")
        ordinal = self._ordinals.get(canonical)
        if ordinal is not None:
            known = self._namespaces[ordinal]
            if known.key_bytes != key_bytes:
                raise ValueError(f"keys of {key_bytes} bytes: this namespace has keys of {known.key_bytes}")
            if known.replicas >= replicas:
                return ordinal
        elif len(self._ordinals) >= MAX_NAMESPACES:
            raise TooManyNamespaces(f"the index of {self.directory} knows {MAX_NAMESPACES} namespaces already")
        else:
            ordinal = next(number for number in range(MAX_NAMESPACES) if number not in self._namespaces)
        namespace = IndexedNamespace(ordinal, canonical, key_bytes, replicas)
        self._know(namespace)
        self._send(namespace)
        return ordinal

    def forget_namespace(self, canonical: bytes) -> None:
        """Remove a namespace, if the index has it. Its entries must be deleted already; its ordinal is used again."""
        ordinal = self._ordinals.pop(canonical, None)
        if ordinal is not None:
            del self._namespaces[ordinal]
            self._send(messages.ForgetNamespace(ordinal))

    def put(self, ordinal: int, keys: bytes, entries: Entries) -> int:
        """Record that block i of `keys` lies at `entries[i]`, in place of any earlier entry. -> sequence number."""
        key_bytes = self._namespaces[ordinal].key_bytes
        if entries.dtype != ENTRY or len(keys) != len(entries) * key_bytes:
            raise ValueError(f"{len(keys)} bytes of keys for {len(entries)} entries: expected {key_bytes} bytes each")
        return self._send_next(messages.Put, ordinal, keys, entries.tobytes())

    def delete(self, ordinal: int, keys: bytes) -> int:
        """Remove the entries of blocks; keys without an entry are ignored. -> sequence number."""
        key_bytes = self._namespaces[ordinal].key_bytes
        if len(keys) % key_bytes:
            raise ValueError(f"{len(keys)} bytes of keys: expected {key_bytes} bytes each")
        return self._send_next(messages.Delete, ordinal, keys)

    def sync(self) -> int:
        """Have the keeper commit now. -> sequence number; once it is committed, all operations before it are, too."""
        return self._send_next(messages.Sync)

    # ---- the end -------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> bool:
        """Blocks: send the queue, wait until the keeper has committed it and ended, or kill it after `timeout_s`.

        -> whether everything was committed. Events not yet read are dropped.
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
        except subprocess.TimeoutExpired:  # a disk that hangs keeps it in a system call: another thread reaps it
            threading.Thread(target=self._process.wait, name="keeper-end", daemon=True).start()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """-> how a keeper ended that closed its connection. The kernel closes files just before it reports the exit."""
    try:
        status = process.wait(_DEATH_S)
    except subprocess.TimeoutExpired:
        return f"the keeper of the index (pid {process.pid}) hung up"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"the keeper of the index (pid {process.pid}) ended: {how}"


def read_index(directory: Path) -> Iterator[Event]:
    """Read the index in a shard's folder, for `kvstore verify`. Changes nothing on disk. Blocks.

    The caller holds the shard's lock. The last event is `RecoveryDone`, or `KeeperFailed` when the reader died.
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
