"""The engines that a file names: `--pools FILE`, TOML, read again when it changes.

    [[engines]]
    url = "http://gpu-7:8000"
    roles = ["prefill", "decode"]

Each entry has the fields of an `EngineRecord`; others are errors, so that a typo is heard of. The path is looked at,
not the open file: a file that is renamed into place and a link that points elsewhere, as in Kubernetes, are changes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from kvstore_client.engine.directory import EngineRecord
from kvstore_serving.proxy.settings import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

_Stamp: TypeAlias = tuple[int, int, int]


class _Entry(EngineRecord, frozen=True, forbid_unknown_fields=True):
    """An engine, as the file names it."""


class _Pools(msgspec.Struct, forbid_unknown_fields=True):
    engines: Annotated[tuple[_Entry, ...], msgspec.Meta(min_length=1)]


_read: Final = msgspec.json.Decoder(_Pools).decode


class PoolsFile:
    """The file. Used by one event loop."""

    def __init__(self, path: str) -> None:
        """Raises `SettingsError` if it cannot be used."""
        self._path = Path(path)
        self._stamp = self._look()
        self.engines = read_pools(self._path)

    async def follow(self, changed: Callable[[Sequence[EngineRecord]], Awaitable[object]], interval_s: float) -> None:
        """Call back after each change, for ever. A file that cannot be used is logged once, and the engines before
        it stay. A change counts when two looks in a row see the same, so a file that is being written is not read."""
        seen = self._stamp
        complained = ""
        while True:
            await asyncio.sleep(interval_s)
            try:
                now = await asyncio.to_thread(self._look)
                if now == self._stamp or now != seen:
                    seen = now
                    complained = complained if now != self._stamp else ""
                    continue
                self.engines = await asyncio.to_thread(read_pools, self._path)
            except SettingsError as error:
                if str(error) != complained:
                    log.warning("%s; the engines stay as they are", error)
                complained = str(error)
                continue
            self._stamp, complained = now, ""
            log.info("%s has changed: it names %d engines", self._path, len(self.engines))
            await changed(self.engines)

    def _look(self) -> _Stamp:
        try:
            found = self._path.stat()
        except OSError as error:
            raise SettingsError(f"--pools: {error}; expected a TOML file with [[engines]]") from None
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_pools(path: Path) -> tuple[EngineRecord, ...]:
    """-> the engines that the file names. Raises `SettingsError`."""
    try:
        engines = _read(msgspec.json.encode(tomllib.loads(path.read_text(encoding="utf-8")))).engines
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise SettingsError(f"--pools {path}: {error}; expected [[engines]] with url and roles each") from None
    for number, engine in enumerate(engines):
        if any(engine.url == other.url for other in engines[:number]):
            raise SettingsError(f"--pools {path}: {engine.url} is named twice; expected one entry with both roles")
    return engines
