"""How much of a chain of keys the store holds, asked in the background of a scheduler that must not wait.

A block counts when every rank's namespace has it, so each question goes to all of them at once. What an answer told
is kept for a second and shared: of many requests with one prefix the first asks for it, the others wait for that
answer and ask for their own rest only. Found blocks are pinned on the server until they can have been read.

One thread, the scheduler's, uses a `PrefixLookups`; questions wait on threads of its own and come back through a queue
that every poll empties.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

from kvstore_client.client import KVStoreClient
from kvstore_client.engine.guard import Counters, StoreGuard

# An answer is this good, both for a request that waits for room and for others with the same prefix.
FOUND_VALID_S: Final = 1.0
# That a block is missing is soon wrong: somebody may be computing it.
MISSING_VALID_S: Final = 0.1
# What was found stays until it has been read: longer than an answer is valid, and than a load waits for its turn.
PIN_S: Final = 10.0
# More questions than this on their way: the store does not keep up, further ones would come back too late.
MOST_QUESTIONS: Final = 256
# Two a rank: while one prepares a question, the other waits for an answer.
MOST_THREADS: Final = 16


@dataclass
class PrefixLookup:
    """A request's question. ``stored``: leading blocks of ``keys`` in the store, None until it is known; at least so
    many if it is not ``certain``, because the store did not say more in time."""

    keys: Sequence[bytes]
    deadline: float
    stored: int | None = None
    certain: bool = True
    asked_at: float = 0.0
    known: int = 0  # leading blocks found so far


@dataclass
class _Question:
    keys: Sequence[bytes]
    unanswered: int  # ranks
    length: int  # leading keys that all ranks have, of those that answered
    certain: bool = True  # every rank did


class PrefixLookups:
    """The lookups of one engine. ``guards``: one for each distinct rank's namespace."""

    def __init__(self, guards: Sequence[StoreGuard], *, timeout_s: float, counters: Counters) -> None:
        self._guards = guards
        self._timeout_s = timeout_s
        self._counters = counters
        self._closed = False
        self._answers: deque[tuple[_Question, int, bool]] = deque()  # length, and whether it is certain
        self._questions: dict[bytes, _Question] = {}  # by their first key
        # key -> (until when it is believed, whether it is in the store or None: it could not say)
        self._facts: dict[bytes, tuple[float, bool | None]] = {}
        self._expiring: deque[tuple[float, Sequence[bytes]]] = deque()
        # A queue whose put neither blocks nor gives the interpreter away: the scheduler has better to do.
        self._asked: SimpleQueue[tuple[StoreGuard, _Question] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-lookup-{number}", daemon=True)
            for number in range(min(MOST_THREADS, 2 * len(guards)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Questions on their way."""
        return len(self._questions)

    def ask(self, keys: Sequence[bytes]) -> PrefixLookup:
        """Begin to find out. `poll` tells when it is known; already now, if it is known from others."""
        now = time.monotonic()
        lookup = PrefixLookup(keys, now + self._timeout_s, asked_at=now)
        self._counters.add("lookups")
        self.poll(lookup)
        return lookup

    def poll(self, lookup: PrefixLookup) -> int | None:
        """``lookup.stored`` as far as it is known now. Never blocks; from the deadline on it is what was found."""
        if lookup.stored is not None:
            return lookup.stored
        now = time.monotonic()
        self._take_answers(now)
        while lookup.known < len(lookup.keys):
            fact = self._facts.get(lookup.keys[lookup.known])
            if fact is None or fact[0] < now:
                break
            if not fact[1]:
                lookup.stored, lookup.certain = lookup.known, fact[1] is not None
                return lookup.stored
            lookup.known += 1
        else:
            lookup.stored = lookup.known
            return lookup.stored
        if now >= lookup.deadline:
            self._counters.add("lookup_timeouts")
            lookup.stored, lookup.certain = lookup.known, False
        elif lookup.keys[lookup.known] not in self._questions:
            if len(self._questions) >= MOST_QUESTIONS:
                self._counters.add("skipped_lookups")
                lookup.stored, lookup.certain = lookup.known, False
            else:
                self._send(lookup.keys[lookup.known :])
        return lookup.stored

    def forget(self) -> None:
        """Believe nothing any more: a read has shown that what was found is not there."""
        self._facts.clear()
        self._expiring.clear()

    def close(self) -> None:
        """Questions on their way end by their deadlines, unheard."""
        self._closed = True
        for _ in self._threads:
            self._asked.put(None)

    def _send(self, keys: Sequence[bytes]) -> None:
        question = _Question(keys, len(self._guards), len(keys))
        self._questions[keys[0]] = question
        for guard in self._guards:
            self._asked.put((guard, question))

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None and not self._closed:
            guard, question = asked
            answer = guard.call(partial(_match_prefix, question.keys, self._timeout_s), (0, False))
            self._answers.append((question, *answer))

    def _take_answers(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] < now:
            for key in self._expiring.popleft()[1]:
                if (fact := self._facts.get(key)) is not None and fact[0] < now:
                    del self._facts[key]
        while self._answers:
            question, length, certain = self._answers.popleft()
            question.length = min(question.length, length)
            question.certain &= certain
            question.unanswered -= 1
            if question.unanswered:
                continue
            del self._questions[question.keys[0]]
            found = question.keys[: question.length]
            for key in found:
                self._facts[key] = (now + FOUND_VALID_S, True)
            for key in question.keys[question.length : question.length + 1]:
                self._facts[key] = (now + MISSING_VALID_S, False if question.certain else None)
            self._expiring.append((now + FOUND_VALID_S, question.keys[: question.length + 1]))


def _match_prefix(keys: Sequence[bytes], timeout_s: float, client: KVStoreClient) -> tuple[int, bool]:
    """The length, and whether nothing more is there: every shard that was asked answered."""
    before = client.stats.unanswered
    length = client.match_prefix(keys, refresh=True, pin_s=PIN_S, timeout_s=timeout_s)
    return length, client.stats.unanswered == before
