"""Which engine keeps the state of which response of /v1/responses.

Engines keep responses in their own memory, so a request that names one must go to the engine that made it. The proxy
learns the id of each response as it passes by, and keeps the last ones. One event loop.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from kvstore_serving.proxy.pools import Engine, Pools

PATH: Final = "/v1/responses"
_OF_ONE: Final = re.compile(r"/v1/responses/([\w-]{1,200})(?:/cancel)?", re.ASCII)
_ID: Final = re.compile(rb'"id"\s*:\s*"([\w-]{1,200})"')
_MOST: Final = 100_000
_LOOK_BYTES: Final = 64 << 10  # of an answer: its id comes first


class _Body(msgspec.Struct):
    previous_response_id: str | None = None


_decode: Final = msgspec.json.Decoder(_Body).decode


def is_of_one(path: str) -> bool:
    """Whether a path is about one response that an engine keeps."""
    return _OF_ONE.fullmatch(path) is not None


def named_in(path: str, body: bytes) -> str:
    """-> the response that a request needs; empty: none."""
    match = _OF_ONE.fullmatch(path)
    if match is not None:
        return match[1]
    if path != PATH:
        return ""
    try:
        return _decode(body).previous_response_id or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # the engine says what is wrong with it


class Responses:
    """The engines of the last responses."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._urls: OrderedDict[str, str] = OrderedDict()  # by response

    def engine_of(self, response: str) -> Engine | None:
        """-> the engine that has it, if it works; None: it is not known."""
        url = self._urls.get(response)
        if url is not None:
            self._urls.move_to_end(response)
        elif len(self._pools.engines) == 1:
            url = next(iter(self._pools.engines))  # who else
        engine = self._pools.engines.get(url or "")
        return engine if engine is not None and engine.healthy else None

    async def noting(self, engine: Engine, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of an answer, whose id is noted."""
        begin: bytearray | None = bytearray()
        async for piece in pieces:
            if begin is not None:
                begin += piece[:_LOOK_BYTES]
                match = _ID.search(begin)
                if match is not None:
                    self._urls[match[1].decode()] = engine.url
                    if len(self._urls) > _MOST:
                        self._urls.popitem(last=False)
                if match is not None or len(begin) >= _LOOK_BYTES:
                    begin = None
            yield piece
