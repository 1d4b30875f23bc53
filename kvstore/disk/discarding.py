"""Removes the persistent index when blocks are deleted and no keeper can change it any more.

The index still has the deleted blocks, so after a restart it would bring them back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.disk.format import INDEX
from kvstore.disk.threads import Completions

log = logging.getLogger("kvstore.disk")


class Discarding:
    """The removal of one shard's index. Used by the loop's thread only. A thread of its own removes the index, because
    the disk may hang."""

    def __init__(self, directory: Path, completions: Completions) -> None:
        self._directory = directory
        self._completions = completions
        self._waiting: list[Callable[[], None]] = []
        self.done = False  # the index was removed, or could not be removed

    @property
    def running(self) -> bool:
        """True while the thread removes the index."""
        return bool(self._waiting)

    def after(self, call: Callable[[], None]) -> None:
        """Remove the index, and then call `call`."""
        if self.done:
            call()
            return
        self._waiting.append(call)
        if len(self._waiting) == 1:
            threading.Thread(target=self._discard, name="kvstore-disk-discard", daemon=True).start()

    def _discard(self) -> None:
        try:
            index = self._directory / INDEX
            for name in os.listdir(index):
                os.unlink(index / name)
            folder = os.open(index, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
            log.error(
                "disk: blocks were deleted while the tier cannot write; its index was removed, so a restart empties it"
            )
        except FileNotFoundError:
            pass  # there is no index yet
        except OSError as error:
            log.error("disk: blocks deleted while the tier cannot write may come back after a restart: %s", error)
        self._completions.add(self._discarded)

    def _discarded(self) -> None:
        self.done = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
