"""Where the spans of a request go when it has ended: to a file for trace viewers, to an OpenTelemetry collector, or
nowhere.

What must hold: nothing here waits for a disk or a network, since all requests share one loop; threads do that, and lose
what is too much. A trace that its caller does not want recorded, as its `traceparent` says, is not.
"""

from __future__ import annotations

import socket

from kvstore_client.engine.trace_file import Slice, TraceFile, trace_events
from kvstore_serving.proxy.ask import CHAT, COMPLETIONS
from kvstore_serving.proxy.otlp import Collector
from kvstore_serving.proxy.record import Record
from kvstore_serving.proxy.settings import Settings, SettingsError

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion"}


class Tracing:
    """One event loop. `on`: whether there is anywhere to go."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError`: the file cannot be written, or what sends spans is not installed."""
        self._collector = Collector(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self._file: TraceFile | None = None
        if settings.trace_file:
            try:
                self._file = TraceFile(settings.trace_file)
            except (OSError, ValueError) as error:
                raise SettingsError(f"--trace-file: {error}") from None
        self.on = self._file is not None or self._collector is not None
        self._writer = f"{socket.gethostname()}:{settings.port}"

    def ended(self, record: Record) -> None:
        """Take the spans of a request that has ended."""
        if not self.on or not record.trace.sampled:
            return
        _finish(record)
        spans = [record.root, *record.spans]
        since_1970 = record.time - record.began
        if self._collector is not None:
            self._collector.send(record.trace, spans, since_1970)
        if self._file is not None:
            root = record.root
            slices = [
                Slice(
                    each.row,
                    each.name,
                    each.began + since_1970,
                    (each.ended or root.ended) + since_1970,
                    each.attributes,
                )
                for each in spans
            ]
            slices += [
                Slice(span.row, each.name, each.at + since_1970, None, each.attributes)
                for span in spans
                for each in span.events
            ]
            self._file.write(trace_events(record.trace.trace_id, record.id, self._writer, slices))

    def close(self) -> None:
        """Write and send what waits, for some seconds at most."""
        if self._file is not None:
            self._file.close()
        if self._collector is not None:
            self._collector.close()


def _finish(record: Record) -> None:
    """The root span says what the record says, in OpenTelemetry's words as far as it has them."""
    root = record.root
    root.ended = record.began + record.seconds
    known = {
        "http.response.status_code": record.status,
        "gen_ai.operation.name": _OPERATIONS.get(record.path),
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "kvstore.request_id": record.id,
        "kvstore.decision": record.decision,
        "kvstore.why": record.why,
        "kvstore.outcome": record.outcome,
        "kvstore.retries": record.retries,
    }
    root.attributes |= {name: value for name, value in known.items() if value not in (None, "")}
    if record.outcome in ("failed", "cut"):
        root.error = root.attributes["error.type"] = str(record.status) if record.status >= 500 else record.outcome
