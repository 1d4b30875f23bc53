"""The places of a shard: which connections it serves, and which requests they may send.

A shard has places for clients, extra places for the cluster's members, and a short waiting list (`DOOR`):

* A client gets a place if one is free and its address does not have its maximum of places yet. If all places are taken,
  the connection that was idle for longest is closed, but never a connection with a request in progress.
* A connection that gets no place goes to the waiting list. While it waits, it may send what an operator needs (PING,
  INFO). Its requests for blocks are refused, with an error that says why, until a place is free. When the list is full,
  the address with the most connections in the list loses its oldest one. So a new connection is always accepted and
  answered.
* A connection counts for its network (`network_of`) until it has logged in. After that it counts for its own address,
  because all hosts of an IPv6 network share one /64. Without logins each connection counts for its own address.
* A connection that shows the node's cookie in HELLO gets a place of a member. The cluster's supervisors show it,
  for the node's own health checks and for the movers of blocks.

Used by the loop's thread only.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstore.shard.account import (
    BUFFER_MEMORY,
    CONNECTION_BYTES,
    PLACES,
    PLACES_OF_ADDRESS,
    Account,
    AddressBudget,
    LimitReached,
)
from kvstore.shard.peer import ConnectionClass, Peer
from kvstore.wire import ErrorCode

MAX_CLIENT_CONNECTIONS: Final = 2048
MEMBERS: Final = 64
DOOR: Final = 16
CLIENTS: Final = MAX_CLIENT_CONNECTIONS - MEMBERS - DOOR
CLIENTS_OF_ADDRESS: Final = 1024
SEARCH_PAUSE_S: Final = 0.1  # the pause after a search that found no idle connection; a search checks all connections


class ConnectionLimits:
    """The places of a shard.

    cookie: the secret that members show; empty if there are no members.
    close_idle: a function that closes the client connection that was idle for longest, either of one address or of all.
    It returns whether it has closed one.
    """

    def __init__(self, account: Account, cookie: str, close_idle: Callable[[AddressBudget | None], bool]) -> None:
        self._account = account
        self._cookie = cookie.encode()
        self._close_idle = close_idle
        self._shares: dict[str, AddressBudget] = {}  # by address or network
        self._gone: set[AddressBudget] = set()  # addresses that have no connection but still hold something
        self._clients = 0
        self._door: dict[Peer, None] = {}  # the oldest connection first
        self._search_again: dict[AddressBudget | None, float] = {}

    def share(self, address: str) -> AddressBudget:
        """Return the budget of an address or a network, for a connection that is about to be added."""
        gone, self._gone = self._gone, set()
        for share in gone:
            self._forget(share)
        return self._shares.setdefault(address, AddressBudget(self._account, address))

    def add(self, peer: Peer, now: float) -> None:
        """Give a new connection a place of a client, or else put the connection on the waiting list."""
        peer.share.connections += 1
        refusal = self._give_place(peer, now)
        if refusal is None:
            return
        if len(self._door) >= DOOR:
            self._oldest_at_door().close("it waited for a place, and another one needs the room")
        self._door[peer] = None

    def remove(self, peer: Peer) -> None:
        """Remove a connection that has ended."""
        share = peer.share
        if peer.place is ConnectionClass.CLIENT:
            self._clients -= 1
            share.places -= 1
        elif peer.place is ConnectionClass.DOOR:
            self._door.pop(peer, None)
        share.connections -= 1
        self._forget(share)

    def _forget(self, share: AddressBudget) -> None:
        """Forget an address that holds nothing any more."""
        if share.connections or share is self._account.members or self._shares.get(share.address) is not share:
            return
        if share.held_bytes or share.logins:  # they still count for the address if a client returns
            self._gone.add(share)
            return
        self._gone.discard(share)
        del self._shares[share.address]
        self._search_again.pop(share, None)

    def check(self, peer: Peer, now: float) -> None:
        """Raise `LimitReached` if a connection that sends a request for blocks has no place and gets none."""
        if peer.place is not ConnectionClass.DOOR:
            return
        refusal = self._give_place(peer, now)
        if refusal is not None:
            raise refusal
        del self._door[peer]

    def show_cookie(self, peer: Peer, cookie: str) -> None:
        """Give a connection a place of a member if the cookie is the node's. The connection must not hold anything
        yet."""
        members = self._account.members
        if peer.place is ConnectionClass.MEMBER or not peer.idle or members.connections >= MEMBERS:
            return
        if self.is_cookie(cookie):
            self.remove(peer)
            peer.place = ConnectionClass.MEMBER
            peer.count_for(members)
            members.connections += 1

    def log_in(self, peer: Peer, now: float) -> None:
        """Count a connection that has logged in for its own address. Until now, it may have held only replies."""
        if peer.share.address == peer.host or peer.place is ConnectionClass.MEMBER:
            return
        self.remove(peer)
        peer.count_for(self.share(peer.host))
        peer.place = ConnectionClass.DOOR
        self.add(peer, now)

    def is_cookie(self, cookie: str) -> bool:
        """Return whether this is the cookie that members show."""
        return bool(self._cookie) and hmac.compare_digest(cookie.encode(), self._cookie)

    def _give_place(self, peer: Peer, now: float) -> LimitReached | None:
        """Give a connection a place of a client. Return None, or the reason if there is no place for it."""
        share = peer.share
        if share.places >= CLIENTS_OF_ADDRESS and not self._make_room(share, now):
            return LimitReached(
                PLACES_OF_ADDRESS,
                f"{share.places} connections from {share.address} are open, the most that a shard gives one address: "
                "this one may ask PING and INFO only; close connections that are not needed",
                code=ErrorCode.NO_PLACE,
            )
        if self._clients >= CLIENTS and not self._make_room(None, now):
            return LimitReached(
                PLACES,
                f"{self._clients} connections of clients are open, the most of a shard: this one may ask PING and INFO "
                "only; close connections that are not needed",
                code=ErrorCode.NO_PLACE,
            )
        if self._account.free_bytes < CONNECTION_BYTES and not self._make_room(None, now):
            return LimitReached(
                BUFFER_MEMORY,
                f"the server holds {self._account.held_bytes} bytes for the connections, requests and replies of its "
                "clients, and has no room for another connection: this one may ask PING and INFO only; try again later",
                code=ErrorCode.NO_PLACE,
            )
        self._clients += 1
        share.places += 1
        peer.place = ConnectionClass.CLIENT
        return None

    def _make_room(self, share: AddressBudget | None, now: float) -> bool:
        if now < self._search_again.get(share, 0.0):
            return False
        if self._close_idle(share):
            return True
        self._search_again[share] = now + SEARCH_PAUSE_S
        return False

    def _oldest_at_door(self) -> Peer:
        waiting = Counter(peer.share for peer in self._door)
        most = max(waiting.values())
        return next(peer for peer in self._door if waiting[peer.share] == most)
