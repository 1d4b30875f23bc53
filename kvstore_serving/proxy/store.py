"""Whether the store answers, and since when it has kept what it was given.

Without it nothing can be handed over, so each request is served by one engine alone. The client waits for the network,
so it is asked in a thread; the answer is read in the event loop. What a prompt's blocks are called there only engines
know: the store is asked whether it lost blocks, and not which it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.errors import KVStoreError
from kvstore_serving.proxy.store_losses import StoreLosses

log = logging.getLogger(__name__)

_NOBODY: Final = Namespace(model="kvstore-proxy", dtype="uint8", block_tokens=1, block_bytes=1)
_FRESH_S: Final = 0.1  # an answer that is as young needs no other
_ASKED_S: Final = 0.25  # that a request waits for one


class StoreWatch:
    """Asks the store now and then. One event loop. `works`: at least one of its shards answered when it was asked."""

    def __init__(self, endpoint: tuple[str, ...], interval_s: float, timeout_s: float) -> None:
        """Raises `ValueError` for an endpoint that is none."""
        self.works = False
        self.endpoint = endpoint
        self._interval_s = interval_s
        self._client = KVStoreClient(list(endpoint), _NOBODY, timeout_s=timeout_s, fail_open=True)
        self._losses = StoreLosses()
        self._asked = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def since(self) -> float:
        """See `StoreLosses`."""
        return self._losses.since

    @property
    def purged_at(self) -> float:
        """See `StoreLosses`."""
        return self._losses.purged_at

    def status(self) -> dict[str, Any]:
        kept_s = round(time.monotonic() - self.since, 1) if self.since else None
        return {"endpoint": list(self.endpoint), "answers": self.works, "kept_s": kept_s, "lost": self._losses.why}

    async def check(self) -> None:
        """Ask once; two who want that at a time get one answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def look_again(self) -> bool:
        """Ask, unless it was asked just now. -> whether less is believed there than before; False if it does not answer
        at once."""
        before = self.since
        if time.monotonic() - self._asked > _FRESH_S:
            with contextlib.suppress(asyncio.TimeoutError):  # the next check tells
                await asyncio.wait_for(self.check(), _ASKED_S)
        return self.since > before

    async def _ask(self) -> None:
        asked = time.monotonic()
        try:
            shards = (await asyncio.to_thread(self._client.info)).shards
        except KVStoreError:
            shards = ()
        works = bool(shards)
        if works != self.works:
            where = ", ".join(self.endpoint)
            log.warning("the store at %s %s", where, "answers" if works else "does not answer: nothing is handed over")
        self.works, self._asked = works, asked
        if works and self._losses.look(shards, asked, time.monotonic()):
            log.info("the store: %s; nothing from before is taken to be there", self._losses.why)

    def follow(self) -> None:
        """Ask again and again, until `close`."""
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def close(self) -> None:
        """Stop, and disconnect."""
        for task in (self._task, self._asking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await asyncio.to_thread(self._client.close)
