"""Requests in flight: what a reply means to the call that waits for it.

An operation is made by the calling thread, filled in by whichever thread reads the connection (see `core`), and read
by the caller once `done`. `begin_payload` names the memory a frame goes to before any of it is read: for `get_into`
that is the caller's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import checksum_into
from kvstore_client._links.buffers import Rows
from kvstore_client.errors import KVStoreError, ProtocolError, from_wire


class Operation:
    """One request and the state of its reply."""

    __slots__ = ("done", "error", "following", "id", "reply", "sent_at")

    def __init__(self, request_id: int) -> None:
        self.id = request_id
        self.done = False
        self.following = 0  # bytes the last part announced behind itself
        self.sent_at = 0.0  # when its sending ended; 0 before, and once an answer began
        self.error: KVStoreError | None = None
        self.reply: wire.Reply | None = None

    def header(self, reply: wire.Reply) -> None:
        """The first frame of a reply to this request."""
        if isinstance(reply, wire.Error):
            self.fail(from_wire(reply.code, reply.message))
        else:
            self.reply = reply

    def begin_payload(self, size: int) -> list[memoryview]:
        """Where the next payload frame goes."""
        raise ProtocolError(f"a payload frame of {size} bytes in a reply that has none")

    def end_payload(self) -> None:
        """The frame is there."""

    def end_message(self) -> None:
        """The message is complete; for most replies that is all."""
        self.done = True

    def fail(self, error: KVStoreError) -> None:
        """No (more) reply will come."""
        if not self.done:
            self.error = error
            self.done = True


class GetOperation(Operation):
    """A GET: places the blocks of its parts. `positions[i]` is the caller's position of the request's key i."""

    __slots__ = ("_expected", "_part", "_part_positions", "_sums", "arrived", "hit", "positions", "target")

    def __init__(self, request_id: int, positions: npt.NDArray[np.intp], target: BlockTarget) -> None:
        super().__init__(request_id)
        self.positions = positions
        self.target = target
        self.arrived = self.hit = 0  # blocks, and those of them whose bytes are right
        self._part: wire.Part | None = None
        self._part_positions: list[int] = []
        self._sums: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._expected = 0  # payload bytes of the current part still to be announced

    def header(self, reply: wire.Reply) -> None:
        if not isinstance(reply, wire.Part):
            super().header(reply)
            return
        if len(reply.positions) % 4 or len(reply.sums) % wire.CHECKSUM_BYTES:
            raise ProtocolError(
                f"a PART with {len(reply.positions)} bytes of positions, {len(reply.sums)} of checksums"
            )
        local = np.frombuffer(reply.positions, dtype="<u4")
        self._sums = np.frombuffer(reply.sums, dtype="<u8")
        if len(local) != len(self._sums) or (len(local) and int(local.max()) >= len(self.positions)):
            raise ProtocolError(f"a PART of {len(local)} positions, {len(self._sums)} checksums: they do not fit")
        self._part_positions = self.positions[local].tolist()
        self._expected = len(local) * self.target.block_bytes
        self.following = reply.following
        self._part = reply

    def begin_payload(self, size: int) -> list[memoryview]:
        if size != self._expected or not size:
            raise ProtocolError(f"a payload frame of {size} bytes: expected {self._expected}")
        self._expected = 0
        return self.target.views(self._part_positions)

    def end_payload(self) -> None:
        self.arrived += len(self._part_positions)
        self.hit += self.target.placed(self._part_positions, self._sums)

    def end_message(self) -> None:
        if self._expected:
            raise ProtocolError(f"a PART without its payload of {self._expected} bytes")
        if self._part is None or self._part.last:
            self.done = True


class BlockTarget:
    """Where the blocks of one call go. `bad`: positions whose bytes do not match their checksum."""

    def __init__(self, block_bytes: int, verify: bool) -> None:
        self.block_bytes = block_bytes
        self.verify = verify
        self.bad: list[int] = []

    def views(self, positions: list[int]) -> list[memoryview]:
        """Writable memory for these blocks, in this order."""
        raise NotImplementedError

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        """Their bytes are there. -> how many are right."""
        raise NotImplementedError

    def _check(self, views: Sequence[memoryview], positions: list[int], sums: npt.NDArray[np.uint64]) -> list[bool]:
        if not self.verify:
            return [True] * len(positions)
        found = np.empty(len(positions), dtype=np.uint64)
        checksum_into(views, found)
        good = found == sums
        if not good.all():
            self.bad.extend(position for position, ok in zip(positions, good.tolist(), strict=True) if not ok)
        result: list[bool] = good.tolist()
        return result


class IntoTarget(BlockTarget):
    """The caller's own rows: block of position i goes to `rows[slots[i]]` (`rows[i]` without slots)."""

    def __init__(self, rows: Rows, slots: Sequence[int] | None, count: int, verify: bool) -> None:
        super().__init__(rows.shape[1], verify)
        self._rows = rows
        self._flat = memoryview(rows.reshape(-1)) if rows.flags.c_contiguous else None
        self._slots = slots
        self.present = np.zeros(count, dtype=np.bool_)

    def row(self, position: int) -> memoryview:
        """One block's place."""
        number = position if self._slots is None else self._slots[position]
        if self._flat is None:
            return memoryview(self._rows[number])
        return self._flat[number * self.block_bytes : (number + 1) * self.block_bytes]

    def views(self, positions: list[int]) -> list[memoryview]:
        self.present[positions] = False  # they may have been there, and are about to be overwritten
        count, first = len(positions), positions[0]
        if self._slots is None and self._flat is not None and positions == list(range(first, first + count)):
            return [self._flat[first * self.block_bytes : (first + count) * self.block_bytes]]
        return [self.row(position) for position in positions]

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        good = self._check([self.row(position) for position in positions], positions, sums)
        self.present[positions] = good
        return sum(good)


class QueueTarget(BlockTarget):
    """Buffers of our own, handed out in order of arrival; one is used again only when nobody looks at it any more."""

    def __init__(self, block_bytes: int, verify: bool) -> None:
        super().__init__(block_bytes, verify)
        self.ready: deque[tuple[int, memoryview | None]] = deque()  # None: its bytes were wrong
        self._buffers: list[bytearray] = []
        self._filling: dict[int, memoryview] = {}  # by first position: several links may be in a frame at once

    def views(self, positions: list[int]) -> list[memoryview]:
        filling = memoryview(self._free_buffer())[: len(positions) * self.block_bytes]
        self._filling[positions[0]] = filling
        return [filling]

    def _free_buffer(self) -> bytearray:
        for buffer in self._buffers:
            try:
                buffer.append(0)  # refused while any view of it exists: then its reader still needs it
            except BufferError:
                continue
            buffer.pop()
            return buffer
        buffer = bytearray(wire.frame_blocks(self.block_bytes) * self.block_bytes)
        self._buffers.append(buffer)
        return buffer

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        filled = self._filling.pop(positions[0])
        size = self.block_bytes
        views = [filled[at : at + size].toreadonly() for at in range(0, len(positions) * size, size)]
        good = self._check(views, positions, sums)
        self.ready.extend(
            (position, view if ok else None) for position, view, ok in zip(positions, views, good, strict=True)
        )
        return sum(good)
