"""The proxy's page for people: an HTML file and a script, which shows /status and keeps it current.

Its style, charts and tables are those of the node's page. The page has no inline script or style and loads nothing from
other sites; its Content-Security-Policy makes browsers enforce that.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

GUARDS: Final = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)
_HTML, _CSS, _SCRIPT = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
_PROXY_FILES: Final = {
    "/": ("kvstore_serving.proxy", "index.html", _HTML),
    "/page.css": ("kvstore.node", "page.css", _CSS),
    "/proxy.js": ("kvstore_serving.proxy", "proxy.js", _SCRIPT),
    "/charts.js": ("kvstore.node", "charts.js", _SCRIPT),
    "/parts.js": ("kvstore.node", "parts.js", _SCRIPT),
    "/icon.svg": ("kvstore.node", "icon.svg", "image/svg+xml"),
}


def page_files() -> dict[str, tuple[str, bytes]]:
    """Return the content type and the content of each of the page's addresses."""
    return {
        path: (kind, (files(package) / "page" / name).read_bytes())
        for path, (package, name, kind) in _PROXY_FILES.items()
    }
