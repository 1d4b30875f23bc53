"""Reads and writes the header `traceparent` of W3C's Trace Context, which says to which trace a request belongs.

This module has no side effects. A trace records one request's path through the proxy and the engines; each part of it
is a span. The header has the ids of the trace and of the caller's span, and says whether the trace is recorded. An
invalid header is ignored, as the standard demands, and a new trace begins. From a header of a later version, only the
fields of version 0 are read, and version 0 is sent on.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

_SAMPLED: Final = 1
_KNOWN_FLAGS: Final = 3  # "sampled" and "random trace id"; all others are sent on as 0
_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TraceContext:
    """The place of a request in its trace. `trace_id`: 32 hexadecimal digits. `parent_id`: the id of the caller's span,
    16 hexadecimal digits; empty if the trace begins here. `flags`: the flags of `traceparent`."""

    trace_id: str
    parent_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the trace is to be recorded."""
        return bool(self.flags & _SAMPLED)

    def header(self, span_id: str) -> str:
        """Return the `traceparent` for a request that is sent within the span `span_id`."""
        return f"00-{self.trace_id}-{span_id}-{self.flags:02x}"


def parse_traceparent(header: str) -> TraceContext | None:
    """Return the context, or None if `header` is not a valid `traceparent`."""
    match = _HEADER.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, parent_id, int(flags, 16) & _KNOWN_FLAGS)


def new_trace() -> TraceContext:
    """Return the context of a new trace, which is recorded."""
    return TraceContext(secrets.token_hex(16), "", _KNOWN_FLAGS)


def new_span_id() -> str:
    """Return a random span id of 16 hexadecimal digits."""
    return secrets.token_hex(8)
