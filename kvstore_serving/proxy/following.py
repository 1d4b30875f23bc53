"""The engines that register themselves: the directory's list becomes the pools'.

The directory has a thread of its own; what it finds is taken over by the event loop, which alone touches the pools. An
engine that leaves the list gets no new requests; what it is answering goes on. One URL may have several records, then
it has all their roles.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore_client.engine.directory import EngineList, EngineRecord
from kvstore_serving.proxy.checks import Checks
from kvstore_serving.proxy.pools import Pools, Role

log = logging.getLogger(__name__)


class Following:
    """Made and closed by the event loop."""

    def __init__(self, url: str, pools: Pools, checks: Checks) -> None:
        """Raises `ValueError` and `DirectoryError` as `EngineList` does."""
        self._pools = pools
        self._checks = checks
        self._loop = asyncio.get_running_loop()
        self.first = asyncio.Event()  # a list has come
        self._list = EngineList(url, self._changed)

    async def close(self) -> None:
        await asyncio.to_thread(self._list.close)

    def _changed(self, engines: dict[str, EngineRecord]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_over, engines)

    def _take_over(self, engines: dict[str, EngineRecord]) -> None:
        roles: dict[str, set[Role]] = {}
        weights: dict[str, str] = {}
        for record in engines.values():
            roles.setdefault(record.url, set()).update(record.roles)
            weights[record.url] = record.weights
        for url in self._pools.engines.keys() - roles.keys():
            log.info("engine %s has left", url)
            self._pools.remove(url)
        for url, found in roles.items():
            self._pools.set(url, found, weights[url])
        self._checks.follow()
        self.first.set()
