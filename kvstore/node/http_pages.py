"""The answers of the node's HTTP server: a page for people, the node's state as JSON, metrics and probes.

`Pages._answers` lists every path. Each request passes `__call__`, which checks the login before it finds the answer.
The page consists of the files of `kvstore/node/page/`, which are read once. The page's HTML has no inline script or
style and loads nothing from other sites. Its Content-Security-Policy makes browsers enforce that.
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
from kvstore.node.history import StatusHistory
from kvstore.node.http_logins import HTTPLogins, HttpRefusal
from kvstore.node.metrics import NodeCollector
from kvstore.node.status import COLUMNS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

FIRST_STATUS_S: Final = 2.0  # how long a request for the state may wait right after the start
TEXT_TYPE: Final = "text/plain; charset=utf-8"
JSON_TYPE: Final = "application/json"
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/parts.js": ("parts.js", "text/javascript; charset=utf-8"),
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
    """The WSGI application. Any number of threads may call it at once."""

    def __init__(self, health: Health, node: str, settings: dict[str, str], logins: HTTPLogins | None = None) -> None:
        """`node`: the node's name. `settings`: the settings in effect, as text. `logins`: checks the senders of
        requests; if None, any client may send requests."""
        self._logins = logins
        registry = CollectorRegistry()
        registry.register(NodeCollector(health))
        ProcessCollector(registry=registry)  # the metrics of this process, the supervisor
        self._health = health
        self.looks = StatusHistory(health, node, settings)
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
            except HttpRefusal as refusal:
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
        return answer(start_response, status, msgspec.json.format(msgspec.json.encode(readiness)) + b"\n", JSON_TYPE)

    def _status(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status = self.looks.status(FIRST_STATUS_S)
        if not status:
            return answer(start_response, "503 Service Unavailable", "the server is starting; /readyz says more\n")
        return answer(start_response, "200 OK", status, JSON_TYPE)


def _columns() -> str:
    """Return the headings of those columns in the table of shards that show fields of INFO."""
    return "".join(
        f'<th scope="col" class="number" data-field="{field.name}" data-unit="{field.unit}" '
        f'title="{escape(field.help)}">{escape(field.page)}</th>'
        for field in COLUMNS
    )


class _File:
    """A file of the page. Browsers keep the file, and ask whether it has changed."""

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
    kind: str = TEXT_TYPE,
    tag: str = "",
    more: Sequence[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Answer with a whole body. `tag`: the version of a body that browsers may keep; empty if they must not keep it.
    `more`: further headers."""
    data = body.encode() if isinstance(body, str) else body
    kept = [("Cache-Control", "no-cache"), ("ETag", tag)] if tag else [("Cache-Control", "no-store")]
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(data))), *kept, *_GUARDS, *more])
    return [data]
