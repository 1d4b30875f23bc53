"""What both clients stand on: links to all shards, who reads them, and what happens when one breaks.

No thread runs while all is well. A caller sends its requests itself and then waits: the first to wait *leads*, that
is, it polls every link and reads whatever arrives, for itself and for the others; when it has what it came for,
another waiter takes over. So a lone caller receives straight into its memory on its own thread, without a hand-over,
and many callers share the links without a lock around their requests.

A link that breaks is retried at once, on the caller's time, only if connecting succeeds immediately; otherwise it is
*broken*: calls fail (or miss) at once, and a background thread, which lives only as long as something is broken,
tries to connect with growing, jittered pauses. Thread-safe; `after_fork` makes it usable in a child process.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvstore import __version__, wire
from kvstore.cluster.placement import Placement
from kvstore_client.errors import TRANSPORT_ERRORS, ConnectionLost, KVStoreError, ProtocolError, Timeout
from kvstore_client.link import Link
from kvstore_client.operations import Operation
from kvstore_client.results import ClientStats

log = logging.getLogger("kvstore_client")

READ_BUDGET_BYTES: Final = 1 << 20  # then look whether somebody's reply is complete
LOOK_ANYWAY_S: Final = 0.1
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 1.0


@dataclass
class Node:
    """A server as the user named it; its shards are learned from it."""

    host: str
    port: int
    links: list[Link] = field(default_factory=list)


class View(NamedTuple):
    """All links and who owns a key among them; replaced as a whole. One link owns everything, without a placement."""

    links: Sequence[Link]
    placement: Placement | None


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``; `ValueError` otherwise."""
    parts = urlsplit(endpoint if isinstance(endpoint, str) else "")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port or parts.path or parts.query:
        raise ValueError(f"endpoint {endpoint!r}: expected tcp://HOST:PORT")
    return parts.hostname, port


class Core:
    """The links of one client."""

    def __init__(self, endpoints: Sequence[str], namespace: bytes, timeout_s: float) -> None:
        if not endpoints:
            raise ValueError("no endpoint: expected tcp://HOST:PORT or a list of them")
        self.stats = ClientStats()
        self.timeout_s = timeout_s
        self.closed = False
        self._namespace = namespace
        self._nodes = [Node(*parse_endpoint(endpoint)) for endpoint in endpoints]
        self._ids = itertools.count(1)
        self._new_process_state()
        self.view = View([], None)

    def _new_process_state(self) -> None:
        self._pid = os.getpid()
        self._epoll = select.epoll()
        self._by_fd: dict[int, Link] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lead = threading.Lock()
        self._hand_over = threading.Condition()
        self._waiters = 0
        self._map_lock = threading.Lock()
        self._prober: threading.Thread | None = None
        self._prober_lock = threading.Lock()
        self._stop_probing = threading.Event()

    def after_fork(self) -> None:
        """In a child process: forget what is shared with the parent, without a word on its connections."""
        if self.closed:
            return
        self._epoll.close()
        self._close_wake_fd()
        for link in self.links:
            link.reset_locks()
            link.close()
            link.pending = {}
            link.broken = None
        self._new_process_state()

    def _wake(self) -> None:
        """Have the leader look again: operations failed without a byte arriving (epoll forgets a closed socket)."""
        if self._close_wake_fd.alive:
            os.eventfd_write(self._wake_fd, 1)

    @property
    def links(self) -> Sequence[Link]:
        """The links of the present view."""
        return self.view.links

    def next_id(self) -> int:
        """A request id no other request of this client has."""
        return next(self._ids)

    def hello(self, request_id: int) -> bytes:
        """The HELLO of this client."""
        client = f"kvstore-client/{__version__} pid={os.getpid()}"
        return wire.encode(wire.Hello(request_id, wire.PROTOCOL_VERSION, self._namespace, client))

    # ---- connections -----------------------------------------------------------------------------------------

    def connect(self, fail_open: bool) -> None:
        """Reach every node. Unless `fail_open`, raises when one cannot be reached; refusals are always raised."""
        for node in self._nodes:
            link = Link(f"{node.host}:{node.port}", node.host, node.port, self.hello, self._wake)
            try:
                self._adopt(node, link, link.connect(self.timeout_s))
            except TRANSPORT_ERRORS as error:
                if not fail_open:
                    self.close()
                    raise
                node.links = [link]
                self._remap()
                self.break_link(link, error)

    def _adopt(self, node: Node, first: Link, welcome: wire.Welcome) -> None:
        """The node told its shards: have a link for each."""
        with self._map_lock:
            first.name = welcome.shards[welcome.shard].name
            known = {link.name: link for link in node.links}
            known[first.name] = first
            links = []
            for address in welcome.shards:
                host = address.host or node.host
                link = known.get(address.name) or Link(address.name, host, address.port, self.hello, self._wake)
                link.host, link.port, link.weight = host, address.port, address.weight
                links.append(link)
            node.links = links
        self._remap()
        self._watch(first)

    def _remap(self) -> None:
        links = [link for node in self._nodes for link in node.links]
        placement = (
            Placement([link.name for link in links], [link.weight for link in links]) if len(links) > 1 else None
        )
        self.view = View(links, placement)

    def _watch(self, link: Link) -> None:
        sock = link.sock
        if sock is not None:
            self._by_fd[sock.fileno()] = link
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def ensure_up(self, link: Link, deadline: float) -> None:
        """Have a connection, or raise: at once when the link is broken."""
        if link.sock is not None:
            return
        if self.closed:
            raise ConnectionLost("this client is closed")
        if link.broken is not None:
            raise type(link.broken)(f"{link.broken} (retrying in the background)")
        # Another caller may be connecting, with more time than this one has.
        if not link.connect_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Timeout(f"{link}: no connection by the deadline")
        try:
            if link.sock is not None:
                return
            if link.broken is not None:
                raise type(link.broken)(f"{link.broken} (retrying in the background)")
            try:
                self._connect_again(link, max(0.001, deadline - time.monotonic()))
            except KVStoreError as error:
                self.break_link(link, error)
                raise
        finally:
            link.connect_lock.release()

    def _connect_again(self, link: Link, timeout_s: float) -> None:
        before = link.connections
        welcome = link.connect(timeout_s)
        node = next(node for node in self._nodes if link in node.links)
        self._adopt(node, link, welcome)
        if before:
            self.stats.reconnects += 1
            log.info("%s: connected again", link)

    def break_link(self, link: Link, error: KVStoreError) -> None:
        """Let calls to this shard fail at once from now on, and have it probed in the background."""
        if link.broken is None:
            log.warning("%s; its blocks are misses until it is back", error)
        link.broken = error
        self.stats.failures += 1
        with self._prober_lock:
            if self._prober is None and not self.closed:
                self._stop_probing.clear()
                self._prober = threading.Thread(target=self._probe, name="kvstore-probe", daemon=True)
                self._prober.start()

    def _probe(self) -> None:
        """Reconnect broken links until none is left."""
        pause = FIRST_PAUSE_S
        while not self._stop_probing.wait(pause * random.uniform(0.5, 1.5)):
            broken = [link for link in self.links if link.broken is not None]
            for link in broken:
                with link.connect_lock:
                    if link.sock is not None:  # a caller was faster: its connection is in use
                        link.broken = None
                        continue
                    try:
                        self._connect_again(link, PROBE_TIMEOUT_S)
                    except KVStoreError as error:
                        link.broken = error
            with self._prober_lock:
                if all(link.broken is None for link in self.links):
                    self._prober = None
                    return
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def close(self) -> None:
        """Disconnect. Calls in progress fail with `ConnectionLost`."""
        if self.closed:
            return
        self.closed = True
        self._stop_probing.set()
        prober = self._prober
        if prober is not None and prober is not threading.current_thread():
            prober.join()
        for link in self.links:
            link.drop(ConnectionLost("this client is closed"))
        with self._hand_over:
            self._hand_over.notify_all()
        with self._lead:  # whoever led has seen that it is over
            self._epoll.close()
            self._close_wake_fd()

    # ---- requests --------------------------------------------------------------------------------------------

    def lost(self, link: Link, operation: Operation) -> None:
        """The deadline passed without a reply: stop waiting; a link that was silent all along is broken."""
        link.abandon(operation)
        error = Timeout(f"{link}: no reply by the deadline")
        operation.fail(error)
        if link.sock is not None and time.monotonic() - link.last_received > self.timeout_s * 0.9:
            self.break_link(link, error)
            link.drop(error)

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Until `ready()` or the deadline; reads links meanwhile. -> whether it is ready."""
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self.closed:
                return ready()
            if self._lead.acquire(blocking=False):
                try:
                    self._read_links(ready, deadline)
                finally:
                    self._lead.release()
                    if self._waiters:
                        with self._hand_over:
                            self._hand_over.notify_all()
            else:
                with self._hand_over:
                    self._waiters += 1
                    if self._lead.locked() and not ready():
                        self._hand_over.wait(left)
                    self._waiters -= 1
        return True

    def _read_links(self, ready: Callable[[], bool], deadline: float) -> None:
        epoll, by_fd = self._epoll, self._by_fd
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self.closed:
                return
            events = epoll.poll(min(left, LOOK_ANYWAY_S), 64)
            if not events:  # a shard that did not send what it announced leaves bytes below the low-water mark
                for each in self.links:
                    each.receive(READ_BUDGET_BYTES)
            for fd, _ in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    continue
                link = by_fd.get(fd)
                if link is not None and link.sock is not None:
                    link.receive(READ_BUDGET_BYTES)
            if self._waiters:
                with self._hand_over:
                    self._hand_over.notify_all()


def protocol_error(link: Link, reply: object) -> ProtocolError:
    """A reply of a type that does not answer the request."""
    return ProtocolError(f"{link}: unexpected reply {type(reply).__name__}")
