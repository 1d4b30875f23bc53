"""Makes copies out of the KV cache of an engine that runs on the CPU, while its model computes.

A step ends when the model's thread has finished it, so copies on that thread would lengthen the step. Large copies are
made by another thread while the next step is computed. Small copies are made at once, without releasing the GIL. A
thread might wait milliseconds for the GIL, so passing a small copy to it would gain nothing. The copies follow the same
rules as those of a device (`layout.Copy`), so the engine keeps the blocks until the copies are done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

# A copy of this size takes a tenth of a millisecond. `_cext.gather` keeps the GIL for copies up to this size.
AT_ONCE_BYTES: Final = 512 << 10


class HostCopy:
    """A copy that the thread of `HostCopies` makes. Thread-safe. The methods raise the error of the copy, if there was
    one."""

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
        """Have `call` called by the copying thread when the copy is done or has failed. If that is already so, call it
        at once."""
        self._future.add_done_callback(lambda _: call())

    def order(self) -> None:
        """Block until the copy is done, because the calling thread itself computes."""
        self._future.result()


class HostCopies:
    """Makes copies in the order of the calls. Thread-safe. Its thread ends when this object is deleted."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-out")

    def start(self, copy: Callable[[], None]) -> HostCopy:
        return HostCopy(self._thread.submit(copy))
