"""`KVStoreClient`: blocks by key, from and to the caller's memory.

A call splits its batch over the shards, sends everything, waits once, and puts the answers in the caller's order.
Copies of the data path: set = source -> kernel -> slot; get_into = slot -> kernel -> destination. `get` and
`stream_get` receive into memory of the client's instead, which the caller reads in place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.reading import Reader
from kvstore_client._calls.repairs import Repairs
from kvstore_client._calls.requests import first_occurrences
from kvstore_client._calls.writing import Writer
from kvstore_client._links.buffers import BlockSource, writable_rows
from kvstore_client._links.core import Core
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError, Timeout
from kvstore_client.keys import Keys, Namespace, pack_keys
from kvstore_client.results import ClientStats, GetResult, SetResult, StoreInfo

DEFAULT_TIMEOUT_S: Final = 10.0

log = logging.getLogger("kvstore_client")

_clients: weakref.WeakSet[KVStoreClient] = weakref.WeakSet()


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= wire.MAX_DEADLINE_MS / 1000:
        raise ValueError(f"timeout_s={timeout_s}: expected more than 0, at most {wire.MAX_DEADLINE_MS // 1000}")


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._core.after_fork()
        client._repairs.reset()


os.register_at_fork(after_in_child=_after_fork_in_child)


class KVStoreClient:
    """A connection to a store, for one namespace. Thread-safe; usable in a child after a fork.

    `endpoint`: ``tcp://HOST:PORT``, a list of nodes, or a cluster, ``etcd://HOST:PORT[,HOST:PORT]/NAME`` or
    ``dns://SERVICE:PORT``, whose nodes may come and go while it is in use. `timeout_s`: no call takes longer; the
    calls that move or look for many blocks can be given one of their own. `fail_open`: transport failures are misses
    (and `SetResult.error`) instead of `ConnectionLost` and `Timeout`; mistakes in arguments and refusals are raised in
    any case. `checksum`: verify what is read; a block that does not match is a miss and is deleted. `replicas`: nodes
    that hold a copy of each block, 1 to 3, or as many as there are; the same for all clients of a namespace.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        namespace: Namespace,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        fail_open: bool = False,
        checksum: bool = True,
        replicas: int = 1,
    ) -> None:
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace: {type(namespace).__name__}: expected a Namespace")
        _check_timeout(timeout_s)
        if replicas not in range(1, wire.MAX_REPLICAS + 1):
            raise ValueError(f"replicas={replicas!r}: expected 1 to {wire.MAX_REPLICAS}")
        self.namespace = namespace
        self.fail_open = fail_open
        self.replicas = replicas
        self._core = Core(endpoint, namespace.canonical(), timeout_s, replicas)
        self._exchange = Exchange(self._core)
        self._repairs = Repairs(self._exchange, namespace.block_bytes, enabled=checksum)
        self._reader = Reader(self._exchange, namespace.block_bytes, replicas, checksum, self._repairs)
        self._writer = Writer(self._exchange, namespace.block_bytes, replicas, self._repairs, self._reader)
        self._core.connect(fail_open)
        _clients.add(self)

    def __enter__(self) -> KVStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> ClientStats:
        """Counters since this client was made."""
        return self._core.stats

    def why_unanswered(self) -> KVStoreError:
        """What went wrong with a shard last: for a log, when `stats.unanswered` has risen."""
        broken = [link.broken for link in self._core.links if link.broken is not None]
        return broken[-1] if broken else Timeout("not all shards answered in time")

    @property
    def epoch(self) -> int:
        """Which view of a cluster this client has: higher is later. 0 without a cluster."""
        return self._core.view.epoch

    def close(self) -> None:
        """Disconnect. Further calls raise `ConnectionLost` (or miss)."""
        self._core.close()

    # ---- the calls -------------------------------------------------------------------------------------------

    def set(
        self,
        keys: Keys,
        blocks: Any,
        force: bool = False,
        deferred: bool = True,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> SetResult:
        """Store `blocks[i]` under `keys[i]`; what is there already is left alone unless `force`.

        `blocks`: a sequence of buffers, or an `(n, block_bytes)` array or CPU tensor; sent without a copy. Keys of
        one prefix chain go head first: the tail is evicted first. `deferred`:
        returns when one copy of each block is stored; False: when all copies are, which is the same with `replicas=1`.
        `priority`, 0 to 3: a block is evicted only when nothing of a lower priority can be. Raises `BlockSizeMismatch`,
        `ValueError`, and as the class says.
        """
        if priority not in range(wire.MAX_PRIORITY + 1):
            raise ValueError(f"priority={priority!r}: expected 0 to {wire.MAX_PRIORITY}")
        options = self._options(timeout_s, force=force, deferred=deferred, priority=int(priority))
        packed = pack_keys(keys)
        source = BlockSource(blocks, self.namespace.block_bytes)
        if source.count != len(packed):
            raise ValueError(f"{len(packed)} keys and {source.count} blocks: expected as many blocks as keys")
        _, unique = first_occurrences(packed)
        if not len(packed):
            return SetResult(0, 0, 0, 0, 0, 0)
        result = self._writer.set(packed, unique, source, options)
        self.stats.blocks_set += result.created + result.forced
        self.stats.bytes_out += len(packed) * self.namespace.block_bytes
        return result

    def contains(
        self, keys: Keys, refresh: bool = False, pin_s: float = 0.0, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which keys are present, one bool a key. `refresh` counts as a use; `pin_s` > 0 keeps the blocks found from
        eviction for that long (as far as the server allows), so that a `get` that follows finds them."""
        return self._reader.contains(pack_keys(keys), self._options(timeout_s, refresh=refresh, pin_s=pin_s))

    def match_prefix(
        self, keys: Keys, refresh: bool = False, pin_s: float = 0.0, *, timeout_s: float | None = None
    ) -> int:
        """How many keys of the chain, from its head, are present without a gap."""
        return self._reader.match_prefix(pack_keys(keys), self._options(timeout_s, refresh=refresh, pin_s=pin_s))

    def get(self, keys: Keys) -> GetResult:
        """All blocks at once, in memory of the client's: `blocks[i]` is read-only, None on a miss."""
        packed = pack_keys(keys)
        block_bytes = self.namespace.block_bytes
        rows = np.empty((len(packed), block_bytes), dtype=np.uint8)
        first, unique = first_occurrences(packed)
        present = self._get_into(packed, rows, None, first, unique, self._options(None))
        flat = memoryview(rows.reshape(-1)).toreadonly()
        blocks = [
            flat[row * block_bytes : (row + 1) * block_bytes] if hit else None
            for row, hit in zip(first.tolist(), present.tolist(), strict=True)
        ]
        hit = int(present.sum())
        return GetResult(len(packed), hit, len(packed) - hit, len(packed) - len(unique), blocks)

    def get_into(
        self, keys: Keys, out: Any, slots: Sequence[int] | None = None, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Receive block i straight into `out[slots[i]]` (`out[i]` without slots). -> which blocks are there.

        `out`: writable `(n, block_bytes)` memory, uint8-viewable: array, CPU tensor, buffer. A row whose block is
        missing may have been written to. Raises `IndexError` for a slot outside `out`, `ValueError` for two equal
        slots.
        """
        options = self._options(timeout_s)
        packed = pack_keys(keys)
        rows = writable_rows(out, self.namespace.block_bytes)
        places = list(range(len(packed))) if slots is None else [int(slot) for slot in slots]
        if len(places) != len(packed):
            raise ValueError(f"{len(packed)} keys and {len(places)} slots: expected as many slots as keys")
        if places and not 0 <= min(places) <= max(places) < len(rows):
            wrong = next(place for place in places if not 0 <= place < len(rows))
            raise IndexError(f"slot {wrong}: out has {len(rows)} rows")
        if slots is not None and len(set(places)) != len(places):
            raise ValueError("slots: one is named twice: expected a row of its own for each block")
        first, unique = first_occurrences(packed)
        present = self._get_into(packed, rows, None if slots is None else places, first, unique, options)
        if len(unique) < len(packed):
            for position, origin in enumerate(first.tolist()):
                if origin != position and present[position]:
                    rows[places[position]] = rows[places[origin]]
        return present

    def stream_get(self, keys: Keys) -> Generator[tuple[int, memoryview], None, None]:
        """Blocks as they arrive: `(index into keys, read-only buffer)`, hits only, in any order.

        A buffer stays valid as long as it is referenced. Each block may take `timeout_s`. Breaking off is fine.
        """
        packed = pack_keys(keys)
        first, unique = first_occurrences(packed)
        repeats: dict[int, list[int]] = {}
        if len(unique) < len(packed):
            for position, origin in enumerate(first.tolist()):
                repeats.setdefault(origin, []).append(position)
        return self._stream(packed, unique, repeats, self._options(None))

    def delete(self, keys: Keys) -> int:
        """Remove blocks. -> how many were there."""
        packed = pack_keys(keys)
        if not len(packed):
            return 0
        _, unique = first_occurrences(packed)
        return self._writer.delete(packed[unique], self._options(None))

    def flush(self) -> None:
        """Return when every deferred set of this client can be read."""
        places = {place.link: place.node for place in self._core.view.places}
        calls = self._exchange.ask_all(wire.Sync, self._options(None))
        failed = {places.get(call.link, "") for call in calls if isinstance(call.error, TRANSPORT_ERRORS)}
        for call in calls:  # fewer nodes than there are copies: the others have the blocks
            outcome(call, wire.SyncReply, self.fail_open or len(failed) < self.replicas)

    def ping(self) -> float:
        """Seconds until all shards had answered. Raises `ConnectionLost` or `Timeout`, also with `fail_open`."""
        start = time.perf_counter()
        for call in self._exchange.ask_all(wire.Ping, self._options(None)):
            if call.error is not None:
                raise call.error
        return time.perf_counter() - start

    def info(self) -> StoreInfo:
        """The state of all shards that answer."""
        shards = []
        for call in self._exchange.ask_all(wire.Info, self._options(None)):
            reply = outcome(call, wire.InfoReply, self.fail_open)
            if reply is not None:
                shards.append(msgspec.msgpack.decode(reply.info, type=wire.ShardInfo))
        block_bytes = self.namespace.block_bytes
        mine = [ns for shard in shards for ns in shard.namespaces if ns.id == self.namespace.id]
        full = sum(ns.blocks for ns in mine)
        total = sum(
            shard.memory_limit_bytes // shard.segment_bytes * (shard.segment_bytes // block_bytes) for shard in shards
        )
        return StoreInfo(block_bytes, total, full, total - full, shards)

    def scrub(self) -> dict[str, int]:
        """Have every shard check its blocks on disk now; returns at once.

        -> by shard (its `name` in `info`), the `disk.scrub_passes` with which the check is complete; 0: the
        shard has no disk tier that is on. Shards that do not answer are left out with `fail_open`.
        """
        calls = self._exchange.ask_all(wire.Scrub, self._options(None))
        replies = [(call.link.name, outcome(call, wire.ScrubReply, self.fail_open)) for call in calls]
        return {name: reply.passes for name, reply in replies if reply is not None}

    # ---- how they work ---------------------------------------------------------------------------------------

    def _options(self, timeout_s: float | None, **chosen: Any) -> Options:
        """What one call was given, completed by what the client was given."""
        if timeout_s is None:
            timeout_s = self._core.timeout_s
        else:
            _check_timeout(timeout_s)
        return Options(timeout_s=timeout_s, fail_open=self.fail_open, **chosen)

    def _get_into(
        self,
        packed: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        first: npt.NDArray[np.intp],
        unique: npt.NDArray[np.intp],
        options: Options,
    ) -> npt.NDArray[np.bool_]:
        if not len(packed):
            return np.zeros(0, dtype=np.bool_)
        found = self._reader.get_into(packed, unique, rows, slots, options)
        present: npt.NDArray[np.bool_] = found[first]
        self.stats.hits += int(present.sum())
        self.stats.misses += int((~present).sum())
        return present

    def _stream(
        self,
        packed: npt.NDArray[np.uint8],
        unique: npt.NDArray[np.intp],
        repeats: dict[int, list[int]],
        options: Options,
    ) -> Generator[tuple[int, memoryview], None, None]:
        hits = 0
        try:
            if len(packed):
                with contextlib.closing(self._reader.stream(packed, unique, options)) as arriving:
                    for position, block in arriving:
                        for repeat in repeats.get(position, (position,)):
                            hits += 1
                            yield repeat, block
                        del block
        finally:
            self.stats.hits += hits
            self.stats.misses += len(packed) - hits
