"""Rows of host memory that several ranks of one host have in common, and loads whose reads they share.

With multi-head latent attention every tensor-parallel rank has the same bytes of every block. Such ranks on one host
map one pool. Of a load, each reads every n-th block from the store into the pool; all copy all blocks from there.

The memory is a file without a name (memfd): the first rank makes it, the others open it through the first one's
/proc/PID/fd and check a random token. It is gone with the last process, however that ends, and /dev/shm and its size
have no part in it. If one rank cannot open it, as on another host or in another container, all have pools of their own.

Who may touch which row is decided elsewhere, by the one thread that plans for all ranks: the rows of a load belong to
it until every rank has reported its end, and it has a number that no other load of this engine has. So this module
only tells *when* a row has its bytes, with signs in the same memory:

* ``came``, one for each row: load number, block, and whether the block came. Written by the rank that reads the block,
  after the bytes; read by the others before they copy. A sign of an earlier load has another number, so a rank that
  begins late, or was stopped for a minute, never takes an old row for a new one.
* ``ended``, for each rank and row: the number of the load that this rank reads no more of. Only the sign of a load's
  first row is used. The others need not wait for what will not come.
* ``taken``, for each rank and row: load number and block. Used when a load has fewer rows than blocks, which pass
  through them: a block is read into a row only when every rank has copied the block before it.

What can go wrong, and what happens then:

* A rank is slow, hangs, dies, or its part of the store fails. What it should have read has not come by the load's
  deadline, or its ``ended`` says at once that it will not. These blocks are missing on every rank, each reports that
  itself, and the engine computes them. No rank waits longer than the load's deadline.
* A rank ends a load while others still copy from its rows. The rows stay the load's own until all have reported.
* A rank begins a load when all others have given it up. It finds the signs of what they read, reads its own blocks,
  finds their ``ended``, and reports the rest as missing.
* A block comes too late or damaged. Its row may have any bytes, and gets a sign that says so, or none.
* A request is aborted. Each rank ends its load soon, and its ``ended`` tells the others.
* Two ranks think of a load's pieces differently. Who reads a block depends on its place in the load alone, and signs
  are for single blocks, so ranks may cut a load into different pieces.
* Processors reorder what other processes see. A fence stands between the bytes and their sign, on both sides.
* All wait for each other. A rank reads its share of a piece before it waits for the others', and waits for room only
  where others have to copy what is there already. Loads come to their turn in one order on all ranks, but for those
  that wait for a slow shard or for another rank, which hold up no others: so each comes to its turn on all ranks, or to
  its deadline.

Nobody waits in the model's thread, and no thread waits for a load: it is one of the calls that a multiplexer has under
way. It looks every `PAUSE_S`; a wait in the kernel would need a lock that a killed process can take with it.
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
# A sign: the load's number, the block's index in the load, whether it came.
INDEX_BITS: Final = 23

Rows = npt.NDArray[np.uint8]
Signs = npt.NDArray[np.uint64]
Hits = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Offer(NamedTuple):
    """Where the other ranks find the memory of the first one."""

    process: int
    rows: int  # descriptors
    signs: int
    token: bytes


class SharedRows:
    """A pool that ``ranks`` processes have mapped; this one is the ``rank``-th of them, from 0. Thread-safe.

    pool: (rows, row_bytes) uint8.
    """

    def __init__(self, pool: Rows, signs: Rows, rank: int, ranks: int) -> None:
        """signs: as `signs_memory` makes it, mapped by the same processes."""
        self.pool = pool
        self.rank = rank
        self.ranks = ranks
        self._signs = signs  # the memory of what follows
        words = signs[0, TOKEN_BYTES:].view(np.uint64).reshape(2 * ranks + 1, len(pool))
        self.came: Signs = words[0]
        self.ended: Signs = words[1 : ranks + 1]
        self.taken: Signs = words[ranks + 1 :]

    def stripe(self, number: int, rows: Sequence[int], blocks: int) -> Stripe:
        """This rank's part in load ``number`` (from 1), of so many ``blocks``: block i is in row
        ``rows[i % len(rows)]``. Raises ValueError for one row of several blocks: it would be written while the block
        before is copied."""
        if len(rows) < min(2, blocks):
            raise ValueError(f"{len(rows)} rows for {blocks} blocks: expected at least two")
        return Stripe(self, number, np.asarray(rows, dtype=np.int64), blocks)


class Stripe:
    """A load of blocks that several ranks read together, as this rank has part in it. Each method is called by one
    thread at a time. Whatever happens, `end` must be called."""

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
        """How many blocks, at most as many as these, may be fetched at once while those before them are copied."""
        return min(blocks, max(1, self._width // 2)) if self._width < len(self._blocks) else blocks

    def steps(self, some: range, until: float, read: Callable[[Sequence[int]], Steps[Hits]]) -> Steps[Hits]:
        """Read this rank's share of ``some`` blocks, and wait for the others', in steps. -> which of all these blocks
        are in their rows, known for those before the first that is not. ``read(blocks)`` reads blocks of these numbers
        into their rows and returns which came. ``until``, on the clock of ``time.monotonic()``: what has not come by
        then is missing.

        Of blocks that were in the same rows before, the caller has copied all but those of the last piece, which has
        `most` blocks at most."""
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
        """This rank has copied blocks ``first`` to ``end``: others may be read into their rows."""
        if self._width < len(self._blocks):
            memory_fence()
            self._shared.taken[self._shared.rank, self._rows[first:end]] = self._signs(self._blocks[first:end])

    def end(self) -> None:
        """This rank reads no more blocks of this load."""
        memory_fence()
        self._shared.ended[self._shared.rank, self._home] = self._number

    def _signs(self, blocks: Numbers, came: Hits | bool = True) -> Signs:
        signs: Signs = (self._number << INDEX_BITS + 1 | blocks << 1 | came).astype(np.uint64)
        return signs

    def _ended(self) -> Hits:
        """Which ranks have ended. Their other signs are to be looked at after this."""
        ended: Hits = self._shared.ended[:, self._home] == self._number
        memory_fence()
        return ended

    def _room(self, blocks: Numbers, until: float) -> Steps[bool]:
        """Wait until all ranks have copied what is in the rows of these blocks. -> whether they have."""
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
            # A rank that ended before it copied them has given the load up.
            if (ended & ~taken & others).any() or time.monotonic() >= until:
                return False
            yield _a_pause(until)

    def _others(self, blocks: Numbers, mine: Hits, hits: Hits, until: float) -> Steps[None]:
        """Wait until it is known whether the others' blocks came, up to the first that did not."""
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
    """Until it is time to look at the signs again."""
    return Awaited(None, lambda: False, min(until, time.monotonic() + PAUSE_S))


def signs_memory(rows: int, ranks: int) -> int:
    """How many bytes the signs of a pool take."""
    return TOKEN_BYTES + 8 * rows * (2 * ranks + 1)


def share_rows(
    rows: int, row_bytes: int, rank: int, ranks: int, exchange: Callable[[object], Sequence[object]]
) -> SharedRows | None:
    """Map one pool in all of these processes, each of which calls this at the same time. -> None, in all of them, if
    one cannot. ``exchange(mine)`` returns what every rank gave, in their order; it is called twice.
    """
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
            if made[1][0, :TOKEN_BYTES].tobytes() != offer.token:  # another host's process of that number
                made = None
        except OSError:
            made = None
    if not all(exchange(made is not None)) or made is None:
        return None
    return SharedRows(*made, rank, ranks)
