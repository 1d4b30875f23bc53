"""A node's TLS: a process for each shard's port, the certificate of the HTTP server, and the node's own connections.

With TLS, a shard does not listen. The shard's TLS process listens, and hands the connections to the shard
(`kvstore.tls.handing`). The supervisor hands over connections, too, for its health checks and for moving blocks from
its own shards. These connections never leave the host, and need no TLS. The supervisor connects to shards of other
nodes with TLS and the node's certificate.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.node.children import Child, ShardChild, StartError
from kvstore.tls import TLSError, TLSOptions
from kvstore.tls.accepting import AcceptConfig
from kvstore.tls.certificate import Certificate
from kvstore.tls.contexts import client_context
from kvstore.tls.counting import Counts, CountsPage
from kvstore.tls.handing import hand_over, pair
from kvstore.tls.outgoing import dial
from kvstore.wire.zmtp import command, greeting

if TYPE_CHECKING:
    from kvstore.node.config import ServerConfig

log = logging.getLogger("kvstore.tls")

TLS_POLL_S: Final = 1.0  # how often the processes are checked
SILENT_S: Final = 3.0  # a process that is silent for longer counts as down
HANG_S: Final = 15.0  # a process that is silent for longer is killed
PLAIN_REFUSAL = (
    b"this port speaks TLS 1.3 only: connect with tls://HOST:PORT and the CA of its certificate (tls_ca, --tls-ca)"
)


class TLSUse(NamedTuple):
    """The current state of one TLS process."""

    up: bool  # whether it accepts connections; False if it hangs
    pid: int  # 0 if there is none
    counts: Counts


class TLSChild(Child):
    """The TLS process of one shard."""

    kind = "TLS process"
    loss = "its connections are lost, and clients connect again"
    module = "kvstore.tls.accepting"

    def __init__(
        self, shard: ShardChild, selector: selectors.BaseSelector, config: ServerConfig, give: socket.socket
    ) -> None:
        super().__init__(shard.number, selector)
        self._listener = shard.listener
        self._config = config
        self._give = give
        self._page = CountsPage()

    def use(self) -> TLSUse:
        """Return the state of the process. Thread-safe."""
        process = self.process
        return TLSUse(not self.why_not_serving(), process.pid if process is not None else 0, self._page.read())

    def why_not_serving(self) -> str:
        """Return why clients are not accepted; empty if they are. Thread-safe."""
        silent_s = self._silent_s()
        return self.not_serving or (f"its process has hung for {silent_s:.0f} s" if silent_s > SILENT_S else "")

    def look(self) -> None:
        """Kill the process if it hangs. Another one is started in its place."""
        if not self.not_serving and self.process is not None and self._silent_s() > HANG_S:
            log.error("%s %d (pid %d) has hung for %g s; killing it", self.kind, self.number, self.process.pid, HANG_S)
            self.process.kill()

    def _silent_s(self) -> float:
        return time.monotonic() - self._page.read().seen_ms / 1000

    def config(self, ready_fd: int) -> tuple[AcceptConfig, Sequence[int]]:
        config = self._config
        fds = self._listener.fileno(), self._give.fileno(), ready_fd, self._page.fd
        files = config.tls_cert or "", config.tls_key or "", config.tls_client_ca or ""
        refusal = greeting() + command(b"ERROR", bytes([len(PLAIN_REFUSAL)]) + PLAIN_REFUSAL)
        return AcceptConfig(self.number, *fds, *files, refusal, config.log_level, config.log_format), fds


class NodeTLS:
    """The TLS of a node whose shards are `shards`. Any thread may call `dial`. Raises `StartError`."""

    def __init__(self, config: ServerConfig, shards: Sequence[ShardChild], selector: selectors.BaseSelector) -> None:
        assert config.tls_cert is not None and config.tls_key is not None
        transport, setting = config.reads_with
        if transport:
            raise StartError(f"--{setting}: clients would read blocks without TLS: leave out --{setting} or --tls-cert")
        self._members = TLSOptions(config.tls_ca or config.tls_client_ca or "", config.tls_cert, config.tls_key)
        try:
            # This certificate is for HTTP, without a client CA, because probes have no certificate.
            self.certificate = Certificate(config.tls_cert, config.tls_key, "")
            for ca in filter(None, (config.tls_client_ca, config.tls_ca)):
                client_context(TLSOptions(ca))
        except TLSError as error:
            raise StartError(f"TLS: {error}") from None
        self._pairs = [pair() for _ in shards]  # the pairs outlive the processes
        self._own = {shard.address: give for shard, (give, _) in zip(shards, self._pairs, strict=True)}
        self.children = [
            TLSChild(shard, selector, config, give) for shard, (give, _) in zip(shards, self._pairs, strict=True)
        ]

    def take_fd(self, shard: int) -> int:
        """Return the descriptor from which a shard takes its connections."""
        return self._pairs[shard][1].fileno()

    def dial(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """Return a connection to a shard of this node or another one. Raises `OSError` and `ValueError`."""
        give = self._own.get(address)
        if give is None:
            return dial(self._members, address, timeout_s)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                hand_over(give, theirs, (address[0], os.getpid()))
            except BaseException:
                ours.close()
                raise
        return ours

    def uses(self) -> list[TLSUse]:
        """Return the state of each shard's TLS process. Thread-safe."""
        return [child.use() for child in self.children]

    def look(self) -> float:
        """Kill processes that hang. Return the seconds until the next check."""
        for child in self.children:
            child.look()
        return TLS_POLL_S

    def stop(self) -> None:
        """Accept no more clients. The processes end when the shards have closed their connections."""
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
