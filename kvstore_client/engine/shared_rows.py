"""Rows of host memory that several ranks of one host share, and loads whose reads the ranks divide among themselves.

With multi-head latent attention, every tensor-parallel rank has the same bytes of every block. Such ranks on one host
map one common pool. In a load with n ranks, each rank reads every n-th block from the store into the pool, and each
rank copies all blocks from there.

The memory is a file without a name (memfd). The first rank makes it; the others open it through the first rank's
/proc/PID/fd and check a random token. The memory is freed when the last process ends, in whatever way. The size of
/dev/shm does not matter. If one rank cannot open the file, for example in another container, every rank uses a pool of
its own.

One thread plans for all ranks, and decides which load uses which rows. A load has a number that no other load of this
engine has. Its rows belong to it until every rank has reported the load's end. So this module only has to say *when*
the bytes of a block are in their row. It uses signs in the same memory:

* ``came``, one sign for each row, has the load's number, the block, and whether the block came. The rank that reads the
  block writes the sign after the bytes. The others check it before they copy. A sign of an earlier load has another
  number. So a rank that begins late, or was stopped for a minute, never takes an old row for a new one.
* ``ended``, one sign for each rank and row, has the number of a load whose remaining blocks this rank will not read.
  Only the sign of a load's first row is used. It tells the other ranks not to wait for blocks that will not come.
* ``taken``, one sign for each rank and row, has the number of a load and the block that the rank has copied. It is used
  when a load has more blocks than rows, so that a row holds several blocks in sequence. A block is read into a row only
  after every rank has copied the row's previous block.

Possible problems, and what happens in each case:

* A rank is slow, hangs or dies, or its part of the store fails. Either its blocks have not come by the load's deadline,
  or its ``ended`` says earlier that they will not come. These blocks are missing on every rank. Each rank reports them
  as missing, and the engine computes them. No rank waits longer than the load's deadline.
* A rank ends a load while others still copy from the load's rows. The rows belong to the load until all ranks have
  reported its end.
* A rank begins a load after all others have given up that load. It finds the signs of the blocks that the others read,
  and reads its own blocks. It then finds the others' ``ended`` and reports the rest as missing.
* A block comes too late, or is damaged. Its row may have any bytes. The row gets either a sign that the block did not
  come, or no sign.
* A request is aborted. Each rank ends the load soon, and informs the others with its ``ended``.
* Two ranks cut a load into different pieces. This is allowed, because only a block's index in the load determines which
  rank reads it, and each sign is for a single block.
* A processor may reorder memory accesses, as seen by other processes. So the writer and the reader each have a memory
  fence between their accesses to the bytes and to the sign.
* Ranks could wait for each other in a circle. A rank reads its share of a piece before it waits for the others' shares.
  It waits for room only while others copy blocks that are in their rows already. All ranks begin loads in the same
  order. A load that waits for a slow shard or for another rank delays no other load. So each load either begins on all
  ranks or reaches its deadline.

The model's thread never waits. No other thread is blocked by a load either, because a load is one of many calls that a
multiplexer runs. The load checks the signs every `PAUSE_S`. Waiting in the kernel instead would need a lock, which a
killed process would never release.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore._cext import memory_fence
from kvstore_client._calls.exchange import Awaited, Steps
from kvstore_client.memory import host_memory, memory_of_process

PAUSE_S: Final = 0.0005
TOKEN_BYTES: Final = 16
# A sign has the load's number, the block's index in the load, and whether the block came.
INDEX_BITS: Final = 23

Rows = npt.NDArray[np.uint8]
Signs = npt.NDArray[np.uint64]
Hits = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Offer(NamedTuple):
    """The first rank's offer to share its memory: what the other ranks need to open it."""

    process: int
    rows: int  # `rows` and `signs` are file descriptors
    signs: int
    token: bytes


class SharedRows:
    """A pool that `ranks` processes have mapped. This process has the number `rank`, counted from 0. Thread-safe.

    pool: an array of shape (rows, row_bytes) and type uint8.
    """

    def __init__(self, pool: Rows, signs: Rows, rank: int, ranks: int) -> None:
        """`signs`: memory of `signs_memory` bytes, mapped by the same processes."""
        self.pool = pool
        self.rank = rank
        self.ranks = ranks
        self._signs = signs  # the memory of the arrays below
        words = signs[0, TOKEN_BYTES:].view(np.uint64).reshape(2 * ranks + 1, len(pool))
        self.came: Signs = words[0]
        self.ended: Signs = words[1 : ranks + 1]
        self.taken: Signs = words[ranks + 1 :]

    def stripe(self, number: int, rows: Sequence[int], blocks: int) -> Stripe:
        """Return this rank's share of load `number` (at least 1), which has `blocks` blocks. The blocks use `rows` in
        turn, and begin again with the first row after the last. Raises `ValueError` for one row and several blocks,
        because the row would be written while its previous block is copied."""
        if len(rows) < min(2, blocks):
            raise ValueError(f"{len(rows)} rows for {blocks} blocks: expected at least two rows")
        return Stripe(self, number, np.asarray(rows, dtype=np.int64), blocks)


class Stripe:
    """One rank's share of a load that several ranks read together. Only one thread at a time may call a method. `end`
    must be called in any case."""

    def __init__(self, shared: SharedRows, number: int, rows: Numbers, blocks: int) -> None:
        self.ranks = shared.ranks
        self._shared = shared
        self._number = number
        self._blocks = np.arange(blocks, dtype=np.int64)
        self._width = len(rows)
        self._rows = rows[self._blocks % len(rows)]
        self._home = int(rows[0])

    @property
    def rows(self) -> list[int]:
        """The row of each block."""
        rows: list[int] = self._rows.tolist()
        return rows

    def most(self, blocks: int) -> int:
        """Return how many blocks, up to this number, may be fetched at once while earlier blocks are copied."""
        return min(blocks, max(1, self._width // 2)) if self._width < len(self._blocks) else blocks

    def steps(self, some: range, until: float, read: Callable[[Sequence[int]], Steps[Hits]]) -> Steps[Hits]:
        """Read this rank's share of the blocks in `some`, and wait for the other ranks' shares, in steps. Return which
        of these blocks are in their rows. The result is final only up to the first missing block.

        `until`: the deadline, on the clock of `time.monotonic`. Blocks that have not come by then are missing.
        `read(blocks)`: a function that reads the blocks with these indices into their rows and returns which of them
        came.

        The caller must have copied the blocks that were in the same rows before. Only the blocks of the last piece,
        which are at most `most`, may still be uncopied.
        """
        blocks = self._blocks[some.start : some.stop]
        rows = self._rows[blocks]
        mine = blocks % self.ranks == self._shared.rank
        hits = np.zeros(len(blocks), dtype=np.bool_)
        if mine.any() and (yield from self._room(blocks[mine], until)):
            hits[mine] = yield from read(blocks[mine].tolist())
            memory_fence()
            self._shared.came[rows[mine]] = self._signs(blocks[mine], hits[mine])
        yield from self._others(blocks, mine, hits, until)
        return hits

    def took(self, first: int, end: int) -> None:
        """Note that this rank has copied blocks `first` to `end`, so that others may be read into their rows."""
        if self._width < len(self._blocks):
            memory_fence()
            self._shared.taken[self._shared.rank, self._rows[first:end]] = self._signs(self._blocks[first:end])

    def end(self) -> None:
        """Note that this rank reads no more blocks of this load."""
        memory_fence()
        self._shared.ended[self._shared.rank, self._home] = self._number

    def _signs(self, blocks: Numbers, came: Hits | bool = True) -> Signs:
        signs: Signs = (self._number << INDEX_BITS + 1 | blocks << 1 | came).astype(np.uint64)
        return signs

    def _ended(self) -> Hits:
        """Return which ranks have ended the load. Check their other signs only after this call."""
        ended: Hits = self._shared.ended[:, self._home] == self._number
        memory_fence()
        return ended

    def _room(self, blocks: Numbers, until: float) -> Steps[bool]:
        """Wait until all other ranks have copied the earlier blocks that are in the rows of these blocks. Return
        whether they have."""
        blocks = blocks[blocks >= self._width]
        if not len(blocks):
            return True
        others = np.arange(self.ranks) != self._shared.rank
        before, rows = self._signs(blocks - self._width), self._rows[blocks]
        while True:
            ended = self._ended()
            taken = (self._shared.taken[:, rows] == before).all(axis=1)
            memory_fence()
            if taken[others].all():
                return True
            # A rank that ended before it copied them has given up the load.
            if (ended & ~taken & others).any() or time.monotonic() >= until:
                return False
            yield _a_pause(until)

    def _others(self, blocks: Numbers, mine: Hits, hits: Hits, until: float) -> Steps[None]:
        """Wait until it is known whether the other ranks' blocks came, up to the first block that did not."""
        rows, came, missed = self._rows[blocks], self._signs(blocks), self._signs(blocks, False)
        while True:
            ended = self._ended()
            seen = self._shared.came[rows]
            memory_fence()
            hits[~mine] = seen[~mine] == came[~mine]
            unknown = ~(hits | mine | (seen == missed) | ended[blocks % self.ranks])
            waits_for = int(unknown.argmax()) if unknown.any() else len(hits)
            if not hits[:waits_for].all() or waits_for == len(hits) or time.monotonic() >= until:
                return
            yield _a_pause(until)


def _a_pause(until: float) -> Awaited:
    """Return a wait that ends when the signs are due to be checked again."""
    return Awaited(None, lambda: False, min(until, time.monotonic() + PAUSE_S))


def signs_memory(rows: int, ranks: int) -> int:
    """Return the number of bytes that the signs of a pool take."""
    return TOKEN_BYTES + 8 * rows * (2 * ranks + 1)


def share_rows(
    rows: int, row_bytes: int, rank: int, ranks: int, exchange: Callable[[object], Sequence[object]]
) -> SharedRows | None:
    """Map one common pool in several processes, all of which must call this function at the same time. If one of them
    cannot map it, return None in all of them. `exchange(mine)` must return the objects of all ranks, in the order of
    the ranks. It is called twice."""
    made: tuple[Rows, Rows] | None = None
    offer: Offer | None = None
    sizes = (rows, row_bytes), (1, signs_memory(rows, ranks))
    if rank == 0:
        try:
            made = host_memory(*sizes[0], wait=False), host_memory(*sizes[1])
        except OSError:
            made = None
        else:
            token = secrets.token_bytes(TOKEN_BYTES)
            made[1][0, :TOKEN_BYTES] = np.frombuffer(token, dtype=np.uint8)
            offer = Offer(os.getpid(), made[0].region.descriptor, made[1].region.descriptor, token)  # type: ignore[attr-defined]
    offer = exchange(offer)[0]  # type: ignore[assignment]
    if offer is not None and made is None:
        try:
            made = (
                memory_of_process(offer.process, offer.rows, *sizes[0]),
                memory_of_process(offer.process, offer.signs, *sizes[1]),
            )
            if made[1][0, :TOKEN_BYTES].tobytes() != offer.token:  # that number belongs to another process on this host
                made = None
        except OSError:
            made = None
    if not all(exchange(made is not None)) or made is None:
        return None
    return SharedRows(*made, rank, ranks)
