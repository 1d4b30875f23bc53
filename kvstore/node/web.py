"""The node's HTTP server. `Pages` answers the requests.

Each request has its own thread, and there are at most `MAX_REQUESTS` threads. When all threads are in use, the address
with the most connections loses its oldest one. For IPv6, the /64 network counts as the address. So a scraper that reads
slowly or clients that send nothing cannot keep probes out. An address that floods the port loses only its own
connections.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections import Counter
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvstore.networks import network_of
from kvstore.node.history import StatusHistory
from kvstore.node.http_pages import Pages
from kvstore.node.settings import HostPort

if TYPE_CHECKING:
    from kvstore.tls.certificate import Certificate

log = logging.getLogger("kvstore.server")

MAX_REQUESTS: Final = 32
PLACE_WAIT_S: Final = 0.2  # how long to wait for the oldest connection to end
READ_S: Final = 5.0  # how long a client may take to send its request, and to take the response
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many requests at once\n"


_NO_HTTP: Final = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n"
    b"this is the HTTP port; clients of the store connect to the server's --port\n"
)


class _ErrorLog(io.StringIO):
    """Takes the traceback of a failed request, which `wsgiref` would write outside the log. The traceback becomes a log
    line. Their rate is bounded, because clients can cause failures: prometheus_client fails at some Accept headers."""

    def flush(self) -> None:
        text = self.getvalue()
        if text:
            self.seek(0)
            self.truncate()
            log.warning("http: a request failed: %s", text.rstrip().rpartition("\n")[2])
            log.debug("http: %s", text)


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def handle(self) -> None:
        """Answer one request. A client of the store that connects here by mistake gets an error at once.
        `WSGIRequestHandler` would wait for the end of a line, which such a client does not send."""
        first = self.rfile.peek(1)[:1]  # type: ignore[attr-defined] # it is a BufferedReader
        if first and not first.isalpha():
            self.wfile.write(_NO_HTTP)
            return
        super().handle()

    def get_stderr(self) -> TextIO:
        return _ErrorLog()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: %s: %s", self.client_address[0], format % args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: HostPort, certificate: Certificate | None) -> None:
        self._certificate = certificate
        family, _, _, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        self._lock = threading.Lock()
        self._open: dict[Any, str] = {}  # the open connections, the oldest first, and their networks
        super().__init__(found, _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind the port, without the look-up of this host's name in DNS that the standard library makes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. With TLS, the connection's own thread does the handshake."""
        request, client_address = super().get_request()
        if self._certificate is not None:
            request.settimeout(READ_S)
            request = self._certificate.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. Runs on the accepting thread."""
        if not self._take_place():
            with contextlib.suppress(OSError):
                request.settimeout(PLACE_WAIT_S)
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = network_of(client_address[0])
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._leave(request)
            raise

    def _take_place(self) -> bool:
        if self._places.acquire(blocking=False):
            return True
        with self._lock:
            of_network = Counter(self._open.values())
            most = max(of_network.values(), default=0)
            oldest = next((each for each, network in self._open.items() if of_network[network] == most), None)
            if oldest is not None:
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=PLACE_WAIT_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request. Runs on the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that failed because its client left or was too slow."""
        log.debug("http: %s: the connection failed", client_address[0], exc_info=True)


class HTTPServer:
    """Listens once it is constructed, and answers requests after `start`. Raises `OSError` when it cannot listen.

    `certificate`: the certificate for HTTPS. Without one, the server speaks HTTP.
    """

    def __init__(self, address: HostPort, certificate: Certificate | None = None) -> None:
        self._certificate = certificate
        self._server = _Server(address, certificate)
        self.port: int = self._server.server_address[1]
        self._looks: StatusHistory | None = None
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvstore-http", daemon=True)

    def start(self, pages: Pages) -> None:
        """Begin to answer requests, on the server's own threads."""
        if self._certificate is not None:
            self._certificate.watch.start()
        self._server.set_app(pages)
        self._looks = pages.looks
        self._looks.start()
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests. Requests in progress are not interrupted."""
        if self._looks is not None:
            self._looks.close()
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
