"""The store as an engine sees it: the interface that everything in `kvstore_client.engine` is written against.

Three classes implement it. `ClientStore` is a client of one store. `LocalFirstStore` puts a server on the engine's host
in front of another store. `SlicedStore` keeps each block in slices that can be read apart. They nest: a
`SlicedStore` of a `LocalFirstStore` of two `ClientStore`. An engine's adapter does not choose among them: it asks a
`StoreGuard`, whose options say what is wanted, and which has every failure count as a miss.

**What the caller guarantees**

1. Keys of one call have one length, 8 to 64 bytes, and no key comes twice. A key names the content of a block and of
   all blocks before it: it never stands for other bytes later.
2. Memory that is given to a call stays where it is until the call has returned or raised, or its steps have ended or
   were closed. Nobody else writes to rows that blocks are received into, or to blocks that are being set.
3. Only one thread at a time goes on with the steps of one call; it need not be the same thread always.
4. After `close` there are no more calls.

**What an implementation must do**

1. *Right bytes or a miss.* A block that is reported as received has the bytes that were set under its key, in the
   present generation. Whatever cannot be verified is a miss. Rows of misses may have been written to.
2. *End by the deadline.* Each call ends after `timeout_s` (by default, the store's own), and with `wait_s` after that
   much more. A shard that does not answer is a miss, is counted in `stats.unanswered`, and is explained by
   `why_unanswered`. Its silence costs calls to other shards nothing.
3. *Raise nothing but* `KVStoreError` for a failure of the store, and `ValueError`, `TypeError` or `IndexError` for a
   wrong argument. Nothing is changed in the caller's memory after that.
4. *Never go back.* `generation` only rises. What was set with an older one is refused and counts as an error of the
   `SetResult`; what was stored in an older one is a miss.
5. *Let any thread call.* All methods may be called by several threads at once, and in a child process after a fork.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.exchange import Steps, drive
from kvstore_client._links.link import Link
from kvstore_client.errors import KVStoreError
from kvstore_client.results import ClientStats, Lookup, SetResult

# By key: (n,) bool.
Present: TypeAlias = "npt.NDArray[np.bool_]"


class Promised(Protocol):
    """What a promise has led to. `Promise` is one. Its methods wait for the store. Thread-safe."""

    @property
    def present(self) -> Present:
        """Which blocks are in the store."""

    @property
    def others(self) -> Present:
        """Which blocks others have promised: `get_into_steps(…, wait_s=…)` waits for them."""

    def renew(self) -> None:
        """Promise what was not set for as long again, from now on. Raises `KVStoreError`."""

    def withdraw(self) -> None:
        """Say that what was not set will not be: who waits for it misses at once. Does not raise."""


class Store(Protocol):
    """See the module. `keys` are bytes; `timeout_s` is in seconds, and None stands for the store's own; results by key
    are in the order of the keys."""

    @property
    def generation(self) -> int:
        """Of the namespace. It rises when somebody purges it; what was read or made before is of no use any more."""

    @property
    def reached(self) -> bool:
        """Whether the store has ever answered, so that `generation` is known."""

    @property
    def stats(self) -> ClientStats:
        """Counters since the store was opened."""

    # ---- what is there -------------------------------------------------------------------------------------------

    def match_prefix(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        """How many leading keys of a chain are there without a gap. refresh: count it as a use. pin_s: keep what was
        found from eviction for so long, as far as the store may."""

    def contains(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Present:
        """Which keys are there. Options as of `match_prefix`."""

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        """Which keys need not be set, because the store that the fleet shares has them."""

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Lookup:
        """How many leading keys of a chain are in the store that the fleet shares, and how many are there or
        promised."""

    def promise(self, keys: Sequence[bytes], *, ttl_s: float = 30.0, timeout_s: float | None = None) -> Promised:
        """Tell the store that the fleet shares that these blocks will be set. What others have promised, or is there,
        is not promised. It holds until all is set, for `ttl_s` at most unless it is renewed."""

    # ---- blocks --------------------------------------------------------------------------------------------------

    def get_into_steps(
        self,
        keys: Sequence[bytes],
        out: npt.NDArray[np.uint8],
        slots: Sequence[int],
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[Present]:
        """Receive block i into `out[slots[i]]`. -> which blocks arrived.

        out: uint8, rows of `block_bytes`, C-contiguous. slots: different rows. wait_s: wait for promised blocks.
        It runs in steps, so that one thread can have many calls under way (`engine.multiplexer`); a store that has no
        use for that blocks in its first step, and yields nothing. `close` of the steps gives up what was asked for.
        alone: this call has its thread for itself, and may block instead of yielding.
        """

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        """The shards that a read of these keys asks first, as opaque values: reads that need the same slow shard are
        not all begun. Empty: that is not known. Never blocks."""

    def set(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        deferred: bool = True,
        parent: Sequence[bytes | None],
        priority: int = 0,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> SetResult:
        """Store `blocks[i]`, bytes-like of `block_bytes`, under `keys[i]`. A block that is there is left alone.

        deferred: return when the store owns the bytes; every later lookup finds them. parent: by block, which one it
        follows in its chain; None: it is the first. priority: of eviction. ttl_s: how long they live. generation: in
        which they were made; None: now.
        """

    def expire(self, keys: Sequence[bytes], *, ttl_s: float | None = None) -> Present:
        """Give blocks another time to live, from now on; None: what the store's rules say. -> which ones are there."""

    # ---- the store -----------------------------------------------------------------------------------------------

    def info(self, *, timeout_s: float | None = None) -> Any:
        """The state of the store that the fleet shares, a `StoreInfo`."""

    def why_unanswered(self) -> KVStoreError:
        """The last failure of a shard."""

    def close(self) -> None:
        """Disconnect. Calls under way fail."""


def get_into(
    store: Store,
    keys: Sequence[bytes],
    out: npt.NDArray[np.uint8],
    slots: Sequence[int],
    *,
    wait_s: float = 0.0,
    timeout_s: float | None = None,
) -> Present:
    """`Store.get_into_steps` on the calling thread, which waits. -> which blocks arrived."""
    return drive(store.get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s, alone=True))
