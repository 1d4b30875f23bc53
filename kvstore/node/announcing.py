"""Reports when the server starts, is ready and stops. The reports go to the log, to standard output for scripts, and to
systemd.

With a unit of `Type=notify`, systemd listens for these reports, and for signs that the server is alive. The protocol
(sd_notify) is a datagram of `KEY=VALUE` lines to the socket that the variable `NOTIFY_SOCKET` names. Without this
variable, nothing is sent. Only the supervisor's loop calls `alive`, once in each turn. So if the supervisor hangs and
can no longer restart shards, systemd kills it. The watchdog does not cover the shards: the supervisor restarts a shard
that died, and `/readyz` reports a shard that hangs.
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
    """Sends reports to systemd, if it started this process. Used by the supervisor's main thread."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Remove the variables of the protocol from `environment`, so that no child acts as the service."""
        address = environment.pop("NOTIFY_SOCKET", "")
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # @ marks an abstract name
        watched = bool(self._address) and usec.isdecimal() and pid in ("", str(os.getpid()))
        self._every_s = int(usec) / 2e6 if watched else 0.0  # 0 without a watchdog
        self._next_ping = 0.0

    def tell(self, status: str, *lines: str) -> None:
        """Set the text that `systemctl status` shows. `lines`: further lines, such as READY=1 or STOPPING=1."""
        self._send("\n".join([*lines, f"STATUS={status}"]))

    def alive(self) -> None:
        """Notify the watchdog if it is time for that. Called in each turn of the supervisor's loop."""
        now = time.monotonic()
        if self._every_s and now >= self._next_ping:
            self._next_ping = now + self._every_s
            self._send("WATCHDOG=1")

    def wait_s(self, at_most: float | None) -> float | None:
        """Return how many seconds the loop may wait: at most `at_most`, and not beyond the next call of `alive`. None
        means no limit."""
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
            log.warning("cannot notify systemd of %r: %s", text, error)


class Announcer:
    """Reports each step once. Used by the supervisor's main thread."""

    def __init__(self, config: ServerConfig, systemd: ServiceManager) -> None:
        self._config = config
        self._systemd = systemd

    def starting(self, node: str, addresses: Sequence[tuple[str, int]], http_port: int | None) -> None:
        """Log one line: the version, the addresses, and the settings that differ from the defaults."""
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
            " ".join(f"{name}={value}" for name, value in settings.items()) or "the defaults",
            extra=fields(
                version=kvstore.__version__, pid=os.getpid(), node=node, listen=listen, http=http, settings=settings
            ),
        )
        self._systemd.tell(f"starting {self._config.shards} shard(s)")

    def ready(self, port: int) -> None:
        """Report that every shard accepts requests."""
        config = self._config
        where = HostPort.of(config.host, port)
        scheme = "tcp" if config.tls_cert is None else "tls"
        print(f"kvstore-server ready {scheme}://{where} shards={config.shards} memory={int(config.memory)}", flush=True)
        self._systemd.tell(f"serving at {where} with {config.shards} shard(s) of {config.memory} together", "READY=1")

    def stopping(self, number: signal.Signals, request_s: float, drain_s: int) -> None:
        """Report a signal to stop. `request_s`: the time for requests that have begun. `drain_s`: the time for the
        drain before that."""
        log.info(
            "%s: stopping; requests that have begun may take %g s more",
            number.name,
            request_s,
            extra=fields(signal=number.name),
        )
        if drain_s:
            log.info("draining for at most %d s; a second signal ends the drain", drain_s)
        self._systemd.tell(
            f"moving blocks to other nodes, for at most {drain_s} s" if drain_s else "stopping", "STOPPING=1"
        )

    def stopped(self, uptime_s: float, status: int) -> None:
        """Report that all shards have ended."""
        log.info(
            "stopped after %.1f s, exit status %d", uptime_s, status, extra=fields(uptime_s=uptime_s, status=status)
        )
