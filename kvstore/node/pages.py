"""What the node's HTTP server answers: a page for people, its state as JSON, metrics and probes.

`Pages._answers` has every path. `__call__` is the one place that each request passes before its path is looked at;
there, who asks is checked. The page is files of `kvstore/node/page/`, read once; it has no script or style of its
own text, loads nothing from elsewhere, and its policy (Content-Security-Policy) has browsers hold it to that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from kvstore.node.health import Health
from kvstore.node.history import Looks
from kvstore.node.http_logins import HTTPLogins, Refusal
from kvstore.node.metrics import NodeCollector
from kvstore.node.status import COLUMNS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

FIRST_LOOK_S: Final = 2.0  # that a request for the state waits right after the start
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_GUARDS: Final = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]


class Pages:
    """The WSGI application. Any number of threads call it at once."""

    def __init__(self, health: Health, node: str, settings: dict[str, str], logins: HTTPLogins | None = None) -> None:
        """node: what it is called. settings: those in effect, as text. logins: who may ask; None: everybody."""
        self._logins = logins
        registry = CollectorRegistry()
        registry.register(NodeCollector(health))
        ProcessCollector(registry=registry)  # for this process, the supervisor
        self._health = health
        self.looks = Looks(health, node, settings)
        self._answers: dict[str, Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]] = {
            "/metrics": make_wsgi_app(registry),
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status.json": self._status,
            **{path: _File(name, kind) for path, (name, kind) in _FILES.items()},
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        method, environ["REQUEST_METHOD"] = environ["REQUEST_METHOD"], "GET"
        if method not in ("GET", "HEAD"):
            return answer(start_response, "405 Method Not Allowed", "expected GET or HEAD\n")
        if self._logins is not None:
            try:
                self._logins.check(environ)
            except Refusal as refusal:
                return answer(start_response, refusal.status, f"{refusal}\n", more=refusal.headers)
        found = self._answers.get(environ.get("PATH_INFO", "") or "/")
        if found is None:
            paths = ", ".join(path for path in self._answers if "." not in path)
            body: Iterable[bytes] = answer(start_response, "404 Not Found", f"expected one of {paths}\n")
        else:
            body = found(environ, start_response)
        return [] if method == "HEAD" else body

    def _healthz(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self._health.alive():
            return answer(start_response, "200 OK", "ok\n")
        return answer(start_response, "503 Service Unavailable", "no shard answers; /readyz says why\n")

    def _readyz(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        readiness = self._health.readiness()
        status = "200 OK" if readiness.ready else "503 Service Unavailable"
        return answer(start_response, status, msgspec.json.format(msgspec.json.encode(readiness)) + b"\n", JSON)

    def _status(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status = self.looks.status(FIRST_LOOK_S)
        if not status:
            return answer(start_response, "503 Service Unavailable", "the server is starting; /readyz says how far\n")
        return answer(start_response, "200 OK", status, JSON)


def _columns() -> str:
    """-> the heads of the columns that fields of INFO have in the table of shards."""
    return "".join(
        f'<th scope="col" class="number" data-field="{field.name}" data-unit="{field.unit}" '
        f'title="{escape(field.help)}">{escape(field.page)}</th>'
        for field in COLUMNS
    )


class _File:
    """A file of the page. Browsers keep it, and ask whether it has changed."""

    def __init__(self, name: str, kind: str) -> None:
        self._kind = kind
        text = (files("kvstore.node") / "page" / name).read_text(encoding="utf-8")
        self._data = text.replace("<!-- columns -->", _columns()).encode()
        self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:16]}"'

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self._tag in environ.get("HTTP_IF_NONE_MATCH", ""):
            start_response("304 Not Modified", [("ETag", self._tag), ("Cache-Control", "no-cache"), *_GUARDS])
            return []
        return answer(start_response, "200 OK", self._data, self._kind, self._tag)


def answer(
    start_response: StartResponse,
    status: str,
    body: str | bytes,
    kind: str = TEXT,
    tag: str = "",
    more: Sequence[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Answer with a whole body. tag: of what browsers may keep; empty: they must not. more: further headers."""
    data = body.encode() if isinstance(body, str) else body
    kept = [("Cache-Control", "no-cache"), ("ETag", tag)] if tag else [("Cache-Control", "no-store")]
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(data))), *kept, *_GUARDS, *more])
    return [data]
