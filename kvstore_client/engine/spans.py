"""The parts of a request as one process sees them, in OpenTelemetry's words: spans, which have attributes and events.

They are kept where something wants their times anyway, and are a few small objects; `span_export` gives them to
OpenTelemetry's SDK. Times are those of `time.monotonic`, so that they follow on each other whatever the clock does.
Attributes have the names of OpenTelemetry's semantic conventions where these have one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kvstore_client.engine.trace_context import new_span_id

Kind: TypeAlias = Literal["internal", "server", "client"]


@dataclass
class Moment:
    """Something that happened in a span."""

    name: str
    at: float
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Span:
    """`row`: where a timeline shows it. `ended`: 0 while it lasts. `parent`: the id of the span that it is a part of;
    empty: the span of whoever sent the request. `error`: what ended it; empty: nothing did."""

    name: str
    kind: Kind
    row: str
    attributes: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    id: str = field(default_factory=new_span_id)
    parent: str = ""
    events: list[Moment] = field(default_factory=list)
    error: str = ""

    def event(self, name: str, **attributes: Any) -> None:
        """It happens now."""
        self.events.append(Moment(name, time.monotonic(), attributes))

    def failed(self, error: BaseException) -> None:
        """The span ends with an error; errors with a `kind` are told apart by it."""
        kind = getattr(error, "kind", type(error).__name__)
        self.error = "cancelled" if isinstance(error, asyncio.CancelledError) else kind
        self.attributes["error.type"] = self.error
