"""Spans to an OpenTelemetry collector, over HTTP. Needs the extra `tracing`, and imports it only when it is used.

Spans have their ids before they end, because engines are told them, so they are made whole here and given to the
SDK's batch processor: it has a bounded queue and a thread, drops what is too much, and logs what it cannot send. The
SDK's own settings (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_BSP_…`) count.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from kvstore import __version__
from kvstore_client.engine.trace_context import TraceContext
from kvstore_serving.proxy.settings import SettingsError
from kvstore_serving.proxy.spans import Span

_PATH: Final = "/v1/traces"
_CLOSE_S: Final = 3.0


class Collector:
    """Any thread. No method but `close` waits."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: http://HOST:PORT, perhaps with a path other than /v1/traces. Raises `SettingsError`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise SettingsError(
                f'--otlp-endpoint needs the OpenTelemetry SDK ({error}): pip install "llm-kvstore[tracing]"'
            ) from None
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
        name = os.environ.get("OTEL_SERVICE_NAME", "kvstore-proxy")
        self._resource = Resource.create({"service.name": name, "service.version": __version__})
        self._scope = InstrumentationScope("kvstore_serving.proxy", __version__)

    def send(self, trace: TraceContext, spans: Sequence[Span], since_1970: float) -> None:
        """The spans of one request. The first is the parent of all others. since_1970: to add to their times."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id, flags = int(trace.trace_id, 16), TraceFlags(trace.flags)

        def context(span_id: str, is_remote: bool) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), is_remote, flags)

        def nanoseconds(at: float) -> int:
            return round((at + since_1970) * 1e9)

        caller = context(trace.parent_id, True) if trace.parent_id else None
        root = context(spans[0].id, False)
        for span in spans:
            made = ReadableSpan(
                span.name,
                context(span.id, False),
                caller if span is spans[0] else root,
                self._resource,
                span.attributes,
                [Event(each.name, each.attributes, nanoseconds(each.at)) for each in span.events],
                kind=SpanKind[span.kind.upper()],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=nanoseconds(span.began),
                end_time=nanoseconds(span.ended or spans[0].ended),
                instrumentation_scope=self._scope,
            )
            self._processor.on_end(made)

    def close(self) -> None:
        """Send what waits, for at most 3 s: the SDK would try for longer where nobody answers."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
