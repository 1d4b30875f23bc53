"""Looks up in the background how many leading blocks of a chain the store has. The scheduler never waits.

A block counts as stored only if every rank's namespace has it, so each question goes to all namespaces at once. An
answer is kept for a second and shared. If many requests have the same prefix, only the first request asks for it. The
others wait for that answer and then ask only for the keys after the prefix. Blocks that were found are pinned on the
server for `LOOKUP_PIN_S`, so that they are still there when they are read.

For a model with states, a block may be stored without the states at its end. The answer then also says after which
blocks the states are stored.

Threads: only the scheduler's thread calls a `PrefixLookups` object. Threads of that object ask the store and wait for
it. They append the answers to a deque, which every poll empties.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from kvstore_client.engine.chain_keys import key_list
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.slices import GroupSlices, SlicedStore
from kvstore_client.engine.store import Store
from kvstore_client.keys import KeyArray

# How long the answer "found" is valid, both for a request that waits for room and for others with the same prefix.
FOUND_VALID_S: Final = 1.0
# How long the answer "missing" is valid. This is short, because another request may be computing the block.
MISSING_VALID_S: Final = 0.1
# How long found blocks are pinned. This is longer than an answer is valid, and longer than a load waits before it
# begins.
LOOKUP_PIN_S: Final = 10.0
# The most questions in progress. Further lookups wait in line, so that each question is answered soon after it is
# asked.
MOST_QUESTIONS: Final = 256
# There are two threads per rank, but at most this many in total. While one prepares a question, the other waits for an
# answer.
MOST_THREADS: Final = 16


@dataclass
class PrefixLookup:
    """The lookup of one request.

    * `keys`: The chain of the request, head first.
    * `asked_at`: When its last question was asked, or when the request came if none was asked yet. The clock is
      `time.monotonic`.
    * `stored`: How many leading blocks the store has. It is None until that is known.
    * `certain`: False if the store did not answer in full in time, so that it may have more than `stored`.
    * `known`: How many leading blocks have been found by now.
    * `states`: Each entry is a number of leading blocks, among those found, after which the store has the states.
    * `question`: The question in progress whose answer it needs. Another request may have asked it.
    """

    keys: Sequence[bytes]
    asked_at: float
    stored: int | None = None
    certain: bool = True
    known: int = 0  # leading blocks found so far
    states: list[int] = field(default_factory=list)
    question: _Question | None = None  # in progress; perhaps another request asked it


@dataclass
class _Question:
    keys: Sequence[bytes]
    asked_at: float
    unanswered: int  # namespaces without an answer yet
    length: int  # leading keys that every namespace with an answer has
    states: set[int]  # the indices of those keys whose states all these namespaces have
    certain: bool = True  # whether every shard answered for these namespaces
    answered_at: float = math.inf  # when the first answer came
    lookups: list[PrefixLookup] = field(default_factory=list)  # the lookups that wait for the answer


class _Answer(NamedTuple):
    """The length of the stored prefix, the indices of its keys whose states are stored, and whether every shard
    answered, so that this is certain."""

    length: int
    states: set[int]
    certain: bool


class _Fact(NamedTuple):
    """The store's answer about one block."""

    valid_until: float
    there: bool | None  # None: the store did not answer in full
    state: bool = False  # whether the states at its end are stored


class PrefixLookups:
    """The lookups of one engine.

    Call every method from the scheduler's thread. No method blocks. If the store fails, it counts as a store that has
    nothing, and the lookup is then not `certain`.
    """

    def __init__(
        self, guards: Sequence[StoreGuard], *, timeout_s: float, counters: Counters, groups: GroupSlices | None = None
    ) -> None:
        """Start the threads.

        * `guards`: One for each distinct namespace of the ranks.
        * `timeout_s`: The deadline of a question, in seconds.
        * `counters`: Where lookups are counted.
        * `groups`: The groups of a model with states, if the guards do not add them to the keys. If it is None, each
          key stands for a whole block.
        """
        self._guards = guards
        self._groups = groups
        self._timeout_s = timeout_s
        self._counters = counters
        self._closed = False
        self._answers: deque[tuple[_Question, _Answer, float]] = deque()  # with the time of each answer
        self._questions: dict[bytes, _Question] = {}  # in progress, by first key, the oldest first
        self._line: deque[PrefixLookup] = deque()  # lookups that wait until fewer questions are in progress
        self._facts: dict[bytes, _Fact] = {}
        self._expiring: deque[tuple[float, Sequence[bytes]]] = deque()
        # SimpleQueue: its put neither blocks nor releases the GIL, so it costs the scheduler next to nothing.
        self._asked: SimpleQueue[tuple[StoreGuard, _Question] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-lookup-{number}", daemon=True)
            for number in range(min(MOST_THREADS, 2 * len(guards)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """The number of questions in progress."""
        return len(self._questions)

    def ask(self, keys: Sequence[bytes] | KeyArray) -> PrefixLookup:
        """Start a lookup, whose result `poll` returns. The result is known at once if other requests have asked for the
        keys.

        * `keys`: The chain to look up, head first. The rows of an array, such as that of `Namespace.keys`, become
            `bytes`.

        Raises TypeError for keys of another type.
        """
        now = time.monotonic()
        lookup = PrefixLookup(key_list(keys), now)
        self._counters.add("lookups")
        self._take_answers(now)
        self._go_on(lookup, now)
        return lookup

    def poll(self, lookup: PrefixLookup) -> int | None:
        """Return `lookup.stored`, or None while it is not known. Never blocks.

        If the question is not answered in time, the blocks found so far are the result. A lookup that waits in line is
        given up when the oldest question is overdue.
        """
        if lookup.stored is not None:
            return lookup.stored
        now = time.monotonic()
        self._take_answers(now)
        if lookup.stored is None:
            # The question may be older than the lookup, because another request asked it.
            asked_at = lookup.asked_at if lookup.question else next(iter(self._questions.values())).asked_at
            if now >= asked_at + self._timeout_s:
                self._counters.add("lookup_timeouts" if lookup.question else "skipped_lookups")
                self.give_up(lookup)
        return lookup.stored

    def give_up(self, lookup: PrefixLookup) -> None:
        """End a lookup. Its result is the blocks found so far, and the store is not asked about the rest."""
        if lookup.stored is None:
            lookup.stored, lookup.certain = lookup.known, False

    def came(self, key: bytes) -> None:
        """Note that the store now has this block or the states at its end. An earlier answer that said that the block
        or the states are missing is no longer valid."""
        fact = self._facts.get(key)
        if fact is not None and not (fact.there and (fact.state or self._groups is None)):
            del self._facts[key]

    def forget(self) -> None:
        """Ignore all earlier answers in new lookups, because a read has shown that a block that was found is not
        there."""
        self._facts.clear()
        self._expiring.clear()

    def close(self) -> None:
        """End the threads. Questions in progress end by their deadlines; their answers are ignored."""
        self._closed = True
        for _ in self._threads:
            self._asked.put(None)

    def _go_on(self, lookup: PrefixLookup, now: float, known_at: float | None = None) -> None:
        """Use the facts that are known. Then wait for a question in progress, ask a new one, or wait in line.

        * `known_at`: The arrival time of the answer for which the lookup has waited. That answer counts, however old it
            is.
        """
        while lookup.known < len(lookup.keys):
            fact = self._facts.get(lookup.keys[lookup.known])
            if fact is None or fact.valid_until < (now if known_at is None else known_at):
                break
            if not fact.there:
                lookup.stored, lookup.certain = lookup.known, fact.there is not None
                return
            lookup.known += 1
            if fact.state:
                lookup.states.append(lookup.known)
        else:
            lookup.stored = lookup.known
            return
        question = self._questions.get(lookup.keys[lookup.known])
        if question is None:
            if len(self._questions) >= MOST_QUESTIONS:
                self._line.append(lookup)
                return
            question = self._send(lookup.keys[lookup.known :], now)
        question.lookups.append(lookup)
        lookup.question, lookup.asked_at = question, now

    def _send(self, keys: Sequence[bytes], now: float) -> _Question:
        states = set(range(len(keys))) if self._groups is not None else set()
        question = _Question(keys, now, len(self._guards), len(keys), states)
        self._questions[keys[0]] = question
        for guard in self._guards:
            self._asked.put((guard, question))
        return question

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None and not self._closed:
            guard, question = asked
            ask = partial(_match_prefix, question.keys, self._timeout_s, self._groups)
            answer = guard.call(ask, _Answer(0, set(), False))
            self._answers.append((question, answer, time.monotonic()))

    def _take_answers(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] < now:
            for key in self._expiring.popleft()[1]:
                if (fact := self._facts.get(key)) is not None and fact.valid_until < now:
                    del self._facts[key]
        while self._answers:
            question, answer, answered_at = self._answers.popleft()
            question.length = min(question.length, answer.length)
            question.states &= answer.states
            question.certain &= answer.certain
            question.answered_at = min(question.answered_at, answered_at)
            question.unanswered -= 1
            if question.unanswered:
                continue
            del self._questions[question.keys[0]]
            # Use the time when the answer came, because an idle engine takes it with its next request, perhaps much
            # later.
            known_at = question.answered_at
            found = question.keys[: question.length]
            for index, key in enumerate(found):
                self._facts[key] = _Fact(known_at + FOUND_VALID_S, True, index in question.states)
            for key in question.keys[question.length : question.length + 1]:
                self._facts[key] = _Fact(known_at + MISSING_VALID_S, False if question.certain else None)
            self._expiring.append((known_at + FOUND_VALID_S, question.keys[: question.length + 1]))
            for lookup in question.lookups:
                lookup.question = None
                if lookup.stored is None:
                    self._go_on(lookup, now, known_at)
        while self._line and len(self._questions) < MOST_QUESTIONS:
            if (lookup := self._line.popleft()).stored is None:
                self._go_on(lookup, now)


def _match_prefix(keys: Sequence[bytes], timeout_s: float, groups: GroupSlices | None, client: Store) -> _Answer:
    before = client.stats.unanswered
    if groups is None:
        length = client.match_prefix(keys, refresh=True, pin_s=LOOKUP_PIN_S, timeout_s=timeout_s)
        return _Answer(length, set(), client.stats.unanswered == before)
    length = len(keys)
    if groups.tables:
        tables = SlicedStore(client, groups.tables)
        length = tables.match_prefix(keys, refresh=True, pin_s=LOOKUP_PIN_S, timeout_s=timeout_s)
    found: set[int] = set()
    if length:
        states = client if len(groups.tables) + len(groups.states) == 1 else SlicedStore(client, groups.states)
        there = states.contains(keys[:length], refresh=True, pin_s=LOOKUP_PIN_S, timeout_s=timeout_s)
        found.update(np.flatnonzero(there).tolist())
    return _Answer(length, found, client.stats.unanswered == before)
