"""`Store`, the interface through which all modules of `kvstore_client.engine` use a store.

Three classes implement it. `ClientStore` is a client of one store. `LocalFirstStore` puts a server on the engine's host
in front of another store. `SlicedStore` keeps each block in slices that can be read separately. They can be nested: a
`SlicedStore` may contain a `LocalFirstStore` of two `ClientStore` objects. An engine's adapter does not choose the
classes itself. It calls a `StoreGuard`, whose options select the classes. The guard also counts every failure as a
miss.

**What the caller guarantees**

1. All keys of one call have the same length, 8 to 64 bytes, and no key occurs twice. A key identifies the content of a
   block and of all blocks before it. The same key is never used for other bytes later.
2. Memory that is passed to a call stays valid until the call has returned or raised. For a call in steps, it stays
   valid until the steps have ended or were closed. Until then, nothing else writes to rows that receive blocks, or to
   blocks that are being set.
3. Only one thread at a time runs the steps of a call. It need not always be the same thread.
4. No method is called after `close`.

**What an implementation must do**

1. *Return the right bytes or a miss.* If a block is reported as received, its row has the bytes that were set under its
   key in the present generation. A block that cannot be verified is a miss. The rows of misses may have any content.
2. *End by the deadline.* Each call ends within `timeout_s` (by default, the store's own timeout), plus `wait_s` if the
   call has one. If a shard does not answer, its blocks are misses. They are counted in `stats.unanswered`, and
   `why_unanswered` gives the reason. A shard that does not answer delays no calls to other shards.
3. *Raise only these errors:* `KVStoreError` for a failure of the store, and `ValueError`, `TypeError` or `IndexError`
   for a wrong argument. After an error, nothing writes to the caller's memory any more.
4. *Never go back to an older generation.* `generation` never falls. A set with an older generation is refused and
   counts as an error in the `SetResult`. A block that was stored in an older generation is a miss.
5. *Accept calls from any thread.* All methods may be called by several threads at once, and in a child process after a
    fork.
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

# An array of shape (n,), with one bool for each of n keys.
Present: TypeAlias = "npt.NDArray[np.bool_]"


class StorePromise(Protocol):
    """A promise and its state. `Promise` implements it. The methods wait for the store. Thread-safe."""

    @property
    def present(self) -> Present:
        """For each key, whether the block is in the store."""

    @property
    def others(self) -> Present:
        """For each key, whether another client has promised the block. `get_into_steps(…, wait_s=…)` waits for these
        blocks."""

    def renew(self) -> None:
        """Renew the promise of the blocks that are not set yet. Its time starts again from now. Raises
        `KVStoreError`."""

    def withdraw(self) -> None:
        """Withdraw the promise of the blocks that are not set. For a client that waits for them, they are misses at
        once. Never raises."""


class Store(Protocol):
    """The calls of a store. The module's docstring has the rules for callers and implementations. The *remote store* is
    the one that all engines share. A server on the engine's host in front of it, if there is one, is the local store.

    Keys are bytes. `timeout_s` is the time limit of one call in seconds; by default, it is the store's own. Results
    with one entry for each key are in the order of the keys.
    """

    @property
    def generation(self) -> int:
        """The generation of the namespace. It rises when the namespace is purged. Do not use blocks that were read or
        computed under a lower one."""

    @property
    def reached(self) -> bool:
        """Whether the store has ever answered, so that `generation` is known."""

    @property
    def stats(self) -> ClientStats:
        """The counters since the store was opened."""

    # ---- what is there -------------------------------------------------------------------------------------------

    def match_prefix(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        """Return how many keys of a chain are stored, from its first key to the first gap.

        * `keys`: The chain, head first.
        * `refresh`: Count this call as a use of the blocks.
        * `pin_s`: Protect the blocks that are found from eviction for this many seconds, 0 to 60, as far as the store's
          limits allow.
        """

    def contains(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Present:
        """Return which keys are stored. The options are the same as those of `match_prefix`."""

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        """Return which keys the remote store has, so that they need not be set."""

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Lookup:
        """Return how many leading keys of a chain are in the remote store, and how many are either there or
        promised."""

    def promise(self, keys: Sequence[bytes], *, ttl_s: float = 30.0, timeout_s: float | None = None) -> StorePromise:
        """Announce to the remote store that these blocks will be set.

        Blocks that are stored already, or that other clients have promised, are not promised again. The promise ends
        when all blocks are set.

        * `ttl_s`: The time in seconds after which the promise ends unless it is renewed; above 0 and at most 600.
        """

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
        """Receive block i into `out[slots[i]]`, and return which blocks arrived.

        The call runs in steps, so that one thread can have many calls in progress (`engine.multiplexer`). An
        implementation that needs no steps blocks in the first step and yields nothing. Closing the steps abandons the
        request.

        * `out`: A C-contiguous uint8 array whose rows have `block_bytes` bytes each.
        * `slots`: The row for each key; no row may occur twice.
        * `wait_s`: How long to wait for promised blocks, in seconds; 0 to 600.
        * `alone`: Whether no other call runs on this thread, so that the call may block instead of yielding.
        """

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        """Return the shards to which a read of these keys sends its first requests, as opaque values. A caller uses
        them to limit how many reads wait for one slow shard. The set is empty if the shards are not known. Never
        blocks."""

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
        """Store `blocks[i]` under `keys[i]`. A block that is stored already is not replaced.

        * `blocks`: Bytes-like objects of `block_bytes` bytes each.
        * `deferred`: Return as soon as the store owns the bytes. Every later lookup finds the blocks.
        * `parent`: For each block, the key of the block before it in its chain; None for the first block of a chain.
        * `priority`: The priority of the blocks in eviction, 0 to 3. Blocks of the same namespace with a lower priority
          are evicted first.
        * `ttl_s`: The time in seconds after which the blocks expire; above 0 and at most ten years. By default, the
          store's rule for the namespace applies.
        * `generation`: The generation in which the blocks were computed; by default, the present generation.
        """

    def expire(self, keys: Sequence[bytes], *, ttl_s: float | None = None) -> Present:
        """Replace the time to live of blocks, and return which of them are stored.

        * `ttl_s`: The time to live from now on, in seconds; above 0 and at most ten years. By default, the store's rule
          for the namespace applies.
        """

    # ---- the store -----------------------------------------------------------------------------------------------

    def info(self, *, timeout_s: float | None = None) -> Any:
        """Return the state of the remote store, as a `StoreInfo`."""

    def why_unanswered(self) -> KVStoreError:
        """Return the error of the last shard that did not answer."""

    def close(self) -> None:
        """Disconnect. Calls in progress fail."""


def get_into(
    store: Store,
    keys: Sequence[bytes],
    out: npt.NDArray[np.uint8],
    slots: Sequence[int],
    *,
    wait_s: float = 0.0,
    timeout_s: float | None = None,
) -> Present:
    """Run `Store.get_into_steps` on the calling thread, which waits. Return which blocks arrived."""
    return drive(store.get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s, alone=True))
