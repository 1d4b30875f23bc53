"""The record of one request while it is served, and its line in the access log.

The access log has one JSON object on each line, and goes to standard output or to the end of a file. Each line is one
write, so the file may be renamed at any time; the proxy then writes to the renamed file until it is restarted.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec
from starlette.datastructures import Headers, MutableHeaders

from kvstore_client.engine.spans import Kind, Span
from kvstore_client.engine.trace_context import TraceContext, new_trace, parse_traceparent
from kvstore_serving.proxy.ask import POLICY_HEADER
from kvstore_serving.proxy.hop import of_this_hop

log = logging.getLogger(__name__)

NOT_SERVED: Final = "none"  # the decision on a request that no engine was chosen for

# Headers that the proxy sets itself for each engine, or that describe only the user's connection to the proxy.
_NOT_PASSED_ON: Final = frozenset(
    {"host", "expect", "traceparent", "tracestate", "x-request-id", "forwarded", "x-real-ip", POLICY_HEADER}
)


@dataclass
class Record:
    """One request. `outcome`: one of ok, refused, failed, cut (a stream ended with an error), disconnect, rejected."""

    id: str
    path: str
    trace: TraceContext
    root: Span  # the whole request, as its user sees it
    headers: Headers  # the user's headers, for engines
    time: float = field(default_factory=time.time)
    model: str = ""
    stream: bool = False
    decision: str = NOT_SERVED
    why: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt found in a cache: a guess until an engine reports them
    prefill_cached_tokens: int | None = None  # how many tokens of a split prompt P reports as cached
    output_tokens: int = 0
    retries: int = 0
    status: int = 0
    outcome: str = ""
    ttft_s: float | None = None  # None unless the answer was streamed
    tpot_s: float | None = None
    seconds: float = 0.0
    prefill_outcome: str = ""
    mismatch: bool = False
    spans: list[Span] = field(default_factory=list)  # the parts of `root`

    @property
    def began(self) -> float:
        return self.root.began

    def note_cached(self, by_decode: int | None) -> None:
        """Note the number of the prompt's tokens that D reports as cached, or None if D does not report it."""
        found = self.prefill_cached_tokens if by_decode is None else self.found_before(by_decode)
        self.cached_tokens = self.cached_tokens if found is None else found

    def found_before(self, by_decode: int) -> int:
        """Return how many tokens of the prompt were cached before the request. `by_decode` is the number that D
        reports. That number includes the tokens that D got from P, if P has finished."""
        if self.prefill and self.prefill_cached_tokens is not None:
            return self.prefill_cached_tokens
        return min(by_decode, self.cached_tokens) if self.prefill and self.prefill_outcome == "ok" else by_decode

    @contextlib.contextmanager
    def span(self, name: str, kind: Kind = "internal", row: str = "proxy") -> Iterator[Span]:
        """Measure a part of the request, until the `with` block ends."""
        span = Span(name, kind, row, parent=self.root.id)
        self.spans.append(span)
        try:
            yield span
        except BaseException as error:
            span.failed(error)
            raise
        finally:
            span.ended = time.monotonic()

    def for_engine(self, span: Span, attempt: int = 0) -> MutableHeaders:
        """Return the headers for the engine's request that this span measures. Each further attempt gets another id,
        because the engine may still be serving the one before."""
        headers = self.headers.mutablecopy()
        headers["traceparent"] = self.trace.header(span.id)
        headers["x-request-id"] = f"{self.id}-{attempt}" if attempt else self.id
        return headers

    def line(self) -> dict[str, Any]:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.time))
        return {
            "time": f"{seconds}.{int(self.time % 1 * 1000):03d}Z",
            "id": self.id,
            "trace": self.trace.trace_id,
            "path": self.path,
            "model": self.model,
            "stream": self.stream,
            "decision": self.decision,
            "why": self.why,
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": _rounded(self.ttft_s),
            "tpot_s": _rounded(self.tpot_s),
            "seconds": _rounded(self.seconds),
            "status": self.status,
            "outcome": self.outcome,
            "retries": self.retries,
            "prefill_outcome": self.prefill_outcome,
            "mismatch": self.mismatch,
        }


def begin(method: str, path: str, headers: Headers) -> Record:
    """Return the record of a request with these headers."""
    trace = parse_traceparent(",".join(headers.getlist("traceparent")))  # a header that occurs twice is ignored
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    left_out = of_this_hop(",".join(headers.getlist("connection"))) | _NOT_PASSED_ON
    passed = [
        (name, value)
        for name, value in headers.raw
        if (each := name.decode("latin-1")) not in left_out and not each.startswith("x-forwarded-")
    ]
    state = ",".join(headers.getlist("tracestate"))
    if trace is not None and state:
        passed.append((b"tracestate", state.encode("latin-1")))
    root = Span(f"{method} {path}", "server", "proxy", {"http.request.method": method, "http.route": path})
    return Record(given if usable else secrets.token_hex(16), path, trace or new_trace(), root, Headers(raw=passed))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


class AccessLog:
    """Writes lines to standard output (``-``), to a file, or nowhere (empty)."""

    def __init__(self, target: str) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self._file: TextIO | None = None
        if target == "-":
            self._file = sys.stdout
        elif target:
            self._file = Path(target).open("a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record.line()).decode() + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not make requests fail
            log.warning("kvstore proxy: the access log cannot be written: %s", error)

    def close(self) -> None:
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()
