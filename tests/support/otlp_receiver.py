"""An OpenTelemetry collector for tests: a real HTTP server that receives OTLP in protobuf and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import Self


class OtlpReceiver:
    """`url`: for --otlp-endpoint. `spans`: the received spans, each with its `resource` (attributes of the service)."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        receiver = self
        self.spans: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces", self.path
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    service = _attributes(resource.resource.attributes)
                    for scope in resource.scope_spans:
                        receiver.spans += [{**_span(span), "resource": service} for span in scope.spans]
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def of(self, trace_id: str) -> list[dict[str, Any]]:
        """Return the spans of a trace, in the order in which they began."""
        return sorted((each for each in self.spans if each["trace_id"] == trace_id), key=lambda each: each["began"])


def _span(span: Any) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind,
        "trace_id": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "began": span.start_time_unix_nano / 1e9,
        "ended": span.end_time_unix_nano / 1e9,
        "attributes": _attributes(span.attributes),
        "events": {
            each.name: {"at": each.time_unix_nano / 1e9, **_attributes(each.attributes)} for each in span.events
        },
        "status": span.status.code,
    }


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
