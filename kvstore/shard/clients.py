"""The open connections of a shard, as CLIENTS lists them.

A reply has a part of the list, which takes about a millisecond to make. A principal sees only the connections of its
own tenant, in namespaces of models that it may use. Used by the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvstore import wire
from kvstore.auth.rights import Rights
from kvstore.shard.peer import Peer
from kvstore.shard.session import may_see
from kvstore.shard.sets import Write
from kvstore.wire import MAX_LISTED_CLIENTS, MAX_SHOWN_NAME


class Connection(Protocol):
    """A connection and the state of its messages. Times are in monotonic seconds."""

    @property
    def peer(self) -> Peer: ...

    @property
    def began(self) -> float: ...

    @property
    def last_heard(self) -> float: ...

    @property
    def write(self) -> Write | None:
        """The SET whose payload is arriving."""


class ClientList:
    """The list of one shard's connections.

    connections: the open connections in the order in which they were made.
    transport: how clients on other hosts may read the shard's memory; empty if they may not.
    """

    def __init__(self, connections: Collection[Connection], transport: str) -> None:
        self._connections = connections
        self._transport = transport

    def rows(self, after: int, rights: Rights, now: float) -> list[wire.ConnectedClient]:
        """Return the next part of the list, after connection number `after`."""
        rows: list[wire.ConnectedClient] = []
        for connection in self._connections:
            if connection.peer.number > after:
                row = self._row(connection, now)
                if may_see(rights, connection.peer.session.rights.tenant, row.model):
                    rows.append(row)
                    if len(rows) == MAX_LISTED_CLIENTS:
                        break
        return rows

    def _row(self, connection: Connection, now: float) -> wire.ConnectedClient:
        peer = connection.peer
        session, outbox, leases, files = peer.session, peer.outbox, peer.leases, peer.files
        namespace, model, tenant = session.shown()
        copied = files.copied_bytes if files is not None else 0
        lent = leases.lent_bytes if leases is not None else 0
        if files is not None:
            transport = "shared memory" if copied or lent else "unix"
        elif leases is not None:
            transport = self._transport
        else:
            transport = "tls" if peer.encrypted else "tcp"
        return wire.ConnectedClient(
            peer.number,
            peer.address,
            session.client,
            session.rights.principal[:MAX_SHOWN_NAME],
            tenant,
            namespace,
            model,
            transport,
            now - connection.began,
            now - connection.last_heard,
            outbox.requests + peer.jobs + (connection.write is not None) + session.logging_in,
            peer.received_bytes + copied,
            outbox.sent_bytes + lent,
            outbox.waiting_bytes(),
        )
