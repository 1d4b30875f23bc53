"""What trace files say: lines of OTLP's JSON, which `span_export.SpanFile` writes and the Collector reads, too.

Reading needs no OpenTelemetry. A file may be read while it is written, and its writer may have been killed: only whole
lines count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

ROW: Final = "kvstore.row"  # attributes: where a timeline shows a span,
REQUEST_ID: Final = "kvstore.request_id"  # and to which request it belongs
WRITER: Final = "service.instance.id"  # of the resource: which process has measured it
_OLD_HEAD: Final = b"[\n"  # of files with Chrome's trace events, as earlier versions wrote them
HEADS: Final = (b'{"resourceSpans":', _OLD_HEAD)


class Slice(msgspec.Struct, frozen=True):
    """A part of a request: a span, or a moment in one, which has no `ended_us`. Times are in microseconds since 1970.
    `args`: its other attributes."""

    trace_id: str
    request_id: str
    writer: str
    row: str
    name: str
    began_us: int
    ended_us: int | None
    args: dict[str, Any]


def read_trace(path: Path) -> list[Slice]:
    """-> in the order in which they were written. Raises `OSError`, and `ValueError`: it is no trace file."""
    lines = path.read_bytes().split(b"\n")
    if lines[0] == _OLD_HEAD.strip():
        raise ValueError(
            f"{path} has Chrome's trace events, as earlier versions wrote them: open it in https://ui.perfetto.dev as "
            "it is, and name files that this version has written"
        )
    found: list[Slice] = []
    try:
        for line in lines[:-1]:
            for resource in msgspec.json.decode(line)["resourceSpans"]:
                writer = _attributes(resource["resource"])[WRITER]
                for scope in resource["scopeSpans"]:
                    found += [each for span in scope["spans"] for each in _slices(span, writer)]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is none that --trace-file or trace_file has written: {error!r}") from None
    return found


def _slices(span: dict[str, Any], writer: str) -> Iterator[Slice]:
    args = _attributes(span)
    known = span["traceId"], args.pop(REQUEST_ID), writer, args.pop(ROW)
    began, ended = _microseconds(span["startTimeUnixNano"]), _microseconds(span["endTimeUnixNano"])
    yield Slice(*known, span["name"], began, ended, args)
    for event in span.get("events", ()):
        yield Slice(*known, event["name"], _microseconds(event["timeUnixNano"]), None, _attributes(event))


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Each value says its kind; OTLP writes integers of 64 bits as strings."""
    pairs = ((pair["key"], *pair["value"].popitem()) for pair in holder.get("attributes", ()))
    return {name: int(value) if kind == "intValue" else value for name, kind, value in pairs}


def _microseconds(nanoseconds: str) -> int:
    return round(int(nanoseconds) / 1000)
