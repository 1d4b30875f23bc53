"""The times of each request's parts in this engine, for the option `trace_file`.

Of a hand-over's two sides, P is the engine that computes the prompt for another one, and D any other. A request has
these parts, on these rows of a timeline:

    P, D           queue: until the engine gives it blocks. load: until they are filled from the store or the host tier.
                   prefill (P), decode (D): from then to its end, with what had to be computed
    store, from P  promise: until the store has said who computes the prompt. get: a load, as the store's client
    and to D       sees it. set (P): from the first block on its way to the last that is there

Thread: the engine core's. Nothing blocks or raises. A record ends with its request, or with the last of its blocks.
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
    """Of one request, by `time.monotonic`; 0: it has not come to that."""

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
    """What is known of requests under way, and the file for those that have ended."""

    def __init__(self, path: str | Path, engine_url: str = "") -> None:
        """Raises ValueError for a file that cannot be written, and if what makes spans is not installed."""
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
        """A request, unless it is known or nobody wants it recorded. prefills: another engine goes on with it."""
        if request.request_id in self._times:
            return
        headers = request.trace_headers or {}
        trace = parse_traceparent(traceparent or headers.get("traceparent", "")) or new_trace()
        if trace.sampled:
            now = time.monotonic()
            arrived = now - max(0.0, time.time() - request.arrival_time)
            self._times[request.request_id] = _Times(request, trace, "P" if prefills else "D", arrived, now)

    def allocated(self, request_id: str, load_tokens: int) -> None:
        """The engine has given it blocks, so many of whose tokens are to be loaded."""
        times = self._times.get(request_id)
        if times is not None and not times.allocated:
            times.allocated = time.monotonic()
            times.load["tokens"] = load_tokens

    def loaded(self, request_id: str, blocks: int, failed: int) -> None:
        """Its load has ended."""
        if (times := self._times.get(request_id)) is not None:
            times.loaded = time.monotonic()
            times.load |= {"blocks": blocks, "failed_blocks": failed}

    def held_back(self, request_id: str, found: HeldBack) -> None:
        """The connector has held it back; a request that loses its blocks, several times."""
        if (times := self._times.get(request_id)) is not None:
            parts = {"asked_s": found.asked_s, "computing_s": found.computing_s, "held_back_s": found.seconds}
            times.held_back = {name: round(times.held_back.get(name, 0.0) + part, 6) for name, part in parts.items()}

    def saving(self, request_id: str) -> None:
        """Blocks of it are on their way to the store."""
        times = self._times.get(request_id)
        if times is not None and not times.saving:
            times.saving = time.monotonic()

    def finished(self, request_id: str, answered: float, *, sending: bool) -> None:
        """It has ended. answered: when the store had said who computes its prompt. sending: `sent` is still to come."""
        if (times := self._times.get(request_id)) is not None:
            times.finished, times.answered = time.monotonic(), answered
            if not sending:
                self._write(times)

    def sent(self, request_id: str) -> None:
        """The store has the last of its blocks that it will have."""
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
