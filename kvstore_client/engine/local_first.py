"""Two stores as one: a server on the engine's host in front of the store that the fleet shares.

The engines of one host share the local server's memory at the speed of memory, and it outlives them. What it lacks
is asked of the fleet's store; what is found there is also set in the local one. Blocks are set in both. The fleet's
store decides whether a block is stored; the local one is only a copy that is near, and its failures are misses.

Each of the two has a generation of the namespace. A purge of the fleet's store is told to the local one before anything
else is asked of it, so it makes both empty. One of the local server alone leaves the fleet's store as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.link import Link
from kvstore_client.engine.client_store import ClientStore
from kvstore_client.engine.store import Present
from kvstore_client.errors import KVStoreError
from kvstore_client.promises import Promise
from kvstore_client.results import ClientStats, Lookup, SetResult

LOCAL_SHARE: Final = 0.5  # of a call's time that the local server may take; after that the fleet's store is asked
PROMOTED_BYTES: Final = 64 << 20  # blocks that wait to be set in the local store, at most; others are dropped
_SUMMED: Final = [field.name for field in dataclasses.fields(ClientStats) if field.type == "int"]

log = logging.getLogger("kvstore_client")


class _Call:
    """The time of one call over both stores, in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self.local_s = timeout_s * LOCAL_SHARE

    @property
    def left_s(self) -> float:
        """What is left for the fleet's store, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())


_LOCAL_BITS: Final = 64  # of the number that stands for both generations


class LocalFirstStore:
    """A `Store` of two clients. Both are `fail_open`. Its `generation` rises when either is purged; what it says of the
    store's state is the fleet's store's. Thread-safe; usable in a child after a fork."""

    def __init__(self, local: ClientStore, remote: ClientStore) -> None:
        self.local = local
        self.remote = remote
        self._block_bytes = remote.namespace.block_bytes
        self._timeout_s = remote.timeout_s
        self._new_process()

    def _new_process(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[list[bytes], list[bytes | None], npt.NDArray[np.uint8], int]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0  # blocks that were not promoted, because too many waited

    # ---- the calls ---------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Of both stores, in one number."""
        self._tell_local()
        return self.remote.generation << _LOCAL_BITS | self.local.generation

    def _tell_local(self) -> None:
        """Have the local server learn of a purge of the fleet's store, before anything else that it is asked."""
        self.local.learn_generation(self.remote.generation)

    @property
    def reached(self) -> bool:
        return self.remote.reached

    def match_prefix(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        gaps = np.flatnonzero(~self.contains(keys, refresh=refresh, pin_s=pin_s, timeout_s=timeout_s))
        return int(gaps[0]) if len(gaps) else len(keys)

    def contains(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Present:
        self._tell_local()
        call = _Call(self._timeout_s if timeout_s is None else timeout_s)
        present = self.local.contains(keys, refresh=refresh, pin_s=pin_s, timeout_s=call.local_s)
        lacking = np.flatnonzero(~present)
        if len(lacking):
            some = [keys[at] for at in lacking.tolist()]
            present[lacking] = self.remote.contains(some, refresh=refresh, pin_s=pin_s, timeout_s=call.left_s)
        return present

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        return self.remote.contains(keys)

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Lookup:
        return self.remote.lookup(keys, timeout_s=timeout_s)

    def promise(self, keys: Sequence[bytes], *, ttl_s: float = 30.0, timeout_s: float | None = None) -> Promise:
        return self.remote.promise(keys, ttl_s=ttl_s, timeout_s=timeout_s)

    def get_into_steps(
        self,
        keys: Sequence[bytes],
        out: Any,
        slots: Sequence[int],
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[Present]:
        """Blocks come from the local store if it has them. What the other one had is set in the local store soon."""
        generation = self.generation
        call = _Call(self._timeout_s if timeout_s is None else timeout_s)
        present = yield from self.local.get_into_steps(keys, out, slots, timeout_s=call.local_s, alone=alone)
        lacking = np.flatnonzero(~present)
        if len(lacking):
            places = lacking.tolist()
            some, rows = [keys[at] for at in places], [slots[at] for at in places]
            found = yield from self.remote.get_into_steps(
                some, out, rows, wait_s=wait_s, timeout_s=call.left_s, alone=alone
            )
            present[lacking] = found
            self._promote(keys, lacking[found].tolist(), out, slots, generation)
        return present

    def first_shards(self, keys: Sequence[bytes]) -> frozenset[Link]:
        return self.local.first_shards(keys) | self.remote.first_shards(keys)

    def set(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        deferred: bool = True,
        parent: Sequence[bytes | None] | None = None,
        priority: int = 0,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> SetResult:
        """In both stores. -> what the fleet's store says."""
        how: dict[str, Any] = {"deferred": deferred, "parent": parent, "priority": priority, "ttl_s": ttl_s}
        fleet, here = divmod(self.generation if generation is None else generation, 1 << _LOCAL_BITS)
        call = _Call(self._timeout_s)
        try:
            self.local.set(keys, blocks, timeout_s=call.local_s, generation=here, **how)
        except KVStoreError as error:  # a refusal: the local store is of no use for these
            log.debug("kvstore: the local store refused %d blocks: %s", len(keys), error)
        return self.remote.set(keys, blocks, timeout_s=call.left_s, generation=fleet, **how)

    def expire(self, keys: Sequence[bytes], *, ttl_s: float | None = None) -> Present:
        """In both stores. -> which ones the fleet's store has."""
        call = _Call(self._timeout_s)
        try:
            self.local.expire(keys, ttl_s=ttl_s, timeout_s=call.local_s)
        except KVStoreError as error:
            log.debug("kvstore: the local store gives %d blocks no other time: %s", len(keys), error)
        return self.remote.expire(keys, ttl_s=ttl_s, timeout_s=call.left_s)

    def info(self, *, timeout_s: float | None = None) -> Any:
        return self.remote.info(timeout_s=timeout_s)

    @property
    def stats(self) -> ClientStats:
        """The sum of both clients' counters; `path` is the local one's. `unanswered` is the fleet's store's alone: what
        the local one did not answer was asked there."""
        local, remote = self.local.stats, self.remote.stats
        summed = {name: getattr(local, name) + getattr(remote, name) for name in _SUMMED}
        return ClientStats(**{**summed, "unanswered": remote.unanswered}, path=local.path)

    def why_unanswered(self) -> KVStoreError:
        return self.remote.why_unanswered()

    def close(self) -> None:
        """Disconnect from both. Blocks that wait to be promoted are dropped."""
        if self._pid != os.getpid():
            self._new_process()
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        self.local.close()
        self.remote.close()
        if thread is not None and self._pid == os.getpid():
            thread.join(self._timeout_s)

    # ---- promotion ---------------------------------------------------------------------------------------------

    def _promote(
        self, keys: Sequence[bytes], found: list[int], out: Any, slots: Sequence[int], generation: int
    ) -> None:
        """Have blocks that were found remotely set in the local store: their rows are copied, because the caller may
        use them for something else at once. generation: before they were read."""
        if self._pid != os.getpid():
            self._new_process()
        size = len(found) * self._block_bytes
        if not found:
            return
        if self._waiting_bytes + size > PROMOTED_BYTES:
            self.dropped += len(found)
            return
        rows = np.stack([np.asarray(out[slots[at]]).reshape(-1).view(np.uint8) for at in found])
        with self._changed:
            if self._closed:
                return
            self._waiting_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-promote", daemon=True)
                self._thread.start()
        parents = [keys[at - 1] if at else None for at in found]
        with self._changed:
            self._waiting.append(([keys[at] for at in found], parents, rows, generation % (1 << _LOCAL_BITS)))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                keys, parents, rows, generation = self._waiting.popleft()
            try:
                self.local.set(keys, rows, parent=parents, generation=generation)
            except KVStoreError as error:
                log.debug("kvstore: the local store refused %d blocks: %s", len(keys), error)
            except Exception:  # a bug must not end the thread: nothing would be promoted any more
                log.exception("kvstore: %d blocks were not set in the local store", len(keys))
            finally:
                with self._changed:
                    self._waiting_bytes -= rows.nbytes
