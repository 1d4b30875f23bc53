"""Synthetic traces, one for each kind of traffic, so that a policy is not judged by a single recording.

The same name and seed give the same trace on every machine, because all random numbers come from `random.Random` with
the trace's own seed. Lengths are in blocks. If a chain's last block occurs only once, the chain is a prompt whose last
block is not full, because a continuation of the prompt does not contain that block.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.eviction.traces import Trace

Request = list[int]


class _Source:
    """A source of random numbers, and of new blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = itertools.count()

    def new(self, count: int) -> Request:
        return list(itertools.islice(self._ids, count))

    def length(self, mean: float) -> int:
        """Return a random length, which is at least 1 and exponentially distributed above that."""
        return 1 + int(self.random.expovariate(1 / mean))


def conversations(
    seed: int, count: int, pause: float, turns: float, first: float, growth: float, system: Sequence[int] = (1,)
) -> Iterator[Request]:
    """Chats of `turns` turns on average. Each turn is the whole chat so far, with new blocks at its end.

    `pause`: the median number of other chats' requests between two turns; it is log-normal, so some turns come much
    later. `first`: the median length of the first prompt. `growth`: the mean number of blocks that a turn adds.
    `system`: the lengths of the system prompts.
    """
    source = _Source(seed)
    chance = source.random
    prompts = [source.new(length) for length in system]
    waiting: list[tuple[float, int, Request]] = []  # a heap of chats, by the time of their next turn
    for now in range(count):
        if waiting and (waiting[0][0] <= now or chance.random() >= 1 / turns):
            chat = heapq.heappop(waiting)[2]
        else:
            chat = chance.choice(prompts) + source.new(1 + int(first * chance.lognormvariate(0, 1)))
        yield chat + source.new(1)
        if chance.random() < 1 - 1 / turns:
            heapq.heappush(
                waiting, (now + pause * chance.lognormvariate(0, 1), now, chat + source.new(source.length(growth)))
            )


def agents(seed: int, count: int, prompts: int = 30, skew: float = 1.2, shift_every: int = 0) -> Iterator[Request]:
    """Popular system prompts of 2 to 60 blocks, chosen by Zipf's law. Each request has a tail that occurs only once.

    `shift_every`: after this number of requests, the popularity of prompts is chosen again, and a fifth of the prompts
    are replaced.
    """
    source = _Source(seed)
    chance = source.random
    hot = [source.new(chance.randint(2, 60)) for _ in range(prompts)]
    weights = [1 / rank**skew for rank in range(1, prompts + 1)]
    for now in range(count):
        if shift_every and now and now % shift_every == 0:
            chance.shuffle(hot)
            hot[: prompts // 5] = [source.new(chance.randint(2, 60)) for _ in range(prompts // 5)]
        yield chance.choices(hot, weights)[0] + source.new(source.length(8))


def tool_loops(seed: int, count: int, at_once: int = 40) -> Iterator[Request]:
    """Agents that call tools. A task has up to 30 quick steps, each with a longer context. The steps of `at_once` tasks
    are interleaved."""
    source = _Source(seed)
    chance = source.random
    tools = [source.new(chance.randint(5, 30)) for _ in range(6)]
    tasks: list[tuple[Request, int]] = []
    for _ in range(count):
        if len(tasks) < at_once:
            tasks.append((chance.choice(tools) + source.new(chance.randint(1, 10)), chance.randint(1, 30)))
        at = chance.randrange(len(tasks))
        context, steps = tasks.pop(at)
        yield context + source.new(1)
        if steps > 1:
            tasks.insert(at, (context + source.new(chance.randint(1, 4)), steps - 1))


def scan(seed: int, count: int, documents: int = 600, length: int = 40) -> Iterator[Request]:
    """The same documents again and again in the same order, so that the next block needed is always the least recently
    used one."""
    source = _Source(seed)
    library = [source.new(length) for _ in range(documents)]
    for now in range(count):
        yield library[now % documents] + source.new(1)


def jobs(seed: int, count: int, at_once: int = 6) -> Iterator[Request]:
    """Batches of 5 to 80 questions about one document of 10 to 200 blocks. One document in five has been used
    before."""
    source = _Source(seed)
    chance = source.random
    seen: list[Request] = []
    running: list[tuple[Request, int]] = []
    for _ in range(count):
        if len(running) < at_once:
            again = seen and chance.random() < 0.2
            document = chance.choice(seen) if again else source.new(chance.randint(10, 200))
            seen.append(document)
            running.append((document, chance.randint(5, 80)))
        at = chance.randrange(len(running))
        document, questions = running.pop(at)
        yield document + source.new(chance.randint(1, 4))
        if questions > 1:
            running.insert(at, (document, questions - 1))


def documents(seed: int, count: int, library: int = 4000) -> Iterator[Request]:
    """Retrieval. Each request has a document of 3 to 30 blocks, chosen independently by Zipf's law, and a question."""
    source = _Source(seed)
    chance = source.random
    texts = [source.new(chance.randint(3, 30)) for _ in range(library)]
    totals = list(itertools.accumulate(1 / rank**0.9 for rank in range(1, library + 1)))
    for text in chance.choices(texts, cum_weights=totals, k=count):
        yield text + source.new(chance.randint(1, 6))


def new_only(seed: int, count: int) -> Iterator[Request]:
    """No block is requested twice."""
    source = _Source(seed)
    for _ in range(count):
        yield source.new(source.random.randint(2, 40))


def mixed(seed: int, *parts: Iterator[Request]) -> Iterator[Request]:
    """Return the requests of all parts, interleaved at random. Each part keeps its order."""
    requests = _apart(parts)
    order = [number for number, part in enumerate(requests) for _ in part]
    random.Random(seed).shuffle(order)
    heads = [iter(part) for part in requests]
    for number in order:
        yield next(heads[number])


def in_turn(*parts: Iterator[Request]) -> Iterator[Request]:
    """Return the parts one after another, so that the traffic changes permanently."""
    return itertools.chain.from_iterable(_apart(parts))


def _apart(parts: Sequence[Iterator[Request]]) -> list[list[Request]]:
    """Return the parts, with blocks renumbered so that no two parts have a block in common."""
    return [
        [[block * len(parts) + number for block in request] for request in part] for number, part in enumerate(parts)
    ]


def popular(seed: int, count: int, prompts: int, skew: float, length: tuple[int, int]) -> Iterator[Request]:
    """Whole prompts, chosen independently by Zipf's law with the exponent `skew`. Only the rare prompts are new."""
    source = _Source(seed)
    chance = source.random
    texts = [source.new(chance.randint(*length)) for _ in range(prompts)]
    totals = list(itertools.accumulate(1 / rank**skew for rank in range(1, prompts + 1)))
    yield from chance.choices(texts, cum_weights=totals, k=count)


def retrieval(seed: int, count: int, library: int = 300, most: int = 4) -> Iterator[Request]:
    """Prompts of a system prompt, some documents of a library (chosen by Zipf's law, in random order), and a question.

    A document's blocks depend on the tokens before them, so only prompts that begin with the same documents share them.
    """
    source = _Source(seed)
    chance = source.random
    system = source.new(6)
    lengths = [chance.randint(3, 25) for _ in range(library)]
    totals = list(itertools.accumulate(1 / rank for rank in range(1, library + 1)))
    placed: dict[tuple[int, ...], Request] = {}
    for _ in range(count):
        chosen: tuple[int, ...] = ()
        prompt = list(system)
        for number in dict.fromkeys(chance.choices(range(library), cum_weights=totals, k=chance.randint(1, most))):
            chosen = (*chosen, number)
            if chosen not in placed:
                placed[chosen] = source.new(lengths[number])
            prompt += placed[chosen]
        yield prompt + source.new(chance.randint(1, 4))


def bursts(seed: int, count: int) -> Iterator[Request]:
    """Few-shot jobs, one after another. A job has 20 to 300 short items, each after the same examples of 4 to 60
    blocks. Between the items there are chats of one turn with a common system prompt. A third of the jobs use the
    examples of an earlier job."""
    source = _Source(seed)
    chance = source.random
    system = source.new(4)
    known: list[Request] = []
    made = 0
    while made < count:
        if not known or chance.random() > 1 / 3:
            known.append(source.new(chance.randint(4, 60)))
            examples = known[-1]
        else:
            examples = chance.choice(known)
        for _ in range(min(count - made, chance.randint(20, 300))):
            made += 1
            if chance.random() < 0.3:
                yield system + source.new(source.length(10))
            else:
                yield examples + source.new(chance.randint(1, 3))


def daily(seed: int, count: int, day: int = 3000) -> Iterator[Request]:
    """Two services with separate prompts. Traffic moves from one service to the other and back once a day."""
    source = _Source(seed)
    chance = source.random
    services = [[source.new(chance.randint(4, 50)) for _ in range(60)] for _ in range(2)]
    weights = [1 / rank for rank in range(1, 61)]
    for now in range(count):
        share = 0.5 + 0.48 * math.sin(2 * math.pi * now / day)
        prompts = services[chance.random() < share]
        yield chance.choices(prompts, weights)[0] + source.new(source.length(6))


def books(seed: int, count: int, at_once: int = 25) -> Iterator[Request]:
    """Short questions of 1 to 3 blocks, most of which are asked often, mixed with sessions about very long documents. A
    document has 100 to 500 blocks, and a session has 1 to 10 questions."""
    source = _Source(seed)
    chance = source.random
    common = [source.new(chance.randint(1, 3)) for _ in range(400)]
    totals = list(itertools.accumulate(1 / rank for rank in range(1, 401)))
    sessions: list[tuple[Request, int]] = []
    for _ in range(count):
        if chance.random() < 0.8:
            yield chance.choices(common, cum_weights=totals)[0]
            continue
        if len(sessions) < at_once:
            sessions.append((source.new(chance.randint(100, 500)), chance.randint(1, 10)))
        at = chance.randrange(len(sessions))
        text, left = sessions.pop(at)
        text = text + source.new(chance.randint(1, 6))
        yield text
        if left > 1:
            sessions.insert(at, (text, left - 1))


def retries(seed: int, count: int) -> Iterator[Request]:
    """Prompts that are sent once, or once more a few requests later, and then never again. So only recent blocks are
    useful."""
    source = _Source(seed)
    chance = source.random
    system = source.new(3)
    recent: list[Request] = []
    for _ in range(count):
        if recent and chance.random() < 0.4:
            yield chance.choice(recent[-20:])
            continue
        recent.append(system + source.new(source.length(15)))
        yield recent[-1]


# Each function adds the given number to its seeds. Other numbers give other traces of the same kind.
SYNTHETIC: Final[dict[str, Callable[[int], Iterator[Request]]]] = {
    "conversations": lambda n: conversations(n + 1, 8000, pause=60, turns=6, first=8, growth=4),
    "slow-conversations": lambda n: conversations(n + 2, 10_000, pause=800, turns=4, first=12, growth=6),
    "long-conversations": lambda n: conversations(
        n + 3, 8000, pause=300, turns=15, first=10, growth=3, system=(3, 20, 1)
    ),
    "single-turns": lambda n: conversations(n + 4, 12_000, pause=400, turns=1.6, first=15, growth=8),
    "agents": lambda n: agents(n + 5, 10_000),
    "shifting-agents": lambda n: agents(n + 6, 10_000, prompts=40, skew=0.9, shift_every=1500),
    "tool-loops": lambda n: tool_loops(n + 7, 10_000),
    "scan": lambda n: scan(n + 8, 4000),
    "jobs": lambda n: jobs(n + 9, 6000),
    "documents": lambda n: documents(n + 10, 15_000),
    "new-only": lambda n: new_only(n + 11, 5000),
    "conversations-and-scan": lambda n: mixed(
        n + 12, conversations(n + 13, 6000, pause=200, turns=5, first=8, growth=4), scan(n + 14, 2500, 500, 30)
    ),
    "agents-and-conversations": lambda n: mixed(
        n + 15, agents(n + 16, 5000), conversations(n + 17, 5000, pause=150, turns=4, first=10, growth=5)
    ),
    "conversations-then-jobs": lambda n: in_turn(
        conversations(n + 18, 5000, pause=150, turns=5, first=8, growth=4), jobs(n + 19, 3000)
    ),
    "zipf-0.7": lambda n: popular(n + 20, 10_000, 3000, 0.7, (1, 40)),
    "zipf-1.0": lambda n: popular(n + 21, 10_000, 3000, 1.0, (1, 40)),
    "zipf-1.3": lambda n: popular(n + 22, 10_000, 3000, 1.3, (1, 40)),
    "retrieval": lambda n: retrieval(n + 23, 8000),
    "bursts": lambda n: bursts(n + 24, 12_000),
    "daily": lambda n: daily(n + 25, 12_000),
    "books": lambda n: books(n + 26, 8000),
    "retries": lambda n: retries(n + 27, 10_000),
    "agents-and-new": lambda n: mixed(n + 28, agents(n + 29, 6000, prompts=80, skew=0.8), new_only(n + 30, 6000)),
    "tool-loops-and-documents": lambda n: mixed(
        n + 31, tool_loops(n + 32, 5000, at_once=150), documents(n + 33, 6000, library=1500)
    ),
}


def make_trace(name: str, seed: int = 0) -> Trace:
    """Return the trace with this name in `SYNTHETIC`. With `seed` 0, it is the trace that the documents show."""
    return Trace.of(f"{name}, seed {seed}" if seed else name, SYNTHETIC[name](seed))
