"""Where the spans of an ended request go: to a file, to an OpenTelemetry collector, or nowhere.

Nothing here may wait for a disk or a network, because all requests share one event loop. Threads write the spans, and
drop spans when there are too many. A trace is not recorded if its caller says so in `traceparent`.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kvstore_serving.proxy.ask import CHAT, COMPLETIONS
from kvstore_serving.proxy.record import Record
from kvstore_serving.proxy.settings import Settings, SettingsError

if TYPE_CHECKING:
    from kvstore_client.engine.span_export import SpanSender

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion"}


class Tracing:
    """Records spans. Used by one event loop. `on`: whether there is a file or a collector to record to."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError` if the file cannot be written, or if the package that makes spans is not installed."""
        self._sender = _sender(settings) if settings.trace_file or settings.otlp_endpoint else None
        self.on = self._sender is not None

    def ended(self, record: Record) -> None:
        """Record the spans of a request that has ended."""
        if self._sender is None or not record.trace.sampled:
            return
        _finish(record)
        self._sender.send(record.trace, record.id, [record.root, *record.spans], record.time - record.began)

    def close(self) -> None:
        """Write and send the waiting spans. This takes a few seconds at most."""
        if self._sender is not None:
            self._sender.close()


def _sender(settings: Settings) -> SpanSender:
    try:
        from kvstore_client.engine.span_export import SpanSender, to_collector, to_file
    except ImportError as error:
        option = "--trace-file" if settings.trace_file else "--otlp-endpoint"
        raise SettingsError(
            f'{option} needs the OpenTelemetry SDK ({error}): pip install "llm-kvstore[tracing]"'
        ) from None
    processors = []
    if settings.trace_file:
        try:
            processors.append(to_file(settings.trace_file))
        except (OSError, ValueError) as error:
            raise SettingsError(f"--trace-file: {error}") from None
    if settings.otlp_endpoint:
        processors.append(to_collector(settings.otlp_endpoint))
    return SpanSender("kvstore-proxy", f"{socket.gethostname()}:{settings.port}", processors)


def _finish(record: Record) -> None:
    """End all spans, and copy the record's values to the root span. OpenTelemetry's names are used where it defines
    them."""
    root = record.root
    root.ended = record.began + record.seconds
    for span in record.spans:
        span.ended = span.ended or root.ended
    known = {
        "http.response.status_code": record.status,
        "gen_ai.operation.name": _OPERATIONS.get(record.path),
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "kvstore.decision": record.decision,
        "kvstore.why": record.why,
        "kvstore.outcome": record.outcome,
        "kvstore.retries": record.retries,
    }
    root.attributes |= {name: value for name, value in known.items() if value not in (None, "")}
    if record.outcome in ("failed", "cut"):
        root.error = root.attributes["error.type"] = str(record.status) if record.status >= 500 else record.outcome
