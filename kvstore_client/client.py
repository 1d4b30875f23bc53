"""`KVStoreClient`: blocks by key, from and to the caller's memory.

A call splits its batch over the shards, sends everything, waits once, and puts the answers in the caller's order.
Copies of the data path: set = source -> kernel -> slot; get_into = slot -> kernel -> destination. `get` and
`stream_get` receive into memory of the client's instead, which the caller reads in place.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.zmtp import frame
from kvstore_client.buffers import BlockSource, writable_rows
from kvstore_client.core import Core, protocol_error
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError, Timeout
from kvstore_client.keys import KeyArray, Keys, Namespace, pack_keys
from kvstore_client.link import Link
from kvstore_client.operations import GetOperation, IntoTarget, Operation, QueueTarget
from kvstore_client.requests import Call, chunks, first_occurrences, keyed_message, set_message, take
from kvstore_client.results import ClientStats, GetResult, SetResult, StoreInfo
from kvstore_client.sending import Message, Sending, send_all

_T = TypeVar("_T", bound=wire.Reply)
_MakeMessage = Callable[[Operation, KeyArray, "npt.NDArray[np.intp]"], Message]

DEFAULT_TIMEOUT_S: Final = 10.0
SET_BYTES: Final = 16 << 20  # payload of one SET: longer batches are several
STREAM_CREDIT_BYTES: Final = 8 << 20
DISCARD_TIMEOUT_S: Final = 0.2  # for having a damaged block removed: the reader does not wait longer for that

log = logging.getLogger("kvstore_client")

_clients: weakref.WeakSet[KVStoreClient] = weakref.WeakSet()


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= wire.MAX_DEADLINE_MS / 1000:
        raise ValueError(f"timeout_s={timeout_s}: expected more than 0, at most {wire.MAX_DEADLINE_MS // 1000}")


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._core.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


class KVStoreClient:
    """A connection to a store, for one namespace. Thread-safe; usable in a child after a fork.

    `endpoint`: ``tcp://HOST:PORT``, or a list of nodes. `timeout_s`: no call takes longer; the calls that move or look
    for many blocks can be given one of their own. `fail_open`: transport
    failures are misses (and `SetResult.error`) instead of `ConnectionLost` and `Timeout`; mistakes in arguments and
    refusals are raised in any case. `checksum`: verify what is read; a block that does not match is a miss and is
    deleted. `replicas`: copies in a cluster; 1 is supported.
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
        if replicas != 1:
            raise ValueError(f"replicas={replicas}: expected 1; replication needs a cluster")
        self.namespace = namespace
        self.fail_open = fail_open
        self._checksum = checksum
        self._core = Core([endpoint] if isinstance(endpoint, str) else endpoint, namespace.canonical(), timeout_s)
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
        one prefix chain go head first: the tail is evicted first. `deferred`: acknowledged when the server owns the
        bytes; False: when they can be read, too. `priority`, 0 to 3: a block is evicted only when nothing of a lower
        priority can be. Raises `BlockSizeMismatch`, `ValueError`, and as the class says.
        """
        if priority not in range(wire.MAX_PRIORITY + 1):
            raise ValueError(f"priority={priority!r}: expected 0 to {wire.MAX_PRIORITY}")
        timeout_s = self._timeout_s(timeout_s)
        packed = pack_keys(keys)
        source = BlockSource(blocks, self.namespace.block_bytes)
        if source.count != len(packed):
            raise ValueError(f"{len(packed)} keys and {source.count} blocks: expected as many blocks as keys")
        per_request = max(1, min(wire.MAX_KEYS, SET_BYTES // self.namespace.block_bytes))

        def message(operation: Operation, part: KeyArray, positions: npt.NDArray[np.intp]) -> Message:
            return set_message(
                operation.id, part, positions, source, _milliseconds(timeout_s), force, deferred, int(priority)
            )

        _, unique = first_occurrences(packed)
        done = self._exchange(packed, per_request, message, timeout_s, unique)
        results = [self._outcome(call, wire.SetReply) for call in done]
        ok = [reply for reply in results if reply is not None]
        stored = sum(reply.created + reply.forced for reply in ok)
        self.stats.blocks_set += stored
        self.stats.bytes_out += len(packed) * self.namespace.block_bytes
        return SetResult(
            total=len(packed),
            created=sum(reply.created for reply in ok),
            existed=sum(reply.existed for reply in ok),
            forced=sum(reply.forced for reply in ok),
            duplicated=len(packed) - len(unique),
            error=sum(reply.error for reply in ok)
            + sum(call.count for call, reply in zip(done, results, strict=True) if reply is None),
        )

    def contains(
        self, keys: Keys, refresh: bool = False, pin_s: float = 0.0, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which keys are present, one bool a key. `refresh` counts as a use; `pin_s` > 0 keeps the blocks found from
        eviction for that long (as far as the server allows), so that a `get` that follows finds them."""
        timeout_s = self._timeout_s(timeout_s)
        packed = pack_keys(keys)
        present = np.zeros(len(packed), dtype=np.bool_)

        def message(operation: Operation, part: KeyArray, _: npt.NDArray[np.intp]) -> Message:
            request = wire.Contains(operation.id, _milliseconds(timeout_s), len(part), part.shape[1], refresh, pin_s)
            return keyed_message(request, part)

        for call in self._exchange(packed, wire.MAX_KEYS, message, timeout_s):
            reply = self._outcome(call, wire.ContainsReply)
            if reply is not None:
                present[call.positions] = np.frombuffer(reply.present, dtype=np.bool_)
        return present

    def match_prefix(
        self, keys: Keys, refresh: bool = False, pin_s: float = 0.0, *, timeout_s: float | None = None
    ) -> int:
        """How many keys of the chain, from its head, are present without a gap."""
        timeout_s = self._timeout_s(timeout_s)
        packed = pack_keys(keys)
        if len(self._core.links) > 1:
            absent = np.flatnonzero(~self.contains(packed, refresh, pin_s, timeout_s=timeout_s))
            return int(absent[0]) if len(absent) else len(packed)

        def message(operation: Operation, part: KeyArray, _: npt.NDArray[np.intp]) -> Message:
            request = wire.MatchPrefix(operation.id, _milliseconds(timeout_s), len(part), part.shape[1], refresh, pin_s)
            return keyed_message(request, part)

        length = 0
        for call in self._exchange(packed, wire.MAX_KEYS, message, timeout_s):
            reply = self._outcome(call, wire.MatchReply)
            length += reply.length if reply is not None else 0
            if reply is None or reply.length < call.count:
                break
        return length

    def get(self, keys: Keys) -> GetResult:
        """All blocks at once, in memory of the client's: `blocks[i]` is read-only, None on a miss."""
        packed = pack_keys(keys)
        block_bytes = self.namespace.block_bytes
        rows = np.empty((len(packed), block_bytes), dtype=np.uint8)
        first, unique = first_occurrences(packed)
        present = self._get_into(packed, rows, None, first, unique, self._core.timeout_s)
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
        timeout_s = self._timeout_s(timeout_s)
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
        present = self._get_into(packed, rows, None if slots is None else places, first, unique, timeout_s)
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
        return self._stream(packed, unique, repeats)

    def delete(self, keys: Keys) -> int:
        """Remove blocks. -> how many were there."""
        return self._delete(pack_keys(keys), self._core.timeout_s)

    def _delete(self, packed: KeyArray, timeout_s: float) -> int:
        def message(operation: Operation, part: KeyArray, _: npt.NDArray[np.intp]) -> Message:
            return keyed_message(wire.Delete(operation.id, _milliseconds(timeout_s), len(part), part.shape[1]), part)

        calls = self._exchange(packed, wire.MAX_KEYS, message, timeout_s)
        replies = [self._outcome(call, wire.DeleteReply) for call in calls]
        return sum(reply.deleted for reply in replies if reply is not None)

    def flush(self) -> None:
        """Return when every deferred set of this client can be read."""
        for call in self._ask_all(wire.Flush):
            self._outcome(call, wire.FlushReply)

    def ping(self) -> float:
        """Seconds until all shards had answered. Raises `ConnectionLost` or `Timeout`, also with `fail_open`."""
        start = time.perf_counter()
        for call in self._ask_all(wire.Ping):
            if call.operation.error is not None:
                raise call.operation.error
        return time.perf_counter() - start

    def info(self) -> StoreInfo:
        """The state of all shards that answer."""
        shards = []
        for call in self._ask_all(wire.Info):
            reply = self._outcome(call, wire.InfoReply)
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
        replies = [(call.link.name, self._outcome(call, wire.ScrubReply)) for call in self._ask_all(wire.Scrub)]
        return {name: reply.passes for name, reply in replies if reply is not None}

    # ---- how they work ---------------------------------------------------------------------------------------

    def _timeout_s(self, given: float | None) -> float:
        """What one call may take: what it was given, or the client's own."""
        if given is None:
            return self._core.timeout_s
        _check_timeout(given)
        return given

    def _split(self, packed: KeyArray, subset: npt.NDArray[np.intp] | None) -> list[tuple[Link, npt.NDArray[np.intp]]]:
        """Positions of `packed` (of `subset`, if given) by the link that owns them, in order."""
        links, placement = self._core.view
        positions = np.arange(len(packed)) if subset is None else subset
        if placement is None:
            return [(links[0], positions)]
        owners = placement.owners(packed[positions])
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.arange(len(links) + 1))
        return [
            (links[number], positions[order[start:end]])
            for number, (start, end) in enumerate(itertools.pairwise(bounds.tolist()))
            if start < end
        ]

    def _exchange(
        self,
        packed: KeyArray,
        per_request: int,
        message: _MakeMessage,
        timeout_s: float,
        subset: npt.NDArray[np.intp] | None = None,
    ) -> list[Call]:
        """One request for at most `per_request` keys (of `subset`, if given) each; all sent, then all awaited."""
        if not len(packed):
            return []
        calls = [
            Call(
                link,
                Operation(self._core.next_id()),
                some,
                lambda call: message(call.operation, take(packed, call.positions), call.positions),
            )
            for link, positions in self._split(packed, subset)
            for some in chunks(positions, per_request)
        ]
        self._run(calls, timeout_s)
        return calls

    def _run(self, calls: Sequence[Call], timeout_s: float) -> None:
        """Send all, wait for all; whatever happens, every operation is done afterwards."""
        deadline = time.monotonic() + timeout_s
        self._send(calls, deadline)
        self._await(calls, deadline)
        again = [call for call in calls if call.retry]
        if again:
            self._send_again(again, deadline)
            self._await(again, deadline)

    def _send_again(self, calls: Sequence[Call], deadline: float) -> None:
        for call in calls:
            call.renew(self._core.next_id())
        self._send(calls, deadline)

    def _send(self, calls: Sequence[Call], deadline: float) -> None:
        by_link: dict[Link, list[Call]] = {}
        for call in calls:
            by_link.setdefault(call.link, []).append(call)
        sendings = []
        for link, some in by_link.items():
            try:
                self._core.ensure_up(link, deadline)
            except KVStoreError as error:
                for call in some:
                    call.operation.fail(error)
                continue
            for call in some:
                call.connection = link.connections
            sendings.append(Sending(link, some))
        for sending in send_all(sendings, deadline):
            self._core.break_link(sending.link, Timeout(f"{sending.link}: it takes no requests"))

    def _await(self, calls: Sequence[Call], deadline: float) -> None:
        operations = [call.operation for call in calls]
        if len(operations) == 1:
            only = operations[0]
            self._core.wait(lambda: only.done, deadline)
        else:
            self._core.wait(lambda: all(operation.done for operation in operations), deadline)
        for call in calls:
            if not call.operation.done:
                self._core.lost(call.link, call.operation)

    def _outcome(self, call: Call, expected: type[_T]) -> _T | None:
        """The reply; None for a transport failure under `fail_open`; raises otherwise."""
        operation = call.operation
        if operation.error is None and isinstance(operation.reply, expected):
            return operation.reply
        error = operation.error or protocol_error(call.link, operation.reply)
        if self.fail_open and isinstance(error, TRANSPORT_ERRORS):
            return None
        raise error

    def _ask_all(self, request: Callable[[int, int], wire.Request]) -> list[Call]:
        timeout_s = self._core.timeout_s
        calls = [
            Call(
                link,
                Operation(self._core.next_id()),
                np.empty(0, dtype=np.intp),
                lambda call: [[frame(wire.encode(request(call.operation.id, _milliseconds(timeout_s))), False)]],
            )
            for link in self._core.links
        ]
        self._run(calls, timeout_s)
        return calls

    def _get_calls(
        self,
        packed: KeyArray,
        unique: npt.NDArray[np.intp],
        target: IntoTarget | QueueTarget,
        timeout_s: float,
        credit: int = 0,
    ) -> list[Call]:
        def message(call: Call) -> Message:
            keys = take(packed, call.positions)
            request = wire.Get(call.operation.id, _milliseconds(timeout_s), len(keys), keys.shape[1], credit)
            return keyed_message(request, keys)

        return [
            Call(link, GetOperation(self._core.next_id(), some, target), some, message)
            for link, positions in self._split(packed, unique)
            for some in chunks(positions, wire.MAX_KEYS)
        ]

    def _get_into(
        self,
        packed: KeyArray,
        rows: npt.NDArray[np.uint8],
        slots: Sequence[int] | None,
        first: npt.NDArray[np.intp],
        unique: npt.NDArray[np.intp],
        timeout_s: float,
    ) -> npt.NDArray[np.bool_]:
        if not len(packed):
            return np.zeros(0, dtype=np.bool_)
        target = IntoTarget(rows, slots, len(packed), self._checksum)
        calls = self._get_calls(packed, unique, target, timeout_s)
        self._run(calls, timeout_s)
        self._settle_get(calls, packed, target)
        present: npt.NDArray[np.bool_] = target.present[first]
        self.stats.hits += int(present.sum())
        self.stats.misses += int((~present).sum())
        return present

    def _settle_get(self, calls: Sequence[Call], packed: KeyArray, target: IntoTarget | QueueTarget) -> None:
        """Raise what must be raised; drop blocks whose bytes were wrong."""
        for call in calls:
            error = call.operation.error
            if error is not None and not (self.fail_open and isinstance(error, TRANSPORT_ERRORS)):
                raise error
            assert isinstance(call.operation, GetOperation)
            self.stats.bytes_in += call.operation.hit * self.namespace.block_bytes
        if target.bad:
            bad, target.bad = target.bad, []
            self.stats.checksum_errors += len(bad)
            try:
                self._delete(packed[bad], min(DISCARD_TIMEOUT_S, self._core.timeout_s))
            except TRANSPORT_ERRORS as error:  # the next reader finds it, too; what arrived whole counts all the same
                log.warning("%d blocks with wrong bytes stay on the server: %s", len(bad), error)

    def _stream(
        self, packed: KeyArray, unique: npt.NDArray[np.intp], repeats: dict[int, list[int]]
    ) -> Generator[tuple[int, memoryview], None, None]:
        if not len(packed):
            return
        core = self._core
        target = QueueTarget(self.namespace.block_bytes, self._checksum)
        block_bytes = self.namespace.block_bytes
        credit = max(STREAM_CREDIT_BYTES, 2 * block_bytes)
        step = credit // 2
        calls = self._get_calls(packed, unique, target, core.timeout_s, credit)
        self._send(calls, time.monotonic() + core.timeout_s)
        granted = [0] * len(calls)
        hits = 0
        try:
            while True:
                deadline = time.monotonic() + core.timeout_s
                core.wait(lambda: bool(target.ready) or all(call.operation.done for call in calls), deadline)
                if not target.ready:
                    again = [call for call in calls if call.retry and not hits]
                    if not again:
                        break
                    self._send_again(again, deadline)
                while target.ready:
                    position, block = target.ready.popleft()
                    if block is None:
                        continue
                    for repeat in repeats.get(position, (position,)):
                        hits += 1
                        yield repeat, block
                    del block
                for number, call in enumerate(calls):
                    assert isinstance(call.operation, GetOperation)
                    taken = call.operation.arrived * block_bytes
                    if not call.operation.done and taken - granted[number] >= step:
                        call.link.post(
                            wire.encode(wire.Credit(call.operation.id, taken - granted[number])),
                            core.timeout_s,
                        )
                        granted[number] = taken
            for call in calls:
                if not call.operation.done:
                    core.lost(call.link, call.operation)
            self._settle_get(calls, packed, target)
        finally:
            for call in calls:
                if not call.operation.done:
                    call.link.abandon(call.operation)
                    call.link.post(wire.encode(wire.Cancel(call.operation.id)), core.timeout_s)
            self.stats.hits += hits
            self.stats.misses += len(packed) - hits
