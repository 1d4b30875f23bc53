"""Places: which connections a shard serves, and what for.

A shard has places for clients, some more for the cluster's members, and a few at the *door*:

* A client has a place if its address has not all that one address may have, and there is one. When all are taken, the
  connection that was idle for longest gives way; one with a request in progress never does.
* A connection that finds no place waits at the door. There it may ask what an operator asks (PING, INFO), while
  its requests for blocks are refused with an error that says why, until a place is free. When the door is full, the
  oldest connection of the address that has the most there gives way: so a newcomer always gets in and is answered.
* Who has not logged in counts for its network (`network_of`), and for its own address after that: the hosts of one
  network have one /64, too. Without logins everybody counts for its own address.
* Whoever shows the node's cookie in HELLO, as the supervisors of the cluster do, gets a place of a member. Those are
  the node's own health checks, and the movers of blocks.

Used by the loop's thread only.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstore.shard.account import (
    CONNECTION_BYTES,
    MEMORY,
    PLACES,
    PLACES_OF_ADDRESS,
    Account,
    LimitReached,
    Share,
)
from kvstore.shard.peer import Peer, Place
from kvstore.wire import ErrorCode

MAX_CONNECTIONS: Final = 2048
MEMBERS: Final = 64
DOOR: Final = 16
CLIENTS: Final = MAX_CONNECTIONS - MEMBERS - DOOR
CLIENTS_OF_ADDRESS: Final = 1024
SEARCH_PAUSE_S: Final = 0.1  # after a search for an idle connection that found none: it looks at all of them


class Places:
    """The places of a shard.

    cookie: what members show; empty: there are none. close_idle: closes the connection in a place of a client that was
    idle for longest, of one address or of all, and tells whether there was one.
    """

    def __init__(self, account: Account, cookie: str, close_idle: Callable[[Share | None], bool]) -> None:
        self._account = account
        self._cookie = cookie.encode()
        self._close_idle = close_idle
        self._shares: dict[str, Share] = {}  # by address or network
        self._gone: set[Share] = set()  # of addresses without a connection that still hold something
        self._clients = 0
        self._door: dict[Peer, None] = {}  # the oldest first
        self._search_again: dict[Share | None, float] = {}

    def share(self, address: str) -> Share:
        """-> the share of an address or a network, for a connection that is about to be added."""
        gone, self._gone = self._gone, set()
        for share in gone:
            self._forget(share)
        return self._shares.setdefault(address, Share(self._account, address))

    def add(self, peer: Peer, now: float) -> None:
        """Give a new connection a place of a client, or else let it wait at the door."""
        peer.share.connections += 1
        refusal = self._give_place(peer, now)
        if refusal is None:
            return
        if len(self._door) >= DOOR:
            self._oldest_at_door().close("it waited for a place, and another one needs the room")
        self._door[peer] = None

    def remove(self, peer: Peer) -> None:
        """The connection has ended."""
        share = peer.share
        if peer.place is Place.CLIENT:
            self._clients -= 1
            share.places -= 1
        elif peer.place is Place.DOOR:
            self._door.pop(peer, None)
        share.connections -= 1
        self._forget(share)

    def _forget(self, share: Share) -> None:
        """Forget an address that has nothing any more."""
        if share.connections or share is self._account.members or self._shares.get(share.address) is not share:
            return
        if share.held_bytes or share.logins:  # a removal waits for the disk: who comes back must still answer for it
            self._gone.add(share)
            return
        self._gone.discard(share)
        del self._shares[share.address]
        self._search_again.pop(share, None)

    def check(self, peer: Peer, now: float) -> None:
        """Raise `LimitReached` for a request for blocks on a connection that has no place for it."""
        if peer.place is not Place.DOOR:
            return
        refusal = self._give_place(peer, now)
        if refusal is not None:
            raise refusal
        del self._door[peer]

    def show_cookie(self, peer: Peer, cookie: str) -> None:
        """Give a connection, for which nothing is held yet, a place of a member if the cookie is the node's."""
        members = self._account.members
        if peer.place is Place.MEMBER or not peer.idle or members.connections >= MEMBERS:
            return
        if self.is_cookie(cookie):
            self.remove(peer)
            peer.place = Place.MEMBER
            peer.count_for(members)
            members.connections += 1

    def log_in(self, peer: Peer, now: float) -> None:
        """A connection has logged in, before anything but replies was held for it."""
        if peer.share.address == peer.host or peer.place is Place.MEMBER:
            return
        self.remove(peer)
        peer.count_for(self.share(peer.host))
        peer.place = Place.DOOR
        self.add(peer, now)

    def is_cookie(self, cookie: str) -> bool:
        """Whether this is what members show."""
        return bool(self._cookie) and hmac.compare_digest(cookie.encode(), self._cookie)

    def _give_place(self, peer: Peer, now: float) -> LimitReached | None:
        """Give a connection a place of a client. -> why it gets none."""
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
                MEMORY,
                f"the server holds {self._account.held_bytes} bytes for the connections, requests and replies of its "
                "clients, and has no room for another connection: this one may ask PING and INFO only; try again later",
                code=ErrorCode.NO_PLACE,
            )
        self._clients += 1
        share.places += 1
        peer.place = Place.CLIENT
        return None

    def _make_room(self, share: Share | None, now: float) -> bool:
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
