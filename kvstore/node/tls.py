"""A node's TLS: a process for each shard's port, the certificate of the HTTP server, and connections of the node's own.

With TLS, a shard does not listen. Its TLS process does, and hands it the connections (`kvstore.tls.handing`). So does
this process, for its health checks and for moving blocks from its own shards: those connections never leave the host,
and need no TLS. To shards of other nodes it connects with TLS and the node's certificate.
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

LOOK_S: Final = 1.0  # how often the processes are looked at
SILENT_S: Final = 3.0  # after which a process that says nothing counts as down
HANG_S: Final = 15.0  # after which it is ended
REFUSAL = b"this port speaks TLS 1.3 only: connect with tls://HOST:PORT and the CA of its certificate (tls_ca)"


class TLSUse(NamedTuple):
    """One TLS process, now."""

    up: bool  # it accepts connections; not if it hangs
    pid: int  # 0: there is none
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
        """-> what the process has to do. Any thread."""
        process = self.process
        return TLSUse(not self.why_not_serving(), process.pid if process is not None else 0, self._page.read())

    def why_not_serving(self) -> str:
        """-> why clients are not accepted; empty: they are. Any thread."""
        silent_s = self._silent_s()
        return self.not_serving or (f"its process has hung for {silent_s:.0f} s" if silent_s > SILENT_S else "")

    def look(self) -> None:
        """End a process that hangs; another one is started."""
        if not self.not_serving and self.process is not None and self._silent_s() > HANG_S:
            log.error("%s %d (pid %d) has hung for %g s; it is ended", self.kind, self.number, self.process.pid, HANG_S)
            self.process.kill()

    def _silent_s(self) -> float:
        return time.monotonic() - self._page.read().seen_ms / 1000

    def config(self, ready_fd: int) -> tuple[AcceptConfig, Sequence[int]]:
        config = self._config
        fds = self._listener.fileno(), self._give.fileno(), ready_fd, self._page.fd
        files = config.tls_cert or "", config.tls_key or "", config.tls_client_ca or ""
        refusal = greeting() + command(b"ERROR", bytes([len(REFUSAL)]) + REFUSAL)
        return AcceptConfig(self.number, *fds, *files, refusal, config.log_level, config.log_format), fds


class NodeTLS:
    """The TLS of a node whose shards are `shards`. Any thread may call `dial`. Raises `StartError`."""

    def __init__(self, config: ServerConfig, shards: Sequence[ShardChild], selector: selectors.BaseSelector) -> None:
        assert config.tls_cert is not None and config.tls_key is not None
        transport, setting = config.reads_with
        if transport:
            raise StartError(f"--{setting}: clients would read blocks without TLS: leave it out, or --tls-cert")
        self._members = TLSOptions(config.tls_ca or config.tls_client_ca or "", config.tls_cert, config.tls_key)
        try:
            self.certificate = Certificate(config.tls_cert, config.tls_key, "")  # of HTTP: probes have none
            for ca in filter(None, (config.tls_client_ca, config.tls_ca)):
                client_context(TLSOptions(ca))
        except TLSError as error:
            raise StartError(f"TLS: {error}") from None
        self._pairs = [pair() for _ in shards]  # they outlive the processes
        self._own = {shard.address: give for shard, (give, _) in zip(shards, self._pairs, strict=True)}
        self.children = [
            TLSChild(shard, selector, config, give) for shard, (give, _) in zip(shards, self._pairs, strict=True)
        ]

    def take_fd(self, shard: int) -> int:
        """-> the descriptor from which a shard takes its connections."""
        return self._pairs[shard][1].fileno()

    def dial(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """-> a connection to a shard, of this node or another one. Raises `OSError` and `ValueError`."""
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
        """-> the TLS process of each shard. Any thread."""
        return [child.use() for child in self.children]

    def look(self) -> float:
        """End processes that hang. -> in how many seconds to look again."""
        for child in self.children:
            child.look()
        return LOOK_S

    def stop(self) -> None:
        """Accept no more clients; the processes end when the shards have closed their connections."""
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
