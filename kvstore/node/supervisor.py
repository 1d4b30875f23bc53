"""The supervisor, which binds the ports, starts the shards, restarts shards that die, and stops all of them at the end.

It owns the listening sockets, so a shard that dies keeps its port and its clients' pending connections. The process
that replaces a dead shard has no blocks in memory, so clients get misses. The supervisor holds no blocks and is idle
while all shards run. If the supervisor dies, the kernel ends its shards (parent-death signal). In a cluster, the
supervisor registers the node, and withdraws it before the shards stop.

Over 400 lines because the code that starts, watches and stops all parts of a node must agree on their order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

import kvstore
from kvstore.auth.policy import member_cookie
from kvstore.cluster.members import DirectoryError, Member
from kvstore.node import unix_sockets
from kvstore.node.access import check_access
from kvstore.node.announcing import Announcer, ServiceManager
from kvstore.node.changes import Changes
from kvstore.node.children import Child, ShardChild, StartError, bind, reap_adopted
from kvstore.node.config import ServerConfig
from kvstore.node.disk_folder import DiskFolder
from kvstore.node.fitting import is_loopback, metrics_address, transport_misfits
from kvstore.shard.setup import ShardConfig
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ShardAddress

if TYPE_CHECKING:
    from kvstore.node.health import Health
    from kvstore.node.registration import Registration
    from kvstore.node.tls import NodeTLS
    from kvstore.node.web import HTTPServer
    from kvstore.wire.queries import Dial

log = logging.getLogger("kvstore.server")

DRAIN_S: Final = 5.0
DISK_STOP_S: Final = 360.0  # how long a shard may take to write its memory to disk and to commit the index
SHARD_START_S: Final = 30.0


class Supervisor:
    """One node: its shards, its HTTP server and its membership. The main thread runs it; `run` blocks."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._systemd = ServiceManager(os.environ)
        self._announcer = Announcer(config, self._systemd)
        self._signals = 0  # signals to stop, so far
        self._signal = signal.SIGTERM  # the last signal
        self._stopping = False
        self._adopts = os.getpid() == 1  # in a container without an init
        self._restarts = 0
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._changes = Changes(config)
        self._selector.register(self._changes.fd, selectors.EVENT_READ)
        for misfit in transport_misfits(config):
            raise StartError(f"--{misfit}")
        self._member_secret = check_access(config)
        self._disk = DiskFolder.open(config)
        listeners = bind(config.host, config.port, config.shards)
        self._unix_users = unix_sockets.users_of(config)
        self._unix = unix_sockets.listen(config, config.host, listeners[0].getsockname()[1])
        self._children = [
            ShardChild(
                number,
                listener,
                self._selector,
                self._shard_config,
                *(self._unix[number] if self._unix else (None, "")),
            )
            for number, listener in enumerate(listeners)
        ]
        self._tls = self._make_tls()
        self._processes: list[Child] = [*self._children, *(self._tls.children if self._tls is not None else ())]
        # Each shard reads from its own pipe, to which the other shards write. The pipes outlive the processes.
        pipes = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in listeners] if config.shards > 1 else []
        self._heard_fds, self._told_fds = [heard for heard, _ in pipes], [told for _, told in pipes]
        self._http = self._listen_http()
        self._health: Health | None = None
        self.port = self._children[0].address[1]
        if config.cluster is not None or config.node_id is not None:
            self.node = config.cluster_node_id
        else:
            self.node = f"{socket.gethostname()}:{self.port}"
        # Placement hashes the names of the shards, so if there are blocks on disk, the names must not change at a
        # restart.
        name = self._disk.identity if self._disk is not None else self.node
        self._addresses = [
            ShardAddress(f"{name}/{child.number}", "", child.address[1], float(config.shard_memory_bytes))
            for child in self._children
        ]
        # A process that shows the cookie to a shard is a member of the cluster.
        secret = self._member_secret
        self._cookie = (
            member_cookie(secret, self.node, config.advertised_host, self.port) if secret else secrets.token_hex(16)
        )
        self._registration = self._make_registration()
        self._draining = False

    def run(self) -> int:
        """Serve until a signal to stop. Return the exit status of the process."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # moving blocks needs many connections
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self._adopts:
            signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler wakes the loop
        # The kernel may give a signal to any thread. Python handles the signal on this thread, which may be waiting, so
        # wake it.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        started = time.monotonic()
        http_port = self._http.port if self._http is not None else None
        self._announcer.starting(self.node, [child.address for child in self._children], http_port)
        status = self._serve()
        self._announcer.stopped(round(time.monotonic() - started, 3), status)
        return status

    def _serve(self) -> int:
        if self._http is not None:
            self._serve_http(self._http)
        for child in self._processes:
            child.start()
        if not self._await_ready():
            self._stopping = True
            self._stop()
            return 0 if self._asked_to_stop else 1
        self._announcer.ready(self.port)
        if self._http is None:  # the page polls the shards otherwise; this imports much, so not before they serve
            self._make_health().watch()
        if self._registration is not None and not self._asked_to_stop:
            self._registration.start(metrics_address(self.config, self._http.port if self._http is not None else 0))
        while not self._stopping:
            if self._asked_to_stop and not self._draining:
                self._begin_to_leave()
            else:
                self._watch()
        if self._registration is not None:
            self._registration.stop()
        self._stop()
        return 0

    def _make_tls(self) -> NodeTLS | None:
        if self.config.tls_cert is None:
            return None
        from kvstore.node.tls import NodeTLS

        return NodeTLS(self.config, self._children, self._selector)

    def _dial(self) -> Dial:
        """Return the function by which this process connects to shards."""
        from kvstore.wire.queries import dial_tcp

        return dial_tcp if self._tls is None else self._tls.dial

    def _pid(self, shard: int) -> int:
        process = self._children[shard].process
        return process.pid if process is not None else 0

    def _not_serving(self, shard: int) -> str:
        """Return why a shard does not serve clients; empty if it does."""
        reason = self._children[shard].not_serving
        if self._tls is not None and not reason:
            its_reason = self._tls.children[shard].why_not_serving()
            reason = f"TLS: {its_reason}" if its_reason else ""
        return reason

    def _make_registration(self) -> Registration | None:
        config = self.config
        url = config.cluster_url
        if url is None:
            return None
        from kvstore.node.registration import Registration

        host = config.advertised_host
        if is_loopback(host) and not all(is_loopback(endpoint) for endpoint, _ in url.endpoints):
            log.warning("node %s advertises %s, which only this machine can reach: see --advertise", self.node, host)
        member = Member(
            self.node,
            "joining",
            [msgspec.structs.replace(shard, host=host) for shard in self._addresses],
            zone=config.zone,
            version=kvstore.__version__,
            instance=uuid.uuid4().hex,
            started=time.time(),
            cookie="" if self._member_secret else self._cookie,
        )
        here = [
            msgspec.structs.replace(shard, host=child.address[0])
            for shard, child in zip(self._addresses, self._children, strict=True)
        ]
        try:
            return Registration(
                url,
                member,
                here,
                lease_s=config.lease_seconds,
                grace_s=config.grace_seconds,
                drained=self._on_drained,
                secret=self._member_secret,
                dial=self._dial(),
            )
        except DirectoryError as error:
            raise StartError(f"cluster: {error}") from None

    @property
    def _asked_to_stop(self) -> bool:
        return self._signals > 0

    @property
    def _drains_first(self) -> bool:
        return self._registration is not None and self.config.drain_seconds > 0

    def _begin_to_leave(self) -> None:
        """Begin to drain, if that is configured; otherwise begin to stop."""
        self._announcer.stopping(self._signal, DRAIN_S, self.config.drain_seconds if self._drains_first else 0)
        if self._registration is None or not self._drains_first:
            self._stopping = True
            return
        self._draining = True
        self._registration.drain(self.config.drain_seconds)

    def _on_drained(self) -> None:
        self._stopping = True
        os.write(self._wake_w, b"x")

    def _listen_http(self) -> HTTPServer | None:
        if self.config.http is None:
            return None
        from kvstore.node.web import HTTPServer

        try:
            return HTTPServer(self.config.http, self._tls.certificate if self._tls is not None else None)
        except OSError as error:
            raise StartError(f"cannot listen on {self.config.http} for HTTP: {error}; choose another --http") from None

    def _serve_http(self, http: HTTPServer) -> None:
        from kvstore.node.http_logins import http_logins
        from kvstore.node.http_pages import Pages

        http.start(Pages(self._make_health(), self.node, self._changes.shown, http_logins(self.config, self.node)))

    def _make_health(self) -> Health:
        from kvstore.node.health import Health, NodeView

        addresses = [child.address for child in self._children]
        cluster = self._registration.status if self._registration is not None else None
        view = NodeView(
            addresses,
            not_serving=self._not_serving,
            pid=self._pid,
            stopping=lambda: self._asked_to_stop,
            restarts=lambda: self._restarts,
            cluster=cluster,
            cookie=self._cookie,
            dial=self._dial(),
            tls=self._tls.uses if self._tls is not None else None,
        )
        self._health = Health(view)
        return self._health

    def _on_signal(self, number: int, _frame: object) -> None:
        """Handle a signal to stop.

        Without a drain, the first signal stops the server and the next one kills the shards. With a drain, the first
        signal begins the drain, the second ends the drain and stops the server, and the third kills the shards. The
        second signal never kills, even if the drain has ended by itself. It may be meant to end the drain while shards
        are already writing their memory to disk.
        """
        self._signals += 1
        self._signal = signal.Signals(number)
        if self._signals > 1:
            if self._stopping and self._signals > 1 + self._drains_first:
                for child in self._processes:
                    if child.process is not None:
                        child.process.kill()
            self._stopping = True

    def _on_hangup(self, _number: int, _frame: object) -> None:
        """Make the processes read the file of principals and the certificates again. A process that is starting reads
        them anyway."""
        if self._tls is not None:
            self._tls.certificate.watch.ask()
        for child in self._processes:
            if child.process is not None and child.ready_fd < 0:
                child.process.send_signal(signal.SIGHUP)

    def _shard_config(self, child: ShardChild, ready_fd: int) -> ShardConfig:
        return ShardConfig(
            node=self.node,
            shard=child.number,
            listen_fd=child.listener.fileno() if self._tls is None else self._tls.take_fd(child.number),
            handed=self._tls is not None,
            unix_fd=child.unix.fileno() if child.unix is not None else -1,
            unix_path=child.unix_path,
            unix_users=self._unix_users,
            transport=self.config.reads_with[0],
            ready_fd=ready_fd,
            heard_fd=self._heard_fds[child.number] if self._heard_fds else -1,
            told_fds=[fd for number, fd in enumerate(self._told_fds) if number != child.number],
            memory_bytes=self.config.shard_memory_bytes,
            segment_bytes=int(self.config.segment),
            shards=self._addresses,
            log_level=self.config.log_level,
            log_format=self.config.log_format,
            slowlog_ms=self.config.slowlog_ms,
            drain_s=DRAIN_S,
            policy=self.config.policy,
            rules=[*self.config.namespaces, NamespaceRule("*", self.config.ttl_seconds)],
            disk=self._disk.shard_config(child.number) if self._disk is not None else None,
            transient_bytes=self.config.shard_transient_bytes,
            scrub_mbps=self.config.scrub_mbps,
            changes_fd=self._changes.told_fd,
            changed=self._changes.in_force,
            zone=self.config.zone,
            cookie=self._cookie,
            auth=self.config.auth or "",
            audit=self.config.audit or "",
        )

    def _await_ready(self) -> bool:
        """Wait until every shard accepts requests. Return False if the server was stopped or a shard failed before
        that."""
        deadline = time.monotonic() + SHARD_START_S
        while any(child.ready_fd >= 0 for child in self._processes):
            self._systemd.alive()
            for child, fd in self._events(max(0.0, deadline - time.monotonic())):
                if fd == child.ready_fd and not child.take_ready():
                    log.error("%s %d did not start; see its own message above", child.kind, child.number)
                    return False
            if self._asked_to_stop:
                self._announcer.stopping(self._signal, DRAIN_S, 0)
                return False
            if time.monotonic() > deadline:
                log.error("not all shards were ready after %g s", SHARD_START_S)
                return False
        return True

    def _events(self, timeout_s: float | None) -> Iterator[tuple[Child, int]]:
        """Wait for an event, for at most `timeout_s`. Yield the child processes and descriptors that have one. Other
        events are handled here."""
        for key, _ in self._selector.select(self._systemd.wait_s(timeout_s)):
            if key.data is not None:
                yield key.data, key.fd
            elif key.fd == self._changes.fd:
                self._changes.take()
            else:
                os.read(self._wake_r, 64)

    def _watch(self) -> None:
        """Wait for an event, and handle it: a shard is ready or has died, a restart is due, or a signal came."""
        now = time.monotonic()
        due = [child.restart_at for child in self._processes if child.process is None]
        if self._tls is not None:
            due.append(now + self._tls.look())
        self._systemd.alive()
        for child, fd in self._events(max(0.0, min(due) - now) if due else None):
            if fd == child.ready_fd:
                if child.take_ready():
                    assert child.process is not None
                    log.warning("%s %d is serving again, pid %d", child.kind, child.number, child.process.pid)
                    if self._registration is not None and isinstance(child, ShardChild):
                        self._registration.shard_restarted()
            elif fd == child.pid_fd:
                child.bury()
        if self._adopts:
            reap_adopted({child.process.pid for child in self._processes if child.process is not None})
        now = time.monotonic()
        for child in self._processes:
            if child.process is None and child.restart_at <= now and not self._stopping:
                try:
                    child.start()
                    self._restarts += isinstance(child, ShardChild)
                except OSError as error:
                    child.start_failed(error)

    def _stop(self) -> None:
        """Stop the HTTP server and the shards, and wait until they have ended. Shards that have not ended by their
        deadline are killed."""
        if self._http is not None:
            self._http.close()
        if self._health is not None:
            self._health.close()
        running = [child.process for child in self._processes if child.process is not None]
        for child in self._children:
            child.listener.close()
        unix_sockets.remove(self._unix)
        if self._tls is not None:
            self._tls.stop()
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_S + 5.0 + (DISK_STOP_S if self._disk else 0.0)
        for process in running:
            while process.poll() is None and time.monotonic() < deadline:
                self._systemd.alive()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._systemd.wait_s(max(0.0, deadline - time.monotonic())))
            if process.poll() is None:
                log.error("process %d did not stop; killed", process.pid)
                process.kill()
                process.wait()
