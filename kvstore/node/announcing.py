"""How far the server is, told to all who wait: operators (the log), scripts (a line on standard output), systemd."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import kvstore
from kvstore.logs import fields
from kvstore.node.config import ServerConfig
from kvstore.node.settings import HostPort, changed
from kvstore.node.systemd import ServiceManager

log = logging.getLogger("kvstore.server")


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
