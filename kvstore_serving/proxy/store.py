"""Whether the store answers, and since when it has lost no blocks.

Without the store nothing can be handed over, so each request is served by one engine alone. The client blocks while it
waits for the network, so it runs in a thread, and the event loop reads the result. Only engines know the keys of a
prompt's blocks. So the proxy cannot ask which blocks the store has; it asks whether the store has lost any.
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
_FRESH_S: Final = 0.1  # an answer that is younger than this is used again
_ASKED_S: Final = 0.25  # how long a request waits for the store's answer


class StoreWatch:
    """Asks the store at intervals. Used by one event loop. `works`: whether at least one shard answered the last
    time."""

    def __init__(self, endpoint: tuple[str, ...], interval_s: float, timeout_s: float) -> None:
        """Raises `ValueError` for an invalid endpoint."""
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
        since_s = round(time.monotonic() - self.since, 1) if self.since else None
        return {
            "endpoint": list(self.endpoint),
            "answers": self.works,
            "nothing_lost_for_s": since_s,
            "last_loss": self._losses.why,
        }

    async def check(self) -> None:
        """Ask the store once. Calls at the same time share one request."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def look_again(self) -> bool:
        """Ask the store, unless its last answer is very recent. Returns whether the store has lost blocks since the
        last answer. Returns False if the store does not answer at once."""
        before = self.since
        if time.monotonic() - self._asked > _FRESH_S:
            with contextlib.suppress(asyncio.TimeoutError):  # the next check will show it
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
            if works:
                log.info("the store at %s answers", where)
            else:
                log.warning("the store at %s does not answer: nothing is handed over", where)
        self.works, self._asked = works, asked
        if works and self._losses.look(shards, asked, time.monotonic()):
            log.info("the store: %s; all blocks from before are assumed to be lost", self._losses.why)

    def follow(self) -> None:
        """Ask the store at intervals until `close` is called."""
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
