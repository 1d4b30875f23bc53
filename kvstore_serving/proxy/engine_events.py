"""The KV events of engines: which publishers `Routes` listens to, as engines come and go.

`Routes` and pyzmq, which it needs, are loaded with the first engine that has events. Connections are made and ended in
a thread: `Routes` holds its lock while an engine is asked for events that were missed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from kvstore_client.engine.routing import Found, Routes


class EngineEvents:
    """Used by one event loop; `find` by any thread."""

    def __init__(self) -> None:
        self._routes: Routes | None = None
        self._heard: dict[str, tuple[str, str]] = {}
        self._lives: dict[str, int] = {}  # that were told of
        self._lock = threading.Lock()  # for these
        self._one_at_a_time = asyncio.Lock()

    @property
    def heard(self) -> bool:
        """Whether any engine's events are."""
        return bool(self._heard)

    async def follow(self, wanted: Mapping[str, tuple[str, str]]) -> list[str]:
        """Listen to these, by URL the publisher and the replay address, and to no others. -> what cannot be used, in
        words; the others are heard."""
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
        """`Routes.find`; only while some are heard. lives: of the engines now, by URL; in another life than before, an
        engine has nothing of before."""
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
