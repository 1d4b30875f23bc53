"""Copies out of the cache of an engine on the CPU, beside its model.

A step ends when the model's thread is through, so a large copy is left to a thread, which makes it while the next step
is computed. What is small is copied at once, and without giving the GIL away, which other threads may keep for
milliseconds: handing it over would take as long. The engine keeps the blocks as it does for a device's copies, whose
rules these follow (`layout.Copy`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

# A tenth of a millisecond. `_cext.gather` keeps the GIL for as much.
AT_ONCE_BYTES: Final = 512 << 10


class HostCopy:
    """A copy that the thread makes. Thread-safe. The methods raise what the copy raised."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self) -> None:
        self._future.result()

    def then(self, call: Callable[[], None]) -> None:
        """Have this called when the copy is done or has failed, by the thread that made it; at once if it is."""
        self._future.add_done_callback(lambda _: call())

    def order(self) -> None:
        """Blocks until the copy is done: the calling thread is what computes."""
        self._future.result()


class HostCopies:
    """Makes copies in the order of the calls. Thread-safe. Its thread ends with it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-out")

    def start(self, copy: Callable[[], None]) -> HostCopy:
        return HostCopy(self._thread.submit(copy))
