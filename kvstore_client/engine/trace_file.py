"""Requests' times in a file that trace viewers open: Chrome's trace event format, which Perfetto reads.

A request is a process of the viewer, and has a row for each part of its way (`ROWS`). The number of that process comes
from the trace id, so files of proxy and engines agree without talking; `kvstore trace` puts them into one.

What must hold: `write` neither blocks nor raises, whatever the disk does: a thread writes, and what it cannot write is
lost and logged. The file is whole JSON after each write, because its closing bracket is written again and again. Its
size is bounded: a full file becomes FILE.1, in place of the one before. One process writes a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

log = logging.getLogger(__name__)

# From top to bottom: who asks stands above who is asked.
ROWS: Final = ("proxy", "proxy to P", "proxy to D", "P", "store, from P", "store, to D", "D")
LANES: Final = 16  # of one row, for times that overlap without one containing the other
MOST_BYTES: Final = 64 << 20
_MOST_WAITING: Final = 1024  # requests that wait for the disk
_CLOSE_S: Final = 2.0
_HEAD, _NEXT, _END = b"[\n", b",\n", b"\n]\n"


@dataclass(frozen=True)
class Slice:
    """What happened from `began_s` to `ended_s`, in seconds since 1970. ended_s None: at one moment."""

    row: str
    name: str
    began_s: float
    ended_s: float | None
    args: Mapping[str, Any] = field(default_factory=dict)


def trace_events(trace_id: str, request_id: str, writer: str, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """-> one request's events. writer: who measured them, such as gpu-1:4123."""
    pid = int(trace_id[-7:], 16) + 1  # fits viewers that have 32 bits
    events = [_named("process_name", pid, 0, f"request {request_id}, trace {trace_id}")]
    rows: set[int] = set()
    for each, lane in _lanes(slices):
        tid = 1 + ROWS.index(each.row) * LANES + lane
        if tid not in rows:
            rows.add(tid)
            events.append(_named("thread_name", pid, tid, row_name(tid, writer)))
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        began = round(each.began_s * 1e6)
        event = {"name": each.name, "cat": "kvstore", "pid": pid, "tid": tid, "ts": began}
        if each.ended_s is None:
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": max(0, round(each.ended_s * 1e6) - began)}
        ids = {"trace_id": trace_id, "request_id": request_id, "writer": writer}
        events.append({**event, "args": {**each.args, **ids}})
    return events


def row_name(tid: int, writer: str) -> str:
    """-> how a viewer calls the row with this number. Raises IndexError."""
    row = ROWS[(tid - 1) // LANES]
    return row if row.startswith("proxy") else f"{row} ({writer})"


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _lanes(slices: Sequence[Slice]) -> Iterator[tuple[Slice, int]]:
    """Viewers show a row right only if of two slices that overlap one contains the other: -> each with its lane."""
    open_until: dict[tuple[str, int], list[float]] = {}
    for each in sorted(slices, key=lambda each: (each.began_s, -(each.ended_s or each.began_s))):
        for lane in range(LANES):
            ends = open_until.setdefault((each.row, lane), [])
            while ends and ends[-1] <= each.began_s:
                ends.pop()
            if each.ended_s is None:
                break
            if not ends or each.ended_s <= ends[-1]:
                ends.append(each.ended_s)
                break
        yield each, lane


class TraceFile:
    """A file of events. Any thread may `write`; one closes."""

    def __init__(self, path: str | Path, most_bytes: int = MOST_BYTES) -> None:
        """A file that is there becomes FILE.1. most_bytes: of FILE, and so of FILE.1.

        Raises `OSError` if the file cannot be written, and `ValueError` if it holds something else, or if another
        process writes it."""
        self._path = Path(path)
        self._most_bytes = most_bytes
        self._waiting: queue.Queue[list[dict[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of `_thread`
        self._failing = False
        self._file = self._open()
        head = os.pread(self._file, len(_HEAD) + 2, 0)
        if head:
            if head != _HEAD + b'{"':
                os.close(self._file)
                raise ValueError(f"{path} holds something else than a trace; name a new file, or move that one away")
            self._rotate()
        self._size = 0

    def write(self, events: list[dict[str, Any]]) -> None:
        """Add the events of a request. What the disk is too slow for is lost."""
        with self._lock:
            if self._thread is None:  # not before: a process may fork after it was started
                self._thread = threading.Thread(target=self._run, name="kvstore-trace", daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(events)
        except queue.Full:
            self._failed(f"{_MOST_WAITING} requests wait for the disk")

    def close(self) -> None:
        """Write what waits, for at most 2 s."""
        if self._thread is None:
            os.close(self._file)
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    # ---- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (events := self._waiting.get()) is not None:
            try:
                self._append(_NEXT.join(map(msgspec.json.encode, events)))
                self._failing = False
            except (OSError, ValueError, TypeError) as error:
                self._failed(str(error))
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._most_bytes:
            self._rotate()
            self._size = 0
        at = self._size - len(_END) if self._size else 0
        data = (_NEXT if self._size else _HEAD) + data + _END
        try:
            _write_at(self._file, data, at)
        except OSError:
            if self._size:  # there was room for this before
                os.pwrite(self._file, _END, at)
            os.ftruncate(self._file, self._size)
            raise
        self._size = at + len(data)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"{self._path} is no ordinary file; name one")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"another process writes {self._path}; give each process a file of its own") from None
        except BaseException:
            os.close(file)
            raise
        return file

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            os.replace(self._path, f"{self._path}.1")
        old, self._file = self._file, self._open()
        os.close(old)

    def _failed(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            log.warning("kvstore: %s cannot be written: %s; requests are missing there", self._path, why)


def _write_at(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
