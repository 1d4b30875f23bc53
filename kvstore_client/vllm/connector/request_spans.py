"""Records the times of each request's spans in this engine, for the option `trace_file`.

P is an engine that computes the prompt of the request for another engine in a hand-over. D is any other engine. A
request has these spans on these rows of a timeline:

* "P", "D": `queue` lasts until the engine gives the request blocks. `load` lasts until these blocks are filled from the
  store or the host tier. `prefill` (P) or `decode` (D) lasts from then until the request ends, and includes the time
  for computing the tokens that were not loaded.
* "store, from P", "store, to D": `promise` lasts until the store has answered which engine computes the prompt. `get`
  is a load, from the view of the store's client. `set` (P) lasts from the time when the first block is on its way until
  the last one is stored.

Only the engine core's thread uses this module. No call blocks or raises. A record is kept until its request has ended
and the last of its blocks is stored.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_client.engine.spans import Span
from kvstore_client.engine.trace_context import TraceContext, new_trace, parse_traceparent
from kvstore_client.vllm.connector.held_back import HeldBack

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class _Times:
    """The times of one request, by `time.monotonic`. A time is 0 if the request has not reached that point."""

    request: Request
    trace: TraceContext
    side: str  # P or D
    arrived: float
    added: float
    allocated: float = 0.0
    loaded: float = 0.0
    saving: float = 0.0
    finished: float = 0.0
    load: dict[str, Any] = field(default_factory=dict)
    held_back: dict[str, float] = field(default_factory=dict)
    answered: float = 0.0


class RequestSpans:
    """Records the times of requests in progress, and writes the spans of requests that have ended to a file."""

    def __init__(self, path: str | Path, engine_url: str = "") -> None:
        """Raises ValueError if the file cannot be written, or if the SDK that makes spans is not installed."""
        try:
            from kvstore_client.engine.span_export import SpanSender, to_file

            processor = to_file(path)
        except ImportError as error:
            raise ValueError(
                f'kvstore: trace_file needs the OpenTelemetry SDK ({error}): pip install "llm-kvstore[tracing]"'
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"kvstore: trace_file: {error}") from None
        writer = engine_url.partition("://")[2] or f"{socket.gethostname()}:{os.getpid()}"
        self._sender = SpanSender("kvstore-connector", writer, [processor])
        self._times: dict[str, _Times] = {}

    def added(self, request: Request, traceparent: str, *, prefills: bool) -> None:
        """Add a request, unless it is already known or is not to be recorded. `prefills`: whether another engine
        continues with the request."""
        if request.request_id in self._times:
            return
        headers = request.trace_headers or {}
        trace = parse_traceparent(traceparent or headers.get("traceparent", "")) or new_trace()
        if trace.sampled:
            now = time.monotonic()
            arrived = now - max(0.0, time.time() - request.arrival_time)
            self._times[request.request_id] = _Times(request, trace, "P" if prefills else "D", arrived, now)

    def allocated(self, request_id: str, load_tokens: int) -> None:
        """Note that the engine has given blocks to the request, and that `load_tokens` tokens are to be loaded into
        them."""
        times = self._times.get(request_id)
        if times is not None and not times.allocated:
            times.allocated = time.monotonic()
            times.load["tokens"] = load_tokens

    def loaded(self, request_id: str, blocks: int, failed: int) -> None:
        """Note that the request's load of `blocks` blocks has ended, and that `failed` of them failed."""
        if (times := self._times.get(request_id)) is not None:
            times.loaded = time.monotonic()
            times.load |= {"blocks": blocks, "failed_blocks": failed}

    def held_back(self, request_id: str, found: HeldBack) -> None:
        """Note for how long the connector has held back the request. A request that loses its blocks may be held back
        several times."""
        if (times := self._times.get(request_id)) is not None:
            parts = {"asked_s": found.asked_s, "computing_s": found.computing_s, "held_back_s": found.seconds}
            times.held_back = {name: round(times.held_back.get(name, 0.0) + part, 6) for name, part in parts.items()}

    def saving(self, request_id: str) -> None:
        """Note that blocks of the request are on their way to the store."""
        times = self._times.get(request_id)
        if times is not None and not times.saving:
            times.saving = time.monotonic()

    def finished(self, request_id: str, answered: float, *, sending: bool) -> None:
        """Note that the request has ended. `answered`: the time when the store answered which engine computes the
        prompt. `sending`: whether `sent` will still be called."""
        if (times := self._times.get(request_id)) is not None:
            times.finished, times.answered = time.monotonic(), answered
            if not sending:
                self._write(times)

    def sent(self, request_id: str) -> None:
        """Note that the store has all blocks of the request that will be stored."""
        times = self._times.get(request_id)
        if times is not None and times.finished:
            self._write(times, time.monotonic())

    def close(self) -> None:
        self._sender.close()

    def _write(self, times: _Times, sent: float = 0.0) -> None:
        request = times.request
        del self._times[request.request_id]
        spans: list[Span] = []

        def add(row: str, name: str, began: float, ended: float, **args: Any) -> None:
            if began and ended:
                spans.append(Span(name, "internal", row, args, began, ended))

        side = times.side
        store = "store, from P" if side == "P" else "store, to D"
        add(side, "queue", times.arrived, times.allocated or times.finished, **times.held_back)
        add(store, "promise", times.added, times.answered)
        add(side, "load", times.allocated, times.loaded, **times.load)
        add(store, "get", times.allocated, times.loaded, **times.load)
        tokens = {"prompt_tokens": request.num_prompt_tokens, "output_tokens": request.num_output_tokens}
        began = times.loaded or times.allocated
        add(side, "prefill" if side == "P" else "decode", began, began and times.finished, **tokens)
        add(store, "set", times.saving, sent)
        self._sender.send(times.trace, request.request_id, spans, time.time() - time.monotonic())
