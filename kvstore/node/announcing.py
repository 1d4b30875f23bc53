"""Reports that the server starts, is ready and stops: to the log, to standard output for scripts, and to systemd.

A unit of `Type=notify` makes systemd listen for this, and for signs that the server is alive. The protocol
(sd_notify) is a datagram of `KEY=VALUE` lines to the socket that `NOTIFY_SOCKET` names. Without the variable, nothing
is sent. The watchdog is honest: `alive` is called by each turn of the supervisor's loop and by nothing else, so systemd
ends a supervisor that hangs, which could restart no shard any more. It says nothing of the shards: their supervisor
restarts one that died, and `/readyz` tells of one that hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import MutableMapping, Sequence
from typing import Final

import kvstore
from kvstore.logs import fields
from kvstore.node.config import ServerConfig
from kvstore.node.settings import HostPort, changed

log = logging.getLogger("kvstore.server")

_SEND_S: Final = 1.0


class ServiceManager:
    """systemd, if it started this process. Used by the supervisor's main thread."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes the variables of the protocol out of `environment`, so that no child takes itself for the service."""
        address = environment.pop("NOTIFY_SOCKET", "")
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # @: an abstract name
        watched = bool(self._address) and usec.isdecimal() and pid in ("", str(os.getpid()))
        self._every_s = int(usec) / 2e6 if watched else 0.0  # 0: no watchdog
        self._next_ping = 0.0

    def tell(self, status: str, *lines: str) -> None:
        """Set the text that `systemctl status` shows; `lines`: READY=1, STOPPING=1."""
        self._send("\n".join([*lines, f"STATUS={status}"]))

    def alive(self) -> None:
        """The supervisor's loop turns: tell the watchdog, if it is time to."""
        now = time.monotonic()
        if self._every_s and now >= self._next_ping:
            self._next_ping = now + self._every_s
            self._send("WATCHDOG=1")

    def wait_s(self, at_most: float | None) -> float | None:
        """-> how long the loop may wait: `at_most`, and not beyond the next `alive`. None: for ever."""
        if not self._every_s:
            return at_most
        until_ping = max(0.0, self._next_ping - time.monotonic())
        return until_ping if at_most is None else min(at_most, until_ping)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_SEND_S)
                sock.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("systemd cannot be told %r: %s", text, error)


class Announcer:
    """Tells each step once. Used by the supervisor's main thread."""

    def __init__(self, config: ServerConfig, systemd: ServiceManager) -> None:
        self._config = config
        self._systemd = systemd

    def starting(self, node: str, addresses: Sequence[tuple[str, int]], http_port: int | None) -> None:
        """Log one line: the version, the addresses, and the settings that are not the defaults."""
        listen = [str(HostPort.of(*address)) for address in addresses]
        http = ""
        if http_port is not None and self._config.http is not None:
            scheme = "http" if self._config.tls_cert is None else "https"
            http = f"{scheme}://{HostPort.of(self._config.http.host, http_port)}/"
        settings = changed(self._config)
        log.info(
            "kvstore-server %s starts: listening on %s, %s; settings: %s",
            kvstore.__version__,
            ", ".join(listen),
            http or "no HTTP",
            " ".join(f"{name}={value}" for name, value in settings.items()) or "all by default",
            extra=fields(
                version=kvstore.__version__, pid=os.getpid(), node=node, listen=listen, http=http, settings=settings
            ),
        )
        self._systemd.tell(f"starting {self._config.shards} shard(s)")

    def ready(self, port: int) -> None:
        """Every shard accepts requests."""
        config = self._config
        where = HostPort.of(config.host, port)
        scheme = "tcp" if config.tls_cert is None else "tls"
        print(f"kvstore-server ready {scheme}://{where} shards={config.shards} memory={int(config.memory)}", flush=True)
        self._systemd.tell(f"serving at {where} with {config.shards} shard(s) of {config.memory} together", "READY=1")

    def stopping(self, number: signal.Signals, request_s: float, drain_s: int) -> None:
        """A signal to stop has come. request_s: for requests that have begun; drain_s: for draining before that."""
        log.info(
            "%s: stopping; requests that have begun may take %g s more",
            number.name,
            request_s,
            extra=fields(signal=number.name),
        )
        if drain_s:
            log.info("draining for at most %d s; a second signal ends that", drain_s)
        self._systemd.tell(
            f"moving blocks to other nodes, for at most {drain_s} s" if drain_s else "stopping", "STOPPING=1"
        )

    def stopped(self, uptime_s: float, status: int) -> None:
        """All shards have ended."""
        log.info(
            "stopped after %.1f s, exit status %d", uptime_s, status, extra=fields(uptime_s=uptime_s, status=status)
        )
