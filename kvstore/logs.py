"""Log lines on standard error, one an event: `time level where message` for people, or a JSON object for machines.

A line may carry fields beside its message: `log.info("...", extra=fields(uptime_s=3.2))`. In JSON they are keys of
`fields`; text leaves them out, so the message has to tell what people need. Warnings of Python and exceptions that
nobody caught become log lines as well, so that every line on standard error can be read by a machine.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Final

import msgspec

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
_FIELDS: Final = "kvstore_fields"

log = logging.getLogger(__name__)

_configured = ("warning", "", "text")  # level, where, form: as `configure` was called


def fields(**values: Any) -> dict[str, Any]:
    """What `extra` of a logging call takes, for a line with these fields."""
    return {_FIELDS: values}


def configure(level: str, where: str, form: str = "text") -> None:
    """Send this process's log records of `level` and above to standard error, in UTC, in one of `FORMATS`. `where`
    names the process."""
    global _configured  # noqa: PLW0603 - one log a process
    _configured = (level, where, form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JSONFormatter(where) if form == "json" else _text_formatter(where))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    threading.excepthook = _log_exception_of_thread


def of_child(name: str) -> tuple[str, str, str]:
    """What `configure` takes in a child process, to log as this process does."""
    level, where, form = _configured
    return level, f"{where} {name}".strip(), form


def _text_formatter(where: str) -> logging.Formatter:
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {where} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


class _JSONFormatter(logging.Formatter):
    """One object a line: time, level, where, message, and where they are: fields, exception."""

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
