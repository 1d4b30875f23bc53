"""Finds out when a full file system has room again, so that the tier can write blocks to it again.

A thread looks, because a file system may hang: `LOOK_S` after the file system was found full, and then again and again.
If the file system fills up soon after it had room, the time between two looks doubles. So a disk that is always nearly
full changes the state of the tier a few times per hour at most.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from kvstore.disk.volume import Volume

LOOK_S: Final = 60.0
MAX_LOOK_S: Final = 1800.0
STEADY_S: Final = 600.0  # if the file system had room for longer than this, the time between looks is `LOOK_S` again


class RoomWatch:
    """When to look for room, and what the last look found. Used by the loop's thread only."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._wait_s = LOOK_S
        self._look_at = self._room_since = float("-inf")
        self._looking = self._found = False

    def ran_out(self, now: float) -> None:
        """Begin to look for room. `now`: monotonic seconds."""
        self._wait_s = LOOK_S if now - self._room_since > STEADY_S else min(2 * self._wait_s, MAX_LOOK_S)
        self._look_at = now + self._wait_s
        self._found = False

    def found(self, now: float) -> bool:
        """Return True once when a look has found room. Start the next look if it is due. `now`: monotonic seconds."""
        if self._found:
            self._found, self._room_since = False, now
            return True
        if not self._looking and now >= self._look_at:
            self._looking = True
            self._look_at = now + self._wait_s
            volume = self._volume
            volume.background.submit(partial(volume.segments.has_room, volume.index_file_bytes()), self._looked)
        return False

    def _looked(self, room: bool | OSError) -> None:
        self._looking = False
        if isinstance(room, OSError):
            self._volume.fail(room)
        else:
            self._found = room
