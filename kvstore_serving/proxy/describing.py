"""Asks engines how they name their blocks. The proxy then pairs only engines that find each other's blocks.

An engine with kvstore's connector describes the names of its blocks (`BlockNames`) in its answer, if the request asks
for them. To ask for them, the proxy requests one token for a prompt that is neither loaded nor saved. The proxy asks:

* when an engine comes up, and after a purge of the store;
* again while an engine cannot be paired with another, and when prompts that were handed over did not arrive;
* about an adapter, at the adapter's first use.

Engines that do not answer this question are paired if their models have the same root, until prompts fail to arrive.

Used by one event loop. Requests do not wait for these questions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import msgspec

from kvstore_client.engine.block_names import BlockNames
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.prefixes import StoreView
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_FIRST_S: Final = 2.0  # the wait until an engine that cannot be paired is asked again; doubled each time
_LONGEST_S: Final = 30.0
_WANTED: Final = {"kvstore": {"describe": True, "load": False, "save": False}}


class _Transfer(msgspec.Struct):
    kvstore: BlockNames | None = None


class _Told(msgspec.Struct):
    kv_transfer_params: _Transfer | None = None


_decode: Final = msgspec.json.Decoder(_Told).decode


class Describing:
    """Asks for the names of blocks, as the module describes."""

    def __init__(self, pools: Pools, upstream: Upstream, store: StoreView, timeout_s: float) -> None:
        self._pools = pools
        self._upstream = upstream
        self._store = store
        self._timeout_s = timeout_s
        self._asking: dict[tuple[Engine, str], asyncio.Task[None]] = {}

    async def look(self, engine: Engine) -> None:
        """Ask a healthy engine for the names of its blocks, if there is a reason to."""
        now = time.monotonic()
        purged = engine.asked_names_at <= self._store.purged_at
        if engine.asked_names_at and not purged:
            if now < engine.ask_names_at or not (engine.doubted or self._pools.is_unpaired(engine)):
                return
            engine.ask_names_s = min(_LONGEST_S, 2 * engine.ask_names_s)
        else:
            engine.ask_names_s = _FIRST_S
        engine.doubted = False
        model = next((each.name for each in engine.models.values() if not each.parent), None)
        if model is not None:
            await self._ask(engine, model)

    def want(self, engine: Engine, model: str) -> None:
        """Ask an engine about an adapter, unless the proxy has already asked."""
        if model in engine.adapters:
            return
        engine.adapters[model] = ""
        task = self._asking[engine, model] = asyncio.create_task(self._ask(engine, model))
        task.add_done_callback(lambda _: self._asking.pop((engine, model), None))

    def doubt(self, *engines: Engine) -> None:
        """Note that the names which these engines gave may no longer be right, because prompts did not arrive."""
        for engine in engines:
            engine.doubted = True
            engine.adapters.clear()

    async def close(self) -> None:
        for task in (tasks := list(self._asking.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, engine: Engine, model: str) -> None:
        life, engine.asked_names_at = engine.life, time.monotonic()
        engine.ask_names_at = engine.asked_names_at + engine.ask_names_s
        try:
            answer = await self._upstream.token(engine, self._timeout_s, model, _WANTED)
            told = _decode(answer.body).kv_transfer_params
        except (EngineFailed, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.info("engine %s did not say how it names the blocks of %s: %s", engine.url, model, error)
            return
        if told is None or told.kvstore is None or engine.life != life:
            return
        engine.named(told.kvstore)
        if model in engine.adapters:
            engine.adapters[model] = told.kvstore.adapter
