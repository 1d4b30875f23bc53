"""Writes one line per event to standard error: `time level where message` for people, or a JSON object for machines.

A line may carry fields in addition to its message: `log.info("...", extra=fields(uptime_s=3.2))`. In JSON they are
members of the object `fields`. The text form omits them, so the message must contain everything that people need.
Python's warnings and uncaught exceptions become log lines as well, so that machines can parse every line on standard
error.

If standard error is the journal of systemd, each line begins with the priority of its level (`journalctl -p warning`).
Logging never waits for the reader of standard error (`standard_error.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Final

import msgspec

from kvstore.standard_error import StandardError

LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
_FIELDS: Final = "kvstore_fields"
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

_BURST: Final = 20  # the most lines of one kind in `_BURST_S`; a kind is a message before its values are filled in
_BURST_S: Final = 10.0  # there is a limit because a client that can cause one line can cause a million

log = logging.getLogger(__name__)

_configured = ("warning", "", "text")  # the arguments level, where and form of the last `configure`


def fields(**values: Any) -> dict[str, Any]:
    """Return the argument `extra` of a logging call, for a line with these fields."""
    return {_FIELDS: values}


def configure(level: str, where: str, form: str = "text") -> None:
    """Send this process's log records of `level` and above to standard error, with times in UTC.

    `where`: the name of the process in each line. `form`: one of `LOG_FORMATS`.
    """
    global _configured  # noqa: PLW0603 - one log per process
    _configured = (level, where, form)
    handler = _handler()
    handler.addFilter(_Bounded())
    formatter = _JSONFormatter(where) if form == "json" else _text_formatter(where)
    handler.setFormatter(_JournalFormatter(formatter) if _is_journal() else formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    threading.excepthook = _log_exception_of_thread


def set_level(level: str) -> None:
    """Change the level that `configure` set, also for later children of this process."""
    global _configured  # noqa: PLW0603 - see `configure`
    _configured = (level, *_configured[1:])
    logging.getLogger().setLevel(level.upper())


def of_child(name: str) -> tuple[str, str, str]:
    """Return the arguments of `configure` for a child process that logs like this one."""
    level, where, form = _configured
    return level, f"{where} {name}".strip(), form


class _Handler(logging.Handler):
    """Writes to standard error and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._to = StandardError()
        self._left_out = 0  # how many lines could not be written since the last successful write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # the logging call had wrong arguments
            self.handleError(record)
            return
        if self._left_out:
            said = f"{self._left_out} lines were left out here: standard error was not read"
            told = logging.LogRecord(log.name, logging.WARNING, __file__, 0, said, None, None)
            if self._write(self.format(told)):
                self._left_out = 0
        if not self._write(line):
            self._left_out += 1

    def _write(self, line: str) -> bool:
        return self._to.write(line.encode("utf-8", "backslashreplace"))


def _handler() -> logging.Handler:
    try:
        ours = sys.stderr.fileno() == 2
    except (OSError, ValueError):
        ours = False
    return _Handler() if ours else logging.StreamHandler(sys.stderr)


class _Bounded(logging.Filter):
    """Lets at most `_BURST` lines of one kind pass in `_BURST_S` seconds. The next line that passes says how many were
    left out."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, list[float]] = {}  # for each kind: when its burst began, and the number of lines since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:  # at debug level all lines are wanted
            return True
        kind = str(record.msg)
        began, lines = self._kinds.setdefault(kind, [record.created, 0])
        if record.created - began > _BURST_S:
            if lines > _BURST:
                record.msg = f"{record.getMessage()} ({int(lines) - _BURST} more lines of this kind were left out)"
                record.args = None
            began, lines = record.created, 0
        self._kinds[kind] = [began, lines + 1]
        return lines < _BURST


def _text_formatter(where: str) -> logging.Formatter:
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {where} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def _is_journal() -> bool:
    """Return whether standard error is the journal. Because standard error may be redirected, systemd passes the device
    and inode of the journal's socket."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{status.st_dev}:{status.st_ino}"


class _JournalFormatter(logging.Formatter):
    """Begins each line with its priority. The journal removes the priority from the line."""

    def __init__(self, of: logging.Formatter) -> None:
        super().__init__()
        self._of = of

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return prefix + self._of.format(record).replace("\n", f"\n{prefix}")


class _JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object with the members time, level, where and message, and, if the record has them,
    fields and exception."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "where": self._where,
            "message": record.getMessage(),
        }
        values = getattr(record, _FIELDS, None)
        if values:
            line["fields"] = values
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _log_exception(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, at)
    else:
        log.critical("the process ends: %s: %s", kind.__name__, error, exc_info=(kind, error, at))


def _log_exception_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread is not None else "unknown"
        problem = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        log.critical("thread %s ends: %s: %s", name, ended.exc_type.__name__, ended.exc_value, exc_info=problem)
