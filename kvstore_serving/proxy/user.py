"""A user's connection during one request: the reply, and whether the user is still connected.

It is an ASGI connection. If the user stops reading, the reply ends after `stall_s`. Writes wait for the user's socket,
so no data piles up here. The ASGI server copies the data that it sends, so it gets only a little data at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

Pairs = Iterable[tuple[str, str]]
JSON_HEADERS: Final = (("content-type", "application/json"),)
_BODY_PIECE: Final = 64 << 10  # bytes; if a user does not read, two pieces and a socket's buffer wait to be sent


class UserGone(Exception):
    """The user has closed the connection, or no longer reads."""


class User:
    """A request's connection. One task writes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        # The headers in their order. If a header occurs twice, `get` returns the first one, which engines use, too.
        self.headers = Headers(scope=scope)
        self.request_id = ""  # the id in the reply's header, unless the reply sets another one
        self.began = time.monotonic()
        self.status = 0  # the reply's status, once the reply has begun
        self.ended = False  # whether the whole reply was sent
        self.first_s: float | None = None  # seconds from the request to the first piece of the reply's body
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self._writing_since: float | None = None
        self._left = False

    async def receive(self) -> dict[str, Any]:
        """Return the next message of the connection: a part of the body, or the user's disconnection."""
        return dict(await self._receive())

    async def gone(self) -> None:
        """Return when the user has disconnected, or has not read for too long. Call this only after the request's whole
        body has arrived."""
        receiving = asyncio.ensure_future(self._receive())
        try:
            while True:
                done, _ = await asyncio.wait({receiving}, timeout=self._stall_s / 4)
                since = self._writing_since
                if (done and receiving.result()["type"] == "http.disconnect") or (
                    since is not None and time.monotonic() - since > self._stall_s
                ):
                    self._left = True
                    return
                if done:
                    receiving = asyncio.ensure_future(self._receive())
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def start(self, status: int, headers: Pairs) -> None:
        self.status = status
        pairs = [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers]
        if self.request_id and not any(name == b"x-request-id" for name, _ in pairs):
            pairs.append((b"x-request-id", self.request_id.encode()))
        await self._write({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece of the body. Returns when the user's socket has accepted all earlier pieces, and nearly all of
        this piece if it is large."""
        if self.first_s is None and piece:
            self.first_s = time.monotonic() - self.began
        for start in range(0, len(piece) or 1, _BODY_PIECE):
            part = piece[start : start + _BODY_PIECE]
            self.ended = not more and start + len(part) == len(piece)
            await self._write({"type": "http.response.body", "body": part, "more_body": not self.ended})

    async def reply(self, status: int, body: bytes, headers: Pairs = JSON_HEADERS) -> None:
        """Send the whole reply."""
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        await self.write(body, more=False)

    async def refuse(
        self, status: int, message: str, kind: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Reply with an error in the format of OpenAI's API."""
        await self.reply(status, error_body(status, message, kind, param), [*JSON_HEADERS, *(headers or {}).items()])

    async def _write(self, message: dict[str, Any]) -> None:
        # Checked before and after: a server silently drops data for a client that has disconnected.
        if self._left:
            raise UserGone
        self._writing_since = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            raise UserGone from None
        finally:
            self._writing_since = None
        if self._left and not self.ended:
            raise UserGone


async def while_there(user: User, work: Awaitable[None]) -> None:
    """Do the work. Raises `UserGone` if the user disconnects before the work is done."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(user.gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done() and not user.ended:  # the server reports a disconnect after each complete reply, too
            raise UserGone
        await doing
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """Return an error in the format of OpenAI's API and vLLM."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})
