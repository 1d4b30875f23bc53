"""The names of the operations of `bench_first_token` in its results. Tables and charts need them without torch."""

from __future__ import annotations

from typing import Final

COMPUTED: Final = "computed"
SAVED: Final = "computed and saved"
PINNED: Final = "one pinned copy"
IN_CACHE: Final = "already in the cache"
HOST: Final = "from host memory"
SHARED: Final = "from the store, shared memory"
TCP: Final = "from the store, TCP"
