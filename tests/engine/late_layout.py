"""A layout that makes its copies into the cache as late as a device may: when the caller waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_client.engine.paged.device import Fence
from kvstore_client.engine.paged.layout import BlockLayout, Copy
from kvstore_client.engine.transfer_in import Rows


class LateCopy:
    def __init__(self, make: Callable[[], Copy]) -> None:
        self._make: Callable[[], Copy] | None = make

    def done(self) -> bool:
        return self._make is None

    def wait(self) -> None:
        if self._make is not None:
            self._make().wait()
            self._make = None

    def order(self) -> None:
        self.wait()


class LateLayout(BlockLayout):
    def swap_in(
        self, pool: Rows, slots: Sequence[int], block_ids: Sequence[int], after: Fence | None = None, part: int = 0
    ) -> LateCopy:
        return LateCopy(lambda: super(LateLayout, self).swap_in(pool, slots, block_ids, after, part))
