"""Where the spans of a request go when it has ended: to a file, to an OpenTelemetry collector, or nowhere.

What must hold: nothing here waits for a disk or a network, since all requests share one loop; threads do that, and lose
what is too much. A trace that its caller does not want recorded, as its `traceparent` says, is not.
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
    """One event loop. `on`: whether there is anywhere to go."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError`: the file cannot be written, or what makes spans is not installed."""
        self._sender = _sender(settings) if settings.trace_file or settings.otlp_endpoint else None
        self.on = self._sender is not None

    def ended(self, record: Record) -> None:
        """Take the spans of a request that has ended."""
        if self._sender is None or not record.trace.sampled:
            return
        _finish(record)
        self._sender.send(record.trace, record.id, [record.root, *record.spans], record.time - record.began)

    def close(self) -> None:
        """Write and send what waits, for some seconds at most."""
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
    """All spans have ended, and the root span says what the record says, in OpenTelemetry's words as far as it has
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
