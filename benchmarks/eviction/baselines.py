"""Plain versions of textbook policies for comparison: S3-FIFO, ARC, SIEVE, and the clairvoyant optimum.

They handle a request as the server's policies do. First, the request's leading run of resident blocks counts as used.
Then its other blocks are inserted or, if they are resident behind a missing block, count as used. Both steps begin at
the tail. Capacity is in blocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Final

from benchmarks.eviction.traces import Chain, Trace

_NEVER: Final = 1 << 60


class Arc:
    """ARC, as in figure 4 of Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache, FAST 2003.

    ARC has a list of resident blocks that were used once, a list of those used more often, and a list of ghosts for
    each of the two. A target for the length of the first list moves with every hit on a ghost.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once, self._often, self._once_ghosts, self._often_ghosts = (OrderedDict[int, None]() for _ in range(4))

    def request(self, chain: Chain) -> int:
        """Request a chain. Return how many of its leading blocks were present."""
        blocks = chain.tolist()
        run = next((i for i, b in enumerate(blocks) if b not in self._once and b not in self._often), len(blocks))
        for block in blocks[:run][::-1] + blocks[run:][::-1]:
            self._use(block)
        return run

    def _use(self, block: int) -> None:
        once, often = self._once, self._often
        if block in often:
            often.move_to_end(block)
        elif block in once:
            del once[block]
            often[block] = None
        elif block in self._once_ghosts:
            step = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._target = min(float(self._capacity), self._target + step)
            self._replace(False)
            del self._once_ghosts[block]
            often[block] = None
        elif block in self._often_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._target = max(0.0, self._target - step)
            self._replace(True)
            del self._often_ghosts[block]
            often[block] = None
        else:
            self._make_room()
            once[block] = None

    def _make_room(self) -> None:
        capacity, once_all = self._capacity, len(self._once) + len(self._once_ghosts)
        everything = once_all + len(self._often) + len(self._often_ghosts)
        if once_all == capacity:
            if len(self._once) == capacity:
                self._once.popitem(last=False)
                return
            self._once_ghosts.popitem(last=False)
            self._replace(False)
        elif everything >= capacity:
            if everything == 2 * capacity:
                self._often_ghosts.popitem(last=False)
            self._replace(False)

    def _replace(self, was_used_often: bool) -> None:
        """Evict one resident block, and make it a ghost."""
        if len(self._once) + len(self._often) < self._capacity:
            return
        length = len(self._once)
        if length and (length > self._target or (was_used_often and length == self._target) or not self._often):
            self._once_ghosts[self._once.popitem(last=False)[0]] = None
        else:
            self._often_ghosts[self._often.popitem(last=False)[0]] = None


class S3Fifo:
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023).

    S3-FIFO has a small queue with a tenth of the capacity, a main queue, and ghosts of the small queue, as many as the
    capacity. The server's S3-FIFO differs in that it makes room for a whole request at once, and remembers hashes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_target = max(1, capacity // 10)
        self._small, self._main = OrderedDict[int, int](), OrderedDict[int, int]()  # block -> uses, 3 at most
        self._ghosts = OrderedDict[int, None]()

    def request(self, chain: Chain) -> int:
        """Request a chain. Return how many of its leading blocks were present."""
        blocks = chain.tolist()
        run = next((i for i, b in enumerate(blocks) if b not in self._small and b not in self._main), len(blocks))
        for block in blocks[:run][::-1] + blocks[run:][::-1]:
            if block in self._small:
                self._small[block] = min(3, self._small[block] + 1)
            elif block in self._main:
                self._main[block] = min(3, self._main[block] + 1)
            else:
                self._insert(block)
        return run

    def _insert(self, block: int) -> None:
        while len(self._small) + len(self._main) >= self._capacity:
            if len(self._small) >= self._small_target or not self._main:
                self._leave_small()
            else:
                self._leave_main()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _leave_small(self) -> None:
        block, uses = self._small.popitem(last=False)
        if uses > 1:
            self._main[block] = 0
            return
        self._ghosts[block] = None
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)

    def _leave_main(self) -> None:
        block, uses = self._main.popitem(last=False)
        if uses:
            self._main[block] = uses - 1


class Sieve:
    """SIEVE (Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is simpler than LRU, NSDI 2024).

    SIEVE has one queue in the order of age, and a hand that moves from the old end to the new end, and then starts
    again. The hand clears the marks of blocks that were used since it last passed, and evicts the first block without a
    mark.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._marked: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._oldest = self._newest = self._hand = -1

    def request(self, chain: Chain) -> int:
        """Request a chain. Return how many of its leading blocks were present."""
        blocks = chain.tolist()
        run = next((i for i, block in enumerate(blocks) if block not in self._marked), len(blocks))
        for block in blocks[:run][::-1] + blocks[run:][::-1]:
            if block in self._marked:
                self._marked[block] = True
            else:
                self._insert(block)
        return run

    def _insert(self, block: int) -> None:
        if len(self._marked) == self._capacity:
            self._evict()
        self._marked[block] = False
        self._older[block], self._newer[block] = self._newest, -1
        if self._newest >= 0:
            self._newer[self._newest] = block
        else:
            self._oldest = block
        self._newest = block

    def _evict(self) -> None:
        hand = self._hand if self._hand >= 0 else self._oldest
        while self._marked[hand]:
            self._marked[hand] = False
            hand = self._newer[hand] if self._newer[hand] >= 0 else self._oldest
        del self._marked[hand]
        older, newer = self._older.pop(hand), self._newer.pop(hand)
        if older >= 0:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer >= 0:
            self._older[newer] = older
        else:
            self._newest = older
        self._hand = newer


class Optimum:
    """The policy with the most possible hits. It evicts the block whose next use is the latest (Belady), even if that
    block has just been inserted (bypass).

    A hit counts only if every block before it in the request was a hit, too. The best policy without this rule is also
    the best with it, provided that it evicts the deeper one of two blocks that the same request needs next. This holds
    because equal blocks are equal prefixes, so a block is never needed before its parent. So the parents of each
    resident block are resident, and every resident block that is requested is part of a leading run. A request takes no
    time: the capacity limits only the blocks that stay between requests, and any of the resident and new blocks may
    stay.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = capacity
        self._next_uses = _next_uses(trace)
        self._number = 0
        self._resident: dict[int, int] = {}  # block -> the request that needs it next
        self._latest: list[tuple[int, int, int]] = []  # heap of (-request, -position, block); may be out of date

    def request(self, chain: Chain) -> int:
        """Request the trace's next chain. Return how many of its leading blocks were present."""
        resident = self._resident
        blocks = chain.tolist()
        run = next((i for i, block in enumerate(blocks) if block not in resident), len(blocks))
        for position, (block, needed) in enumerate(zip(blocks, self._next_uses[self._number], strict=True)):
            if needed == _NEVER:
                resident.pop(block, None)
                continue
            resident[block] = needed
            heapq.heappush(self._latest, (-needed, -position, block))
        while len(resident) > self._capacity:
            needed, _, block = heapq.heappop(self._latest)
            if resident.get(block) == -needed:
                del resident[block]
        self._number += 1
        return run


def _next_uses(trace: Trace) -> list[list[int]]:
    """Return, for each block of each request, the number of the next request that needs the block."""
    upcoming = [_NEVER] * trace.distinct
    result = []
    for number in range(len(trace.chains) - 1, -1, -1):
        blocks = trace.chains[number].tolist()
        result.append([upcoming[block] for block in blocks])
        for block in blocks:
            upcoming[block] = number
    return result[::-1]
