"""The queue of blocks that wait to be sent, ordered by chain.

A lookup finds only the blocks of a prompt before the first gap. So when there are too many blocks, the end of the
oldest chain is dropped first, not its beginning. Blocks that follow a dropped block are refused until the queue has
been empty.

A chain is a sequence of blocks in this queue. Each block is the parent of the next. If n ranks share the work of
sending, each rank has every n-th block of a prompt, and each of these blocks is a chain of one block. Slices with
different numbers are in different chains.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Chained(Protocol):
    """A block with its key, the key of the block before it, and a token that identifies it."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def token(self) -> Hashable: ...


BlockT = TypeVar("BlockT", bound=Chained)


class WaitingBlocks(Generic[BlockT]):
    """A queue of blocks. Chains leave it in the order in which their first blocks came. A block may be in it twice. Not
    thread-safe.

    `remember`: how many dropped blocks are remembered, so that blocks that follow them are refused. When the queue has
    been emptied, all are forgotten, because another engine may have stored them since.
    """

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._numbers = itertools.count()
        self._chains: dict[int, deque[BlockT]] = {}  # the oldest first; each has its blocks in order
        self._chain_of: dict[bytes, tuple[int, int]] = {}  # by key: newest chain, number of times in the queue
        self._cut: dict[bytes, None] = {}  # the oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: BlockT) -> bool:
        """Add a block. Return False if it is refused because an earlier block of its chain was dropped."""
        if block.parent in self._cut:
            self._note_cut(block)
            return False
        self.went(block.key)
        number, _ = self._chain_of.get(block.parent or b"", (-1, 0))
        if number not in self._chains:
            number = next(self._numbers)
            self._chains[number] = deque()
        self._chains[number].append(block)
        self._chain_of[block.key] = number, self._chain_of.get(block.key, (0, 0))[1] + 1
        self._count += 1
        return True

    def went(self, key: bytes) -> None:
        """Note that this block is on its way to the store, perhaps not through this queue. Blocks that follow it are
        therefore useful and are not refused."""
        self._cut.pop(key, None)

    def take(self, most: int) -> list[BlockT]:
        """Remove and return at most this many blocks, from the beginnings of the oldest chains."""
        taken: list[BlockT] = []
        while self._chains and len(taken) < most:
            number, chain = next(iter(self._chains.items()))
            taken += [self._forget(chain.popleft()) for _ in range(min(most - len(taken), len(chain)))]
            if not chain:
                del self._chains[number]
        if not self._chains:
            self._cut.clear()
        return taken

    def cut(self, count: int) -> list[BlockT]:
        """Remove and return at most this many blocks, from the ends of the oldest chains. The last block of each chain
        comes first."""
        taken: list[BlockT] = []
        while self._chains and len(taken) < count:
            number, chain = next(iter(self._chains.items()))
            for _ in range(min(count - len(taken), len(chain))):
                taken.append(self._forget(chain.pop()))
                self._note_cut(taken[-1])
            if not chain:
                del self._chains[number]
        return taken

    def remove(self, unwanted: Callable[[Hashable], bool]) -> list[BlockT]:
        """Remove and return the blocks for whose tokens `unwanted` returns True."""
        taken: list[BlockT] = []
        for number, chain in list(self._chains.items()):
            found = [each for each in chain if unwanted(each.token)]
            if found:
                taken += [self._forget(each) for each in found]
                kept = [each for each in chain if not unwanted(each.token)]
                self._chains[number] = deque(kept)
                if not kept:
                    del self._chains[number]
        return taken

    def _forget(self, block: BlockT) -> BlockT:
        number, copies = self._chain_of.pop(block.key)
        if copies > 1:
            self._chain_of[block.key] = number, copies - 1
        self._count -= 1
        return block

    def _note_cut(self, block: BlockT) -> None:
        if block.key in self._chain_of:  # another copy of it still waits
            return
        self._cut[block.key] = None
        if len(self._cut) > self._remember:
            del self._cut[next(iter(self._cut))]
