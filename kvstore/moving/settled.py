"""Which copies of blocks need no more work: what a drain remembers from one pass to the next."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvstore.wire import MAX_KEY_BYTES
from kvstore.wire.asking import KeyArray

Holder = tuple[str, str, bytes]  # an instance of a node, its shard, and a namespace
_Fingerprints = npt.NDArray[np.uint64]


class Settled:
    """Copies that movers before this one made or found: they are not looked at again. A full shard may have evicted
    some since; those it would only take in place of others. 8 bytes a copy. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Holder, list[_Fingerprints]] = {}
        # Keys may have most bytes in common: random weights tell all apart, but for one pair in 2**57.
        self._weights = np.random.default_rng().integers(0, 1 << 64, MAX_KEY_BYTES, dtype=np.uint64)

    def add(self, holder: Holder, keys: KeyArray) -> None:
        """The holder has these, or had them."""
        with self._lock:
            self._found.setdefault(holder, []).append(np.sort(self._fingerprints(keys)))

    def among(self, holder: Holder, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which of these were added."""
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
