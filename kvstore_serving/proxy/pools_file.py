"""The engines that are listed in a TOML file (`--pools FILE`), which is read again when it changes.

    [[engines]]
    url = "http://gpu-7:8000"
    roles = ["prefill", "decode"]

Each entry has the fields of an `EngineRecord`. Any other field is an error, so that a typing error is reported. The
proxy watches the path and not the open file. So it sees when a file is renamed into place, or when a link is pointed
elsewhere, as Kubernetes does.
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
    """One entry of the file."""


class _Pools(msgspec.Struct, forbid_unknown_fields=True):
    engines: Annotated[tuple[_Entry, ...], msgspec.Meta(min_length=1)]


_read: Final = msgspec.json.Decoder(_Pools).decode


class PoolsFile:
    """A file that lists engines. Used by one event loop."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises `SettingsError` if it cannot be used."""
        self._path = Path(path)
        self._stamp = self._look()
        self.engines = read_pools(self._path)

    async def follow(self, changed: Callable[[Sequence[EngineRecord]], Awaitable[object]], interval_s: float) -> None:
        """Call `changed` after each change, for ever. If the file cannot be used, this is logged once, and the engines
        stay as they were. A changed file is read when two checks in a row find it the same, so a file that is still
        being written is not read."""
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
                    log.warning("--pools %s; the engines stay as they are", error)
                complained = str(error)
                continue
            self._stamp, complained = now, ""
            log.info("%s has changed: it names %d engines", self._path, len(self.engines))
            await changed(self.engines)

    def _look(self) -> _Stamp:
        try:
            found = self._path.stat()
        except OSError as error:
            raise _unusable(self._path, error) from None
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_pools(path: Path) -> tuple[EngineRecord, ...]:
    """Return the engines that the file names. Raises `SettingsError`."""
    try:
        engines = _read(msgspec.json.encode(tomllib.loads(path.read_text(encoding="utf-8")))).engines
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise _unusable(path, error) from None
    for number, engine in enumerate(engines):
        if any(engine.url == other.url for other in engines[:number]):
            raise SettingsError(f"{path}: {engine.url} is named twice; expected one entry with both roles")
    return engines


def _unusable(path: Path, error: Exception) -> SettingsError:
    why = error.strerror if isinstance(error, OSError) else error  # the text of an `OSError` names the path again
    return SettingsError(f"{path}: {why}; expected a TOML file of [[engines]] entries, each with url and roles")
