"""Which engines there are: named by flags, by a file, or by themselves in the cluster's directory.

Each way yields `EngineRecord`s, and `Following` has the pools, the health checks and the KV events agree with them. An
engine that is not named any more gets no new requests; what it is answering goes on. One URL may have several records,
then it has all their roles. Flags and the file are the operator's: what cannot be used ends the start. Records of the
directory are not trusted, and neither is a file that changes later: what cannot be used is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from kvstore.cluster.members import DirectoryError
from kvstore_client.engine.block_names import BlockNames
from kvstore_client.engine.directory import EngineList, EngineRecord
from kvstore_serving.proxy.checks import Checks
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.pools import Pools, Role
from kvstore_serving.proxy.pools_file import PoolsFile
from kvstore_serving.proxy.settings import Settings, SettingsError

log = logging.getLogger(__name__)

_LIST_S: Final = 5.0  # for the first list of the directory to come


class Following:
    """Made and closed by the event loop, which alone touches the pools; the directory has a thread of its own."""

    def __init__(self, settings: Settings, pools: Pools, checks: Checks, events: EngineEvents) -> None:
        self._settings = settings
        self._pools = pools
        self._checks = checks
        self._events = events
        self._complained: frozenset[str] = frozenset()
        self._list: EngineList | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the first engines are in the pools, or the directory does not say in time: then they come
        later. Raises `SettingsError`."""
        if self._settings.engines:
            await self._follow_directory(self._settings.engines)
            return
        file = PoolsFile(self._settings.pools) if self._settings.pools else None
        problems = await self.take_over(file.engines if file is not None else self._settings.named())
        if problems:
            raise SettingsError("; ".join(problems))
        if file is not None:
            self._task = asyncio.create_task(file.follow(self.take_over, self._settings.check_interval_s))

    async def _follow_directory(self, url: str) -> None:
        loop, first = asyncio.get_running_loop(), asyncio.Event()

        async def take_over(engines: Sequence[EngineRecord]) -> None:
            await self.take_over(engines)
            first.set()

        def changed(engines: dict[str, EngineRecord]) -> None:
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(take_over(list(engines.values())), loop)

        try:
            self._list = EngineList(url, changed)
        except (ValueError, DirectoryError) as error:
            raise SettingsError(f"--engines: {error}") from None
        with contextlib.suppress(asyncio.TimeoutError):  # etcd may be away
            await asyncio.wait_for(first.wait(), _LIST_S)

    async def take_over(self, engines: Sequence[EngineRecord]) -> list[str]:
        """From now on these engines there are, and no others. -> what cannot be used of them, in words."""
        roles: dict[str, set[Role]] = {}
        weights: dict[str, str] = {}
        names: dict[str, BlockNames] = {}
        events: dict[str, tuple[str, str]] = {}
        for record in engines:
            roles.setdefault(record.url, set()).update(record.roles)
            weights[record.url] = record.weights
            names[record.url] = BlockNames(record.namespaces, record.generation)
            if record.events:
                events[record.url] = record.events, record.replay
        for url in self._pools.engines.keys() - roles.keys():
            log.info("engine %s has left", url)
            self._pools.remove(url)
        for url, found in roles.items():
            self._pools.set(url, found, weights[url], names[url])
        self._checks.follow()
        problems = await self._events.follow(events)
        for problem in problems:
            if problem not in self._complained:
                log.warning("%s; the engines are used without", problem)
        self._complained = frozenset(problems)
        return problems

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._list is not None:
            await asyncio.to_thread(self._list.close)
