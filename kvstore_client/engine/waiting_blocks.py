"""Blocks that wait to be sent, by the chains they belong to.

Of a prompt, only the blocks before the first gap are ever found. So when there are too many, the end of the oldest
chain goes first, not its beginning; and as long as there are too many, what follows a block that went is not taken.

A chain is what follows each other in this queue. Of ranks that share the sending, each has every n-th block of a
prompt, which are chains of one block here; each part of a block, or group of layers, has a chain of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Chained(Protocol):
    """A block, by its key, that of the block before it, and what names it."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def token(self) -> Hashable: ...


BlockT = TypeVar("BlockT", bound=Chained)


class WaitingBlocks(Generic[BlockT]):
    """A queue of blocks: the chain of which a block came first goes first. A block may be in it twice. Not thread-safe.
    `remember`: how many cut blocks are remembered, so that what follows them is refused; none once the queue has been
    emptied, because another engine may have stored them since."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._numbers = itertools.count()
        self._chains: dict[int, deque[BlockT]] = {}  # the oldest first; a block comes before those that follow it
        self._chain_of: dict[bytes, tuple[int, int]] = {}  # by key: its newest chain, and how often it waits
        self._cut: dict[bytes, None] = {}  # the oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: BlockT) -> bool:
        """-> False: the block is not taken, because one before it was cut."""
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
        """This block is on its way to the store, perhaps not through this queue: what follows it is of use."""
        self._cut.pop(key, None)

    def take(self, most: int) -> list[BlockT]:
        """Take out so many blocks, from the beginnings of the oldest chains."""
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
        """Take out so many blocks, from the ends of the oldest chains, the last of each first."""
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
        """Take out the blocks with unwanted tokens."""
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
        if block.key in self._chain_of:  # it waits once more
            return
        self._cut[block.key] = None
        if len(self._cut) > self._remember:
            del self._cut[next(iter(self._cut))]
