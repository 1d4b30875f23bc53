"""Limits the memory for the request bodies that the proxy holds: those that are still arriving, and those being served.

`BodyBudget` limits the bytes of all bodies together. When others need room, bodies that are still arriving are dropped,
the oldest first. So a client that sends slowly or never finishes keeps no other client out. A body that is being served
is never dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from kvstore_serving.proxy.user import User, UserGone

SLOWEST: Final = 100_000  # bytes/s at which a body must arrive; a pause of the permitted length is added


class BodyTooLarge(Exception):
    """The body is larger than the proxy accepts."""


class BodyTooSlow(Exception):
    """The body arrived too slowly, stopped arriving, or was dropped to make room for others."""


class BodiesFull(Exception):
    """The bodies of requests that are being served use all the memory for bodies."""


class BodyBudget:
    """Limits the memory of bodies. Used by one event loop.

    most_bytes: the most bytes of one body
    in_all: the most bytes of all bodies together
    most_coming: the most bodies that may be arriving at once
    """

    def __init__(self, most_bytes: int, in_all: int, most_coming: int, stall_s: float) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes
        self._in_all = in_all
        self._most_coming = most_coming
        self._stall_s = stall_s
        self._coming: dict[_Coming, None] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def body(self, user: User) -> AsyncIterator[bytes]:
        """Yield the whole body of a user's request. Its bytes count until the `async with` block ends. Raises
        `BodyTooLarge`, `BodyTooSlow`, `BodiesFull`, `UserGone`."""
        coming = _Coming()
        self._coming[coming] = None
        if len(self._coming) > self._most_coming:
            self._oldest().give_way()
        try:
            try:
                body = await self._receive(user, coming)
            finally:
                self._coming.pop(coming, None)
            yield body
        finally:
            self.held_bytes -= coming.counted

    async def _receive(self, user: User, coming: _Coming) -> bytes:
        given = user.headers.get("content-length", "0")
        if given.isdigit() and int(given) > self._most_bytes:
            raise BodyTooLarge
        while True:
            message = await coming.next(user, self._stall_s)
            if message["type"] == "http.disconnect":
                raise UserGone
            piece = message.get("body", b"")
            self._make_room(len(piece), coming)
            coming.pieces.append(piece)
            if coming.counted > self._most_bytes:
                raise BodyTooLarge
            if not message.get("more_body", False):
                return b"".join(coming.pieces)

    def _make_room(self, nbytes: int, coming: _Coming) -> None:
        """Count this many more bytes, and drop older bodies if the bytes do not fit. Raises `BodiesFull`."""
        while self.held_bytes + nbytes > self._in_all:
            oldest = self._oldest()
            if oldest is coming:
                raise BodiesFull
            self.held_bytes -= oldest.give_way()
        self.held_bytes += nbytes
        coming.counted += nbytes

    def _oldest(self) -> _Coming:
        """Remove and return the body that has been arriving for longest."""
        oldest = next(iter(self._coming))
        del self._coming[oldest]
        return oldest


class _Coming:
    """A body that is still arriving."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.counted = 0  # bytes
        self._began = time.monotonic()
        self._gives_way = False
        self._receiving: asyncio.Future[dict[str, Any]] | None = None

    async def next(self, user: User, stall_s: float) -> dict[str, Any]:
        """Return the next message of the connection. Raises `BodyTooSlow`."""
        patience_s = min(stall_s, self._began + stall_s + self.counted / SLOWEST - time.monotonic())
        self._receiving = receiving = asyncio.ensure_future(user.receive())
        try:
            await asyncio.wait({receiving}, timeout=max(0.0, patience_s))
            if self._gives_way or not receiving.done():
                raise BodyTooSlow
            return receiving.result()
        finally:
            receiving.cancel()
            self._receiving = None

    def give_way(self) -> int:
        """Drop the part of the body that has arrived; the user then gets an error. Returns the number of bytes
        freed."""
        counted, self.counted = self.counted, 0
        self.pieces.clear()
        self._gives_way = True
        if self._receiving is not None:
            self._receiving.cancel()
        return counted
