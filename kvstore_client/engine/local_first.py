"""Combines two stores into one: a server on the engine's host, and behind it the remote store that all engines share.

The engines of one host share the local server's memory at memory speed, and the server outlives them. Blocks that the
local server lacks are requested from the remote store; blocks that are found there are then set in the local server as
well. A set goes to both. A block counts as stored only if the remote store has it. The local server only has copies,
and its failures are misses.

Each of the two stores has its own generation of the namespace. The local server learns of a purge of the remote store
before its next request, so a purge of the remote store empties both. A purge of the local server does not affect the
remote store.
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

LOCAL_SHARE: Final = 0.5  # the local server's share of a call's time; the rest is for the remote store
PROMOTED_BYTES: Final = 64 << 20  # limit of the blocks that wait to be set in the local store
_SUMMED: Final = [field.name for field in dataclasses.fields(ClientStats) if field.type == "int"]

log = logging.getLogger("kvstore_client")


class _Call:
    """Divides the time of one call between the two stores. All times are in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self.local_s = timeout_s * LOCAL_SHARE

    @property
    def left_s(self) -> float:
        """The time that is left for the remote store; at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())


_LOCAL_BITS: Final = 64  # the width of the local part in the number that combines both generations


class LocalFirstStore:
    """A `Store` that uses two clients, both with `fail_open`. Its `generation` rises when either store is purged.
    `info` reports the state of the remote store. Thread-safe, and usable in a child process after a fork."""

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
        """Both stores' generations, combined in one number."""
        self._tell_local()
        return self.remote.generation << _LOCAL_BITS | self.local.generation

    def _tell_local(self) -> None:
        """Have the local server informed of a purge of the remote store, before it gets its next request."""
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
        """Receive blocks from the local store if it has them, and the others from the remote store. Those from the
        remote store are set in the local one soon after."""
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
        """Set blocks in both stores. Return the remote store's result."""
        how: dict[str, Any] = {"deferred": deferred, "parent": parent, "priority": priority, "ttl_s": ttl_s}
        fleet, here = divmod(self.generation if generation is None else generation, 1 << _LOCAL_BITS)
        call = _Call(self._timeout_s)
        try:
            self.local.set(keys, blocks, timeout_s=call.local_s, generation=here, **how)
        except KVStoreError as error:  # the local store refused these blocks
            log.debug("kvstore: the local store refused %d blocks: %s", len(keys), error)
        return self.remote.set(keys, blocks, timeout_s=call.left_s, generation=fleet, **how)

    def expire(self, keys: Sequence[bytes], *, ttl_s: float | None = None) -> Present:
        """Replace the time to live in both stores. Return which blocks the remote store has."""
        call = _Call(self._timeout_s)
        try:
            self.local.expire(keys, ttl_s=ttl_s, timeout_s=call.local_s)
        except KVStoreError as error:
            log.debug("kvstore: the local store did not change the time to live of %d blocks: %s", len(keys), error)
        return self.remote.expire(keys, ttl_s=ttl_s, timeout_s=call.left_s)

    def info(self, *, timeout_s: float | None = None) -> Any:
        return self.remote.info(timeout_s=timeout_s)

    @property
    def stats(self) -> ClientStats:
        """The sum of both clients' counters, except two: `path` is the local client's, and `unanswered` is the remote
        client's. If the local server does not answer for a block, the block is requested from the remote store, so only
        the remote store's answer matters."""
        local, remote = self.local.stats, self.remote.stats
        summed = {name: getattr(local, name) + getattr(remote, name) for name in _SUMMED}
        return ClientStats(**{**summed, "unanswered": remote.unanswered}, path=local.path)

    def why_unanswered(self) -> KVStoreError:
        return self.remote.why_unanswered()

    def close(self) -> None:
        """Disconnect from both stores. Blocks that wait to be promoted are dropped."""
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
        """Queue blocks from the remote store to be set in the local one. Their rows are copied, because the caller may
        reuse them at once. `generation`: the generation before the blocks were read."""
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
            except Exception:  # a bug must not end the thread, because then nothing more would be promoted
                log.exception("kvstore: %d blocks were not set in the local store", len(keys))
            finally:
                with self._changed:
                    self._waiting_bytes -= rows.nbytes
