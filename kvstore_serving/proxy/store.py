"""Whether the store answers. Without it nothing can be handed over, so each request is served by one engine alone.

The client waits for the network, so it is asked in a thread; the answer is read in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.errors import KVStoreError

log = logging.getLogger(__name__)

_NOBODY: Final = Namespace(model="kvstore-proxy", dtype="uint8", block_tokens=1, block_bytes=1)


class StoreWatch:
    """Asks the store now and then. One event loop. `works`: at least one of its shards answered when it was asked."""

    def __init__(self, endpoint: tuple[str, ...], interval_s: float, timeout_s: float) -> None:
        """Raises `ValueError` for an endpoint that is none."""
        self.works = False
        self.endpoint = endpoint
        self._interval_s = interval_s
        self._client = KVStoreClient(list(endpoint), _NOBODY, timeout_s=timeout_s, fail_open=True)
        self._task: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Ask once."""
        try:
            works = bool((await asyncio.to_thread(self._client.info)).shards)
        except KVStoreError:
            works = False
        if works != self.works:
            where = ", ".join(self.endpoint)
            log.warning("the store at %s %s", where, "answers" if works else "does not answer: nothing is handed over")
        self.works = works

    def follow(self) -> None:
        """Ask again and again, until `close`."""
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def close(self) -> None:
        """Stop, and disconnect."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._client.close)
