"""Reads trace files, which have lines of OTLP's JSON. `span_export.SpanFile` writes them, and the Collector can read
them, too.

Reading does not need OpenTelemetry. A file may be read while it is written, and its writer may have been killed, so
only whole lines count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

ROW: Final = "kvstore.row"  # attribute: the row of a timeline that shows the span
REQUEST_ID: Final = "kvstore.request_id"  # attribute: the request to which the span belongs
WRITER: Final = "service.instance.id"  # attribute of the resource: the process that measured the span
_OLD_HEAD: Final = b"[\n"  # the beginning of files of earlier versions, which have Chrome's trace events
HEADS: Final = (b'{"resourceSpans":', _OLD_HEAD)


class Slice(msgspec.Struct, frozen=True):
    """Either a span of a request or an event in a span; `ended_us` is None for an event. Times are in microseconds
    since 1970. `args`: its other attributes."""

    trace_id: str
    request_id: str
    writer: str
    row: str
    name: str
    began_us: int
    ended_us: int | None
    args: dict[str, Any]


def read_trace(path: Path) -> list[Slice]:
    """Return the spans and their events in the order in which they were written. Raises `OSError` if the file cannot be
    read, and `ValueError` if it is not a trace file."""
    lines = path.read_bytes().split(b"\n")
    if lines[0] == _OLD_HEAD.strip():
        raise ValueError(
            f"{path} has Chrome's trace events, which earlier versions wrote: open it in https://ui.perfetto.dev; "
            "expected files that this version has written"
        )
    found: list[Slice] = []
    try:
        for line in lines[:-1]:
            for resource in msgspec.json.decode(line)["resourceSpans"]:
                writer = _attributes(resource["resource"])[WRITER]
                for scope in resource["scopeSpans"]:
                    found += [each for span in scope["spans"] for each in _slices(span, writer)]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file that --trace-file or trace_file has written: {error!r}") from None
    return found


def _slices(span: dict[str, Any], writer: str) -> Iterator[Slice]:
    args = _attributes(span)
    known = span["traceId"], args.pop(REQUEST_ID), writer, args.pop(ROW)
    began, ended = _microseconds(span["startTimeUnixNano"]), _microseconds(span["endTimeUnixNano"])
    yield Slice(*known, span["name"], began, ended, args)
    for event in span.get("events", ()):
        yield Slice(*known, event["name"], _microseconds(event["timeUnixNano"]), None, _attributes(event))


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes by name. In OTLP, each value comes with its type, and 64-bit integers are strings."""
    pairs = ((pair["key"], *pair["value"].popitem()) for pair in holder.get("attributes", ()))
    return {name: int(value) if kind == "intValue" else value for name, kind, value in pairs}


def _microseconds(nanoseconds: str) -> int:
    return round(int(nanoseconds) / 1000)
