"""Passes spans to OpenTelemetry's SDK, which writes them to a file or sends them to a collector. This module needs the
extra `tracing`, so import it only when spans are wanted.

A span's id is sent to engines before the span ends. So this module builds complete spans itself and passes them to the
SDK's batch processor. The processor has a bounded queue and a thread. It drops spans when the queue is full, and logs
failures to export.

A `SpanFile` has lines of OTLP's JSON, in the format that the Collector's `otlpjsonfile` receiver reads. The SDK builds
OTLP's messages. The SDK's own file exporter is not used, because it is still in beta, does not bound its files, and
lets two processes write the same file.

These rules must hold. The file has only whole lines after each write. Its size is bounded: a full file is renamed to
FILE.1, which replaces the previous FILE.1. Only one process writes a file. Spans that cannot be written to the disk are
lost, which is logged, and no thread waits for them.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvstore import __version__
from kvstore_client.engine.spans import Span
from kvstore_client.engine.trace_context import TraceContext
from kvstore_client.engine.trace_file import HEADS, REQUEST_ID, ROW, WRITER

log = logging.getLogger(__name__)

MAX_TRACE_BYTES: Final = 64 << 20
_PATH: Final = "/v1/traces"
_FILE_DELAY_MS: Final = 50  # short, because readers of the file want the newest spans
_FILE_QUEUE: Final = 8192  # spans that wait for the disk
_CLOSE_S: Final = 3.0


class SpanSender:
    """Sends the spans of one process. Any thread may call it. Only `close` waits."""

    def __init__(self, service: str, writer: str, processors: Sequence[BatchSpanProcessor]) -> None:
        """`service`: the name of the service, unless OTEL_SERVICE_NAME is set. `writer`: the name of this process, such
        as gpu-1:4123. `processors`: the SDK's batch processors."""
        self._processors = processors
        name = os.environ.get("OTEL_SERVICE_NAME", service)
        self._resource = Resource.create({"service.name": name, "service.version": __version__, WRITER: writer})
        self._scope = InstrumentationScope(service, __version__)

    def send(self, trace: TraceContext, request_id: str, spans: Sequence[Span], since_1970: float) -> None:
        """Export the spans of one request, all of which have ended. `since_1970`: the number of seconds to add to their
        times, so that they count from 1970."""
        trace_id, flags = int(trace.trace_id, 16), TraceFlags(trace.flags)

        def context(span_id: str, is_remote: bool) -> SpanContext | None:
            return SpanContext(trace_id, int(span_id, 16), is_remote, flags) if span_id else None

        def nanoseconds(at: float) -> int:
            return round((at + since_1970) * 1e9)

        for span in spans:
            made = ReadableSpan(
                span.name,
                context(span.id, False),
                context(span.parent, False) or context(trace.parent_id, True),
                self._resource,
                {ROW: span.row, REQUEST_ID: request_id, **span.attributes},
                [Event(each.name, each.attributes, nanoseconds(each.at)) for each in span.events],
                kind=SpanKind[span.kind.upper()],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=nanoseconds(span.began),
                end_time=nanoseconds(span.ended),
                instrumentation_scope=self._scope,
            )
            for each in self._processors:
                each.on_end(made)

    def close(self) -> None:
        """Export the spans that wait, for at most 3 s. The SDK alone would try for longer if the collector does not
        answer."""
        closing = [threading.Thread(target=each.shutdown, daemon=True) for each in self._processors]
        for each in closing:
            each.start()
        for each in closing:
            each.join(_CLOSE_S)


def to_collector(endpoint: str) -> BatchSpanProcessor:
    """Return a processor that sends spans to a collector. `endpoint`: http://HOST:PORT, optionally with a path to use
    instead of /v1/traces. The SDK's own settings apply (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_BSP_…`)."""
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))


def to_file(path: str | Path) -> BatchSpanProcessor:
    """Return a processor that writes spans to a file. Raises the errors of `SpanFile`."""
    return BatchSpanProcessor(SpanFile(path), max_queue_size=_FILE_QUEUE, schedule_delay_millis=_FILE_DELAY_MS)


class SpanFile(SpanExporter):
    """A file of spans. Any thread may use it, but only one at a time."""

    def __init__(self, path: str | Path, most_bytes: int = MAX_TRACE_BYTES) -> None:
        """Open the file. An existing file is renamed to FILE.1. `most_bytes`: the size limit of FILE, and therefore of
        FILE.1.

        Raises `OSError` if the file cannot be written. Raises `ValueError` if the file has other content than spans, is
        not an ordinary file, or is being written by another process.
        """
        self._path = Path(path)
        self._most_bytes = most_bytes
        self._failing = False
        self._size = 0
        self._file = self._open()
        head = os.pread(self._file, max(map(len, HEADS)), 0)
        if head:
            if not head.startswith(HEADS):
                os.close(self._file)
                raise ValueError(f"{path} has content other than a trace; name a new file, or move this one away")
            self._rotate()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Add the spans as one line. If it cannot be written, the spans are lost."""
        try:
            self._append(_line(spans))
        except OSError as error:
            if not self._failing:
                log.warning("kvstore: %s cannot be written: %s; it will lack some requests", self._path, error)
            self._failing = True
            return SpanExportResult.FAILURE
        self._failing = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._most_bytes:
            self._rotate()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.pwrite(self._file, rest, self._size + len(line) - len(rest)) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"{self._path} is not an ordinary file; name one that is")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"another process writes {self._path}; give each process a file of its own") from None
        except BaseException:
            os.close(file)
            raise
        return file

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the file was removed meanwhile
            os.replace(self._path, f"{self._path}.1")
        old, self._file = self._file, self._open()
        os.close(old)
        self._size = 0


def _line(spans: Sequence[ReadableSpan]) -> bytes:
    """Return the spans in OTLP's JSON. It is protobuf's JSON, except that ids are hexadecimal."""
    document: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return msgspec.json.encode(document) + b"\n"
