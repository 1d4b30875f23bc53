"""Remembers, for each response of /v1/responses, the engine that keeps it.

Engines keep responses in their own memory, so a request that names a response must go to the engine that made it. The
proxy reads the id of each response that it passes on, and remembers the latest ones. Used by one event loop.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from kvstore_serving.proxy.pools import Engine, Pools

RESPONSES_PATH: Final = "/v1/responses"
_OF_ONE: Final = re.compile(r"/v1/responses/([\w-]{1,200})(?:/cancel)?", re.ASCII)
_ID: Final = re.compile(rb'"id"\s*:\s*"([\w-]{1,200})"')
_MAX_RESPONSES: Final = 100_000
_LOOK_BYTES: Final = 64 << 10  # the id is near the beginning: it is searched for in this many bytes of an answer


class _Body(msgspec.Struct):
    previous_response_id: str | None = None


_decode: Final = msgspec.json.Decoder(_Body).decode


def is_of_one(path: str) -> bool:
    """Return whether a path is for one response that an engine keeps."""
    return _OF_ONE.fullmatch(path) is not None


def named_in(path: str, body: bytes) -> str:
    """Return the id of the response that a request needs, or an empty string."""
    match = _OF_ONE.fullmatch(path)
    if match is not None:
        return match[1]
    if path != RESPONSES_PATH:
        return ""
    try:
        return _decode(body).previous_response_id or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # the engine reports what is wrong with it


class Responses:
    """The engines that keep the latest responses."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._urls: OrderedDict[str, str] = OrderedDict()  # by the id of the response

    def engine_of(self, response: str) -> Engine | None:
        """Return the engine that keeps a response if it works, and None if no such engine is known."""
        url = self._urls.get(response)
        if url is not None:
            self._urls.move_to_end(response)
        elif len(self._pools.engines) == 1:
            url = next(iter(self._pools.engines))  # the only engine must be the one
        engine = self._pools.engines.get(url or "")
        return engine if engine is not None and engine.healthy else None

    async def noting(self, engine: Engine, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of an answer unchanged, and remember the id that they contain."""
        begin: bytearray | None = bytearray()
        async for piece in pieces:
            if begin is not None:
                begin += piece[:_LOOK_BYTES]
                match = _ID.search(begin)
                if match is not None:
                    self._urls[match[1].decode()] = engine.url
                    if len(self._urls) > _MAX_RESPONSES:
                        self._urls.popitem(last=False)
                if match is not None or len(begin) >= _LOOK_BYTES:
                    begin = None
            yield piece
