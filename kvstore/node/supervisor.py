"""The supervisor: binds the ports, starts the shards, restarts what dies, stops what runs.

It owns the listening sockets, so a shard that dies keeps its port and its clients' pending connections; the shard
started in its place begins empty, which for its clients is nothing but misses. The supervisor holds no data and does
nothing while all is well. If it dies itself, the kernel ends its shards (parent-death signal). In a cluster it is who
registers the node, and withdraws it before the shards stop.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import kvstore
from kvstore.cluster.members import DirectoryError, Member
from kvstore.disk.config import DiskConfig
from kvstore.disk.format import DiskFormatError, Layout, lock_shard, open_directory
from kvstore.node.config import ServerConfig
from kvstore.shard.setup import ShardConfig
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ShardAddress

if TYPE_CHECKING:
    from kvstore.node.registration import Registration

log = logging.getLogger("kvstore.server")

DRAIN_S: Final = 5.0
DISK_STOP_S: Final = 360.0  # a shard may have its memory to write, and the index to commit
START_S: Final = 30.0
MAX_RESTART_DELAY_S: Final = 5.0
STABLE_S: Final = 10.0  # a shard that lived so long restarts without delay
BIND_RETRY_S: Final = 1.0
_BACKLOG: Final = 512
# A shard runs the supervisor's own code, whatever the working directory holds (`python -m` would look there first).
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN_SHARD: Final = (
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; from kvstore.shard.process import main; main()"
)


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


@dataclass
class _Child:
    """A shard process and what is needed to start another in its place."""

    number: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    pid_fd: int = -1
    ready_fd: int = -1
    started: float = 0.0
    restart_at: float = 0.0
    delay_s: float = 0.0


def bind(host: str, port: int, shards: int) -> list[socket.socket]:
    """Listening sockets for all shards: `port`, `port`+1 …, or free ones for port 0. Raises `StartError`."""
    sockets: list[socket.socket] = []
    deadline = time.monotonic() + BIND_RETRY_S
    for number in range(shards):
        wanted = port + number if port else 0
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(
                    host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
                sockets.append(sock)
                break
            except (OSError, OverflowError) as error:
                code = error.errno if isinstance(error, OSError) else None
                if code == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.05)  # a predecessor that was just killed
                    continue
                for other in sockets:
                    other.close()
                reason = "the port is in use" if code == errno.EADDRINUSE else str(error)
                raise StartError(
                    f"cannot listen on {host}:{wanted} for shard {number}: {reason}; "
                    "choose another --host or --port (--port 0 picks free ones)"
                ) from None
    return sockets


def _open_disk(config: ServerConfig) -> Layout | None:
    """The disk tier's folder, made if it is new and used by nobody else. Raises `StartError`."""
    if config.disk is None:
        return None
    try:
        layout = open_directory(Path(config.disk).absolute(), config.shards, config.disk_segment_bytes)
        for shard in range(config.shards):
            os.close(lock_shard(layout.shard_directory(shard)))  # the shard takes it again
    except DiskFormatError as error:
        raise StartError(f"disk tier: {error}") from None
    return layout


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Supervisor:
    """One node."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._signals = 0  # that asked it to stop
        self._stopping = False
        self._restarts = 0
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._disk = _open_disk(config)
        listeners = bind(config.host, config.port, config.shards)
        self._children = [_Child(number, listener) for number, listener in enumerate(listeners)]
        self.port: int = listeners[0].getsockname()[1]
        if config.cluster is not None or config.node_id is not None:
            self.node = config.cluster_node_id
        else:
            self.node = f"{socket.gethostname()}:{self.port}"
        # Placement hashes the shards' names: with blocks on disk they must be the same after every restart.
        name = self._disk.identity if self._disk is not None else self.node
        self._addresses = [
            ShardAddress(f"{name}/{number}", "", listener.getsockname()[1], float(config.shard_memory_bytes))
            for number, listener in enumerate(listeners)
        ]
        self._registration = self._make_registration()
        self._draining = False

    def run(self) -> int:
        """Serve until told to stop. -> the process's exit status."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # it moves blocks over many connections
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for child in self._children:
            self._start(child)
        if not self._await_ready():
            self._stopping = True
            self._stop()
            return 0 if self._asked_to_stop else 1
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        metrics = self._serve_metrics()
        print(
            f"kvstore-server ready tcp://{host}:{self.port} shards={self.config.shards} "
            f"memory={self.config.memory_bytes}",
            flush=True,
        )
        if self._registration is not None and not self._asked_to_stop:
            self._registration.start(metrics)
        while not self._stopping:
            if self._asked_to_stop and not self._draining:
                self._begin_to_leave()
            else:
                self._watch()
        if self._registration is not None:
            self._registration.stop()
        self._stop()
        return 0

    def _make_registration(self) -> Registration | None:
        config = self.config
        url = config.cluster_url
        if url is None:
            return None
        from kvstore.node.registration import Registration

        host = config.advertised_host
        if _is_loopback(host) and not all(_is_loopback(endpoint) for endpoint, _ in url.endpoints):
            log.warning("node %s advertises %s, where only this machine reaches it: see --advertise", self.node, host)
        member = Member(
            self.node,
            "joining",
            [msgspec.structs.replace(shard, host=host) for shard in self._addresses],
            zone=config.zone,
            version=kvstore.__version__,
            instance=uuid.uuid4().hex,
            started=time.time(),
        )
        here = [
            msgspec.structs.replace(shard, host=child.listener.getsockname()[0])
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
        """Drain first, if that is wanted."""
        if self._registration is None or not self._drains_first:
            self._stopping = True
            return
        log.info("draining for at most %d s; a second signal ends that", self.config.drain_seconds)
        self._draining = True
        self._registration.drain(self.config.drain_seconds)

    def _on_drained(self) -> None:
        self._stopping = True
        os.write(self._wake_w, b"x")

    def _serve_metrics(self) -> str:
        """-> HOST:PORT where the node serves its metrics, as others reach it; empty: it does not."""
        port = self.config.metrics_port
        if port is None:
            return ""
        from kvstore.node import metrics

        addresses = [child.listener.getsockname()[:2] for child in self._children]
        status = self._registration.status if self._registration is not None else None
        try:
            bound = metrics.serve(
                self.config.host, port, metrics.NodeCollector(addresses, lambda: self._restarts, status)
            )
        except OSError as error:
            self._stop()
            raise StartError(f"cannot serve metrics on {self.config.host}:{port}: {error.strerror}") from None
        host = self.config.advertised_host
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def _on_signal(self, number: int, _frame: object) -> None:
        """Asked once: leave, and drain first if that is wanted. Asked again: stop, without a drain or in the midst of
        one. Asked once more than that: now. A drain that ended by itself takes no step of these: shards that write
        their memory to disk are not killed by who meant to end the drain."""
        self._signals += 1
        if self._signals > 1:
            if self._stopping and self._signals > 1 + self._drains_first:
                for child in self._children:
                    if child.process is not None:
                        child.process.kill()
            self._stopping = True
        os.write(self._wake_w, b"x")

    def _start(self, child: _Child) -> None:
        """Start a shard's process. Raises `OSError`, with nothing left of it."""
        with contextlib.ExitStack() as undo:
            ready_r, ready_w = os.pipe()
            undo.callback(os.close, ready_r)
            try:
                process = self._spawn(child, ready_w)
            finally:
                os.close(ready_w)
            undo.callback(process.wait)
            undo.callback(process.kill)
            pid_fd = os.pidfd_open(process.pid)
            undo.callback(os.close, pid_fd)
            self._selector.register(pid_fd, selectors.EVENT_READ, child)
            undo.callback(self._selector.unregister, pid_fd)
            self._selector.register(ready_r, selectors.EVENT_READ, child)
            undo.pop_all()
        child.process, child.pid_fd, child.ready_fd = process, pid_fd, ready_r
        child.started = time.monotonic()

    def _spawn(self, child: _Child, ready_fd: int) -> subprocess.Popen[bytes]:
        config = ShardConfig(
            node=self.node,
            shard=child.number,
            listen_fd=child.listener.fileno(),
            ready_fd=ready_fd,
            memory_bytes=self.config.shard_memory_bytes,
            segment_bytes=self.config.segment_bytes,
            shards=self._addresses,
            log_level=self.config.log_level,
            drain_s=DRAIN_S,
            policy=self.config.policy,
            rules=[*self.config.namespaces, NamespaceRule("*", self.config.ttl_seconds)],
            disk=self._disk_config(child.number),
            zone=self.config.zone,
        )
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN_SHARD, _CODE],
            stdin=subprocess.PIPE,
            pass_fds=(config.listen_fd, ready_fd),
        )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        except BrokenPipeError:
            log.error("shard %d died before it read its configuration", child.number)
        return process

    def _disk_config(self, shard: int) -> DiskConfig | None:
        if self._disk is None:
            return None
        return DiskConfig(
            directory=str(self._disk.shard_directory(shard)),
            limit_bytes=self.config.shard_disk_bytes,
            segment_bytes=self._disk.segment_bytes,
            write=self.config.disk_write,
            scrub_bytes_per_s=self.config.scrub_mbps * 1_000_000 // self.config.shards,
            warm_start=self.config.warm_start,
        )

    def _await_ready(self) -> bool:
        """Wait until every shard accepts requests; False: stopped or failed before that."""
        deadline = time.monotonic() + START_S
        while any(child.ready_fd >= 0 for child in self._children):
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                child = key.data
                if child is None:
                    os.read(self._wake_r, 64)
                elif key.fd == child.ready_fd and not self._take_ready(child):
                    log.error("shard %d did not start; its own message is above", child.number)
                    return False
            if self._asked_to_stop:
                return False
            if time.monotonic() > deadline:
                log.error("not all shards were ready after %g s", START_S)
                return False
        return True

    def _take_ready(self, child: _Child) -> bool:
        ok = bool(os.read(child.ready_fd, 1))
        self._selector.unregister(child.ready_fd)
        os.close(child.ready_fd)
        child.ready_fd = -1
        return ok

    def _watch(self) -> None:
        """Wait for something to happen to the shards, and deal with it."""
        now = time.monotonic()
        due = [child.restart_at for child in self._children if child.process is None]
        for key, _ in self._selector.select(max(0.0, min(due) - now) if due else None):
            child = key.data
            if child is None:
                os.read(self._wake_r, 64)
            elif key.fd == child.ready_fd:
                if self._take_ready(child):
                    log.warning("shard %d is serving again, pid %d", child.number, child.process.pid)
            elif key.fd == child.pid_fd:
                self._bury(child)
        now = time.monotonic()
        for child in self._children:
            if child.process is None and child.restart_at <= now and not self._stopping:
                try:
                    self._start(child)
                    self._restarts += 1
                except OSError as error:
                    child.restart_at = now + MAX_RESTART_DELAY_S
                    log.error(
                        "shard %d cannot be started: %s; trying again in %.1f s",
                        child.number,
                        error,
                        MAX_RESTART_DELAY_S,
                    )

    def _bury(self, child: _Child) -> None:
        process = child.process
        assert process is not None
        status = process.wait()
        self._selector.unregister(child.pid_fd)
        os.close(child.pid_fd)
        child.pid_fd = -1
        if child.ready_fd >= 0:
            self._take_ready(child)
        child.process = None
        now = time.monotonic()
        stable = now - child.started > STABLE_S
        child.delay_s = 0.0 if stable else min(MAX_RESTART_DELAY_S, child.delay_s * 2 or 0.1)
        child.restart_at = now + child.delay_s
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        log.error(
            "shard %d (pid %d) died: %s; what it held in memory is gone and counts as misses; restarting in %.1f s",
            child.number,
            process.pid,
            cause,
            child.delay_s,
        )

    def _stop(self) -> None:
        """Let the shards finish, then see that they are gone."""
        running = [child.process for child in self._children if child.process is not None]
        for child in self._children:
            child.listener.close()
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_S + 5.0 + (DISK_STOP_S if self._disk else 0.0)
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("shard process %d did not stop; killed", process.pid)
                process.kill()
                process.wait()
