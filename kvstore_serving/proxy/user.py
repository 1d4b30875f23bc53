"""One user's connection, for one request: the reply as it is made, and whether the user is still there.

An ASGI connection. What must hold: a reply that the user does not read ends after `stall_s`; what is written waits for
the user's socket, so nothing piles up here. A server copies what it is given to send, so it is given little at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

Pairs = Iterable[tuple[str, str]]
JSON: Final = (("content-type", "application/json"),)
_PIECE: Final = 64 << 10  # bytes; a user who does not read has two of them here, and a socket's buffer


class UserGone(Exception):
    """The user has closed the connection, or does not read."""


class User:
    """A request's connection. One task writes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        # As they came: of a header that is there twice, `get` gives the first, which is the one that engines heed.
        self.headers = Headers(scope=scope)
        self.request_id = ""  # that a reply names, unless it names another one
        self.began = time.monotonic()
        self.status = 0  # of the reply, once it has begun
        self.ended = False  # whether the whole reply was sent
        self.first_s: float | None = None  # from the beginning to the first piece of the reply's body
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self._writing_since: float | None = None
        self._left = False

    async def receive(self) -> dict[str, Any]:
        """-> the next message of the connection: a part of the body, or that the user has left."""
        return dict(await self._receive())

    async def gone(self) -> None:
        """Returns when the user has left, or has not read for too long. To be called when the body has come."""
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
        """Send a piece of the body; returns when the user's socket has taken what was before it, and nearly all of a
        large one."""
        if self.first_s is None and piece:
            self.first_s = time.monotonic() - self.began
        for start in range(0, len(piece) or 1, _PIECE):
            part = piece[start : start + _PIECE]
            self.ended = not more and start + len(part) == len(piece)
            await self._write({"type": "http.response.body", "body": part, "more_body": not self.ended})

    async def reply(self, status: int, body: bytes, headers: Pairs = JSON) -> None:
        """The whole reply."""
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        await self.write(body, more=False)

    async def refuse(
        self, status: int, message: str, kind: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """An error in the form of OpenAI's API."""
        await self.reply(status, error_body(status, message, kind, param), [*JSON, *(headers or {}).items()])

    async def _write(self, message: dict[str, Any]) -> None:
        # Checked before and after: a server takes what is sent to a user who has gone, and says nothing.
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


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """-> an error as OpenAI's API and vLLM give it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})
