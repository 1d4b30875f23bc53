"""Remembers, from one pass of a drain to the next, which copies of blocks need no more work."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvstore.wire import MAX_KEY_BYTES
from kvstore.wire.queries import KeyArray

Holder = tuple[str, str, bytes]  # a node's instance, the name of its shard, and a namespace
_Fingerprints = npt.NDArray[np.uint64]


class Settled:
    """The copies that earlier movers made or found, and that are not checked again. Thread-safe.

    A full shard may have evicted some of these blocks since, but it could take them again only in place of others. The
    record of each copy takes 8 bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Holder, list[_Fingerprints]] = {}
        # Keys may have most bytes in common. But because the weights are random, only one pair of keys in 2**57 has
        # equal fingerprints.
        self._weights = np.random.default_rng().integers(0, 1 << 64, MAX_KEY_BYTES, dtype=np.uint64)

    def add(self, holder: Holder, keys: KeyArray) -> None:
        """Record that the holder has or had these blocks."""
        with self._lock:
            self._found.setdefault(holder, []).append(np.sort(self._fingerprints(keys)))

    def among(self, holder: Holder, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Return for each key whether it was added for this holder."""
        with self._lock:
            found = self._found.get(holder)
            if not found:
                return np.zeros(len(keys), dtype=np.bool_)
            if len(found) > 1:
                found[:] = [np.sort(np.concatenate(found))]
            (known,) = found
        wanted = self._fingerprints(keys)
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        there: npt.NDArray[np.bool_] = known[at] == wanted
        return there

    def _fingerprints(self, keys: KeyArray) -> _Fingerprints:
        found: _Fingerprints = keys.astype(np.uint64) @ self._weights[: keys.shape[1]]
        return found
