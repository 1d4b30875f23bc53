"""The spans of a request within one process. As in OpenTelemetry, spans have attributes and events.

Spans are a few small objects, which are also used where their times are needed for other purposes. `span_export` passes
them to OpenTelemetry's SDK. Times come from `time.monotonic`, so that their order is right even if the clock is set.
Attributes are named according to OpenTelemetry's semantic conventions, where these have a name.
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
    """An event at one time within a span."""

    name: str
    at: float
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Span:
    """A part of a request's time. `row`: the row of a timeline that shows the span. `ended`: the end time, 0 before the
    span has ended. `parent`: the id of the span that contains it. If it is empty, the parent is the span of the
    request's sender. `error`: the error that ended it, empty if there was none."""

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
        """Add an event that happens now."""
        self.events.append(Moment(name, time.monotonic(), attributes))

    def failed(self, error: BaseException) -> None:
        """Record that an error ended the span. The recorded type is the error's `kind` if it has one, otherwise its
        class."""
        kind = getattr(error, "kind", type(error).__name__)
        self.error = "cancelled" if isinstance(error, asyncio.CancelledError) else kind
        self.attributes["error.type"] = self.error
