"""One client's connection: its session, its outbox, and everything else that the shard holds for it.

`MessageReader` reads its messages. Used by the loop's thread only.
"""

from __future__ import annotations

import enum
import logging
import socket
from collections.abc import Callable

from kvstore import wire
from kvstore.shard.account import CONNECTION_BYTES, CONNECTIONS, PROMISES, AddressBudget, LimitReached
from kvstore.shard.client_files import ClientFiles
from kvstore.shard.leases import Leases
from kvstore.shard.outbox import Outbox
from kvstore.shard.session import Session
from kvstore.shard.state import ShardState
from kvstore.shard.turns import SliceQueue
from kvstore.store.expected import PROMISE_BYTES, Promises

log = logging.getLogger(__name__)


class ConnectionClass(enum.Enum):
    """What a connection may be used for (see `kvstore.shard.connection_limits`)."""

    CLIENT = "client"
    MEMBER = "member"
    DOOR = "door"  # it waits for a place


class Peer:
    """A client's connection. `on_close`: called once, before the socket is closed."""

    def __init__(
        self,
        state: ShardState,
        sock: socket.socket,
        share: AddressBudget,
        host: str,
        port: int,
        to_flush: SliceQueue[Outbox],
        on_close: Callable[[Peer], None],
        leases: Leases | None = None,
        files: ClientFiles | None = None,
    ) -> None:
        """host, port: the client's address.
        leases, files: the blocks lent to a client on this host, and the files that the client shares; None if the
        client is not at the Unix socket.
        """
        state.accepted += 1
        self.number = state.accepted  # the number of the connection, counted since the shard's start
        self.sock = sock
        self.leases = leases
        self.files = files
        self.share = share
        self.place = ConnectionClass.DOOR  # until it gets a place of another class
        self.host = host
        self.address = f"{host}:{port}"
        self.received_bytes = 0  # bytes that the client has sent over the connection, after its greeting
        self.session = Session(state.newcomer, state.account, self.address)
        self.outbox = Outbox(state, sock, share, self.session, to_flush)
        self.jobs = 0  # this client's jobs in the background
        self.promising: set[Promises] = set()  # the namespaces in which it has promised blocks
        self._promised_keys = 0
        self._refused = False
        self._state = state
        self._on_close = on_close
        state.account.take(CONNECTIONS, CONNECTION_BYTES)

    @property
    def member(self) -> bool:
        """True if the client is a member of the cluster, or the node itself."""
        return self.place is ConnectionClass.MEMBER

    @property
    def encrypted(self) -> bool:
        """True if the client speaks TLS with the process that has handed over this connection."""
        return self.files is None and self.sock.family == socket.AF_UNIX

    @property
    def idle(self) -> bool:
        """True if nothing is to be sent, now or later, and nothing else depends on the connection."""
        relied_on = self._promised_keys or (self.leases is not None and self.leases.held_bytes)
        return self.outbox.empty and not (self.jobs or relied_on)

    def promises_in(self, promises: Promises) -> None:
        """Record that the client may have promised blocks of a namespace. Forget the namespaces in which it has no
        promises any more."""
        if promises not in self.promising and promises.held_by(self):
            self.promising = {each for each in self.promising if each.held_by(self)} | {promises}

    def promised(self, keys: int) -> None:
        """Add `keys`, which may be negative, to the number of keys that the client has promised."""
        self._promised_keys += keys
        if keys > 0:
            self.share.take(PROMISES, keys * PROMISE_BYTES)
        else:
            self.share.give_back(PROMISES, -keys * PROMISE_BYTES)

    def count_for(self, share: AddressBudget) -> None:
        """Charge the connection to another budget from now on. At this time, it must hold nothing but replies."""
        self.share = share
        self.outbox.count_for(share)

    def close(self, reason: str) -> None:
        """Close the connection and release everything that the shard holds for it. Later calls do nothing."""
        if self.outbox.closed:
            return
        log.debug("client %s %r: closed: %s", self.address, self.session.client, reason)
        self.outbox.close()
        self._state.account.give_back(CONNECTIONS, CONNECTION_BYTES)
        for promises in self.promising:
            promises.withdraw_all(self)
        self.session.forget()  # because a promise that ends later may still refer to this connection
        if self.files is not None:
            self.files.close()
        self._on_close(self)
        self.sock.close()

    def refuse(self, request_id: int, error: wire.WireError) -> None:
        """Answer a request with ERROR. Only the first refusal of each connection is logged above DEBUG."""
        self._state.errors += 1
        if isinstance(error, LimitReached):
            self._state.refused[error.limit] += 1
        if self._refused:
            log.debug("client %s: refused again: %s", self.address, error)
        elif isinstance(error, LimitReached):  # logged as a warning, because the operator can do something about it
            log.warning("client %s: refused at a limit: %s", self.address, error)
        else:
            log.info("client %s: refused: %s", self.address, error)
        self._refused = True
        self.outbox.reply(wire.Error(request_id, int(error.code), str(error)))

    def close_after_defect(self) -> None:
        """Log the exception being handled, which is a bug in the server, and close the connection."""
        log.exception("client %s: internal error", self.address)
        self._state.errors += 1
        self.close("internal error")
