"""The KV events of engines. `Routes` subscribes to engines that are added, and unsubscribes from those that are
removed.

`Routes` and pyzmq, which `Routes` needs, are imported when the first engine that publishes events is added. Connections
are opened and closed in a thread, because `Routes` holds its lock while it asks an engine for missed events.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from kvstore_client.engine.routing import Found, Routes


class EngineEvents:
    """The engines whose events are followed. Used by one event loop; any thread may call `find`."""

    def __init__(self) -> None:
        self._routes: Routes | None = None
        self._heard: dict[str, tuple[str, str]] = {}
        self._lives: dict[str, int] = {}  # the life of each engine that `find` was last called with
        self._lock = threading.Lock()  # guards `_lives`
        self._one_at_a_time = asyncio.Lock()

    @property
    def heard(self) -> bool:
        """Whether the events of any engine are followed."""
        return bool(self._heard)

    async def follow(self, wanted: Mapping[str, tuple[str, str]]) -> list[str]:
        """Follow exactly the engines in `wanted`, which maps each URL to the publisher and the replay address. Returns
        a message for each engine that cannot be followed; the others are followed."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._follow, dict(wanted))

    def _follow(self, wanted: dict[str, tuple[str, str]]) -> list[str]:
        if self._routes is None:
            if not wanted:
                return []
            try:
                self._routes = Routes()
            except ImportError as error:
                return [f'the KV events of engines need pyzmq ({error}): pip install "llm-kvstore[routing]"']
        problems = []
        for url in [url for url, addresses in self._heard.items() if wanted.get(url) != addresses]:
            self._routes.remove(url)
            del self._heard[url]
            with self._lock:
                self._lives.pop(url, None)
        for url in wanted.keys() - self._heard.keys():
            try:
                self._routes.add(url, *wanted[url])
            except ValueError as error:
                problems.append(f"the KV events of {url}: {error}")
            else:
                self._heard[url] = wanted[url]
        return problems

    def find(self, tokens: Sequence[int], *, lives: Mapping[str, int], lora_name: str, cache_salt: str) -> Found:
        """Call `Routes.find`. At least one engine's events must be followed.

        lives: the current life of each engine, by URL; an engine in a new life has lost the blocks of its previous life
        """
        assert self._routes is not None
        with self._lock:
            for url in lives.keys() & list(self._heard):
                before, self._lives[url] = self._lives.get(url, 0), lives[url]
                if before and lives[url] != before:
                    self._routes.restarted(url)
        return self._routes.find(tokens, lora_name=lora_name, cache_salt=cache_salt)

    async def close(self) -> None:
        async with self._one_at_a_time:
            if self._routes is not None:
                await asyncio.to_thread(self._routes.close)
