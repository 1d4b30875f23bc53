"""Blocks that wait to be sent, by the chains they belong to.

Of a prompt, only the blocks before the first gap are ever found. So when there are too many, the end of the oldest
chain goes first, not its beginning; and what follows a block that went has no use either.
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
    """A queue of blocks: the chain of which a block came first goes first. Not thread-safe. `remember`: of so many
    blocks that were cut, it knows for a while that what follows them is of no use."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._numbers = itertools.count()
        self._chains: dict[int, deque[BlockT]] = {}  # the oldest first; a block comes before those that follow it
        self._chain_of: dict[bytes, int] = {}  # the chain of each block that waits, by its key
        self._cut: dict[bytes, None] = {}  # the oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: BlockT) -> bool:
        """-> False: the block is not taken, because one before it was cut."""
        if block.parent in self._cut:
            self._note_cut(block)
            return False
        self._cut.pop(block.key, None)
        number = self._chain_of.get(block.parent) if block.parent is not None else None
        if number is None:
            number = next(self._numbers)
            self._chains[number] = deque()
        self._chains[number].append(block)
        self._chain_of[block.key] = number
        self._count += 1
        return True

    def take(self, most: int) -> list[BlockT]:
        """Take out so many blocks, from the beginnings of the oldest chains."""
        taken: list[BlockT] = []
        while self._chains and len(taken) < most:
            number, chain = next(iter(self._chains.items()))
            taken += [self._forget(chain.popleft()) for _ in range(min(most - len(taken), len(chain)))]
            if not chain:
                del self._chains[number]
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
        self._chain_of.pop(block.key, None)
        self._count -= 1
        return block

    def _note_cut(self, block: BlockT) -> None:
        self._cut[block.key] = None
        if len(self._cut) > self._remember:
            del self._cut[next(iter(self._cut))]
