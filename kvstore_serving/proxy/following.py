"""The list of engines, which comes from flags, from a file, or from the engines' own records in the cluster's
directory.

Each source yields `EngineRecord`s, and `Following` keeps the pools, the health checks and the KV events in step with
them. An engine that is no longer in the list gets no new requests, and finishes its running ones. If several records
have the same URL, the engine has the roles of all of them. Flags and the file come from the operator, so an error in
them at the start ends the proxy. Errors in the directory's records, or in a file that changes later, are only logged.
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

_LIST_S: Final = 5.0  # how long to wait for the directory's first list


class Following:
    """The list of engines. The event loop makes and closes it. The directory has its own thread, but only the event
    loop changes the pools."""

    def __init__(self, settings: Settings, pools: Pools, checks: Checks, events: EngineEvents) -> None:
        self._settings = settings
        self._pools = pools
        self._checks = checks
        self._events = events
        self._complained: frozenset[str] = frozenset()
        self._list: EngineList | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the first engines are in the pools. If the directory does not answer in time, return without
        engines; they are added later. Raises `SettingsError`."""
        if self._settings.engines:
            await self._follow_directory(self._settings.engines)
            return
        try:
            file = PoolsFile(self._settings.pools) if self._settings.pools else None
        except SettingsError as error:
            raise SettingsError(f"--pools {error}") from None
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
        with contextlib.suppress(asyncio.TimeoutError):  # etcd may not be reachable
            await asyncio.wait_for(first.wait(), _LIST_S)

    async def take_over(self, engines: Sequence[EngineRecord]) -> list[str]:
        """Make these the only engines from now on. Returns a message for each part of the records that cannot be
        used."""
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
                log.warning("%s; the engines are used without KV events", problem)
        self._complained = frozenset(problems)
        return problems

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._list is not None:
            await asyncio.to_thread(self._list.close)
