"""To which trace a request belongs: the header `traceparent` of W3C's Trace Context.

Pure. A trace is one request's way through proxy and engines; each part of it is a span. The header names the trace and
the caller's span, and says whether anybody records it. What a caller sends that is no such header is ignored, as W3C
has it, and a new trace begins. A header of a later version is read as far as version 0 goes, and version 0 is sent on.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

_SAMPLED: Final = 1
_KNOWN_FLAGS: Final = 3  # sampled, and that the trace id is random; all others are sent on as 0
_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TraceContext:
    """trace_id: 32 hexadecimal digits. parent_id: 16, the caller's span; empty: the trace begins here."""

    trace_id: str
    parent_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the trace is to be recorded."""
        return bool(self.flags & _SAMPLED)

    def header(self, span_id: str) -> str:
        """-> the `traceparent` of a request that the span `span_id` makes."""
        return f"00-{self.trace_id}-{span_id}-{self.flags:02x}"


def parse_traceparent(header: str) -> TraceContext | None:
    """-> None: this is no valid `traceparent`."""
    match = _HEADER.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, parent_id, int(flags, 16) & _KNOWN_FLAGS)


def new_trace() -> TraceContext:
    """-> a trace that begins here, and is recorded."""
    return TraceContext(secrets.token_hex(16), "", _KNOWN_FLAGS)


def new_span_id() -> str:
    """-> 16 hexadecimal digits."""
    return secrets.token_hex(8)
