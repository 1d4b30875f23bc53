"""Prefixes on their way: what this engine has promised to set, and what it expects others to set.

A flight is the way of one prompt's blocks into the store. An engine that will compute them promises them, and learns
which of them are there or promised by others: those it may wait for, instead of computing them again (single flight).
An engine to which a prompt is handed over expects its blocks: it waits until another one has promised them.

A promise is renewed until the flight ends. It ends early, and who waits misses at once, when this engine withdraws it,
or is gone: the store ends the promises of a lost connection.

Threads: only the scheduler's thread calls a `Flights`, and no call blocks. Threads of its own ask the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.store import Present, Promised, Store
from kvstore_client.results import Lookup

# How long a promise holds if nobody renews it, and how often it is renewed. A producer that hangs, but keeps its
# connection, is waited for so long.
PROMISE_S: Final = 30.0
RENEW_S: Final = 10.0
# How often the store is asked whether expected blocks were promised: at first, and at most. The time doubles.
FIRST_LOOK_S: Final = 0.002
LAST_LOOK_S: Final = 0.05
# How much later than its deadline a flight may become known: its threads may ask for others, or wait for a store that
# stands still.
LATE_S: Final = 0.25
# How long the end of a prompt may be promised later than all before it.
ENOUGH_S: Final = 0.01
# Most flights under way. With more, the engine has more requests than it could wait for.
MOST_FLIGHTS: Final = 1024
THREADS: Final = 2


@dataclass(eq=False)
class Flight:
    """Of one request. coming: how many leading blocks are in the store, or are promised by others; None until known."""

    keys: Sequence[bytes]
    deadline: float  # until when it may stay unknown
    coming: int | None = None
    known_at: float = 0.0  # when that became known, by `time.monotonic`
    ended: bool = False
    promises: list[Promised] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the promises and `ended`
    enough: int = 0  # of an expected one: leading blocks that need not be followed by the others
    seen: int = 0  # of an expected one: leading blocks that were coming at the last look
    next_look: float = 0.0
    look_s: float = FIRST_LOOK_S


class Flights:
    """The flights of one engine. ``guards``: one for each distinct namespace of the ranks.

    Call every method from the scheduler's thread. No method blocks, but for `close`. A store that fails counts as a
    store in which nobody has promised anything.
    """

    def __init__(self, guards: Sequence[StoreGuard], *, timeout_s: float, counters: Counters) -> None:
        """timeout_s: how long the answer to a promise is waited for."""
        self._guards = guards
        self._timeout_s = timeout_s
        self._counters = counters
        self._closed = threading.Event()
        self._flights: dict[Flight, None] = {}
        self._news = threading.Event()  # wakes the thread that looks
        self._asked: SimpleQueue[Flight | None] = SimpleQueue()
        self._expected: dict[Flight, None] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def pending(self) -> int:
        """Flights under way."""
        return len(self._flights)

    def promise(self, keys: Sequence[bytes]) -> Flight:
        """Promise what nobody has set or promised; `poll` tells what others have. Until `end`."""
        flight = Flight(keys, time.monotonic() + self._timeout_s)
        if self._begin(flight):
            self._asked.put(flight)
        return flight

    def expect(self, keys: Sequence[bytes], enough: int, within_s: float) -> Flight:
        """Wait until all keys are there or promised, for `within_s` at most; `poll` tells when. enough: once so many
        leading ones are, the others are not waited for: they are promised with them, or never."""
        flight = Flight(keys, time.monotonic() + within_s, enough=enough)
        if self._begin(flight):
            with self._lock:
                self._expected[flight] = None
            self._news.set()
        return flight

    def poll(self, flight: Flight) -> int | None:
        """-> `flight.coming`; None while it is not known, until `LATE_S` after its deadline."""
        if flight.coming is None and time.monotonic() >= flight.deadline + LATE_S:
            flight.coming = flight.seen
        return flight.coming

    def end(self, flight: Flight) -> None:
        """What was promised and not set will not be."""
        flight.ended = True  # before it is put: who takes it withdraws
        if flight in self._flights:
            del self._flights[flight]
            self._asked.put(flight)
        with self._lock:
            self._expected.pop(flight, None)

    def close(self) -> None:
        """Withdraw all promises."""
        self._closed.set()
        self._news.set()
        for flight in list(self._flights):
            self.end(flight)
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _begin(self, flight: Flight) -> bool:
        if len(self._flights) >= MOST_FLIGHTS or not flight.keys or self._closed.is_set():
            flight.coming = 0
            return False
        self._flights[flight] = None
        if not self._threads:  # most engines need none
            self._threads = [
                *(threading.Thread(target=self._run, name=f"kvstore-promise-{n}", daemon=True) for n in range(THREADS)),
                threading.Thread(target=self._watch, name="kvstore-expect", daemon=True),
            ]
            for thread in self._threads:
                thread.start()
        return True

    # ---- its threads ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (flight := self._asked.get()) is not None:
            with flight.lock:
                try:
                    if not flight.ended:
                        flight.coming = self._promise(flight)
                        flight.known_at = time.monotonic()
                    else:
                        while flight.promises:
                            flight.promises.pop().withdraw()
                except Exception as error:
                    self._guards[0].failed(error)
                    flight.coming = flight.coming or 0

    def _promise(self, flight: Flight) -> int:
        """The first namespace decides who computes a block: engines that ask at once must not each have some ranks."""
        others: Present | None = None
        coming: Present = np.zeros(len(flight.keys), dtype=np.bool_)
        for guard in self._guards:
            asked = np.arange(len(flight.keys)) if others is None else np.flatnonzero(~others)
            keys = [flight.keys[at] for at in asked.tolist()]

            def ask(store: Store, keys: Sequence[bytes] = keys) -> Promised:
                return store.promise(keys, ttl_s=PROMISE_S, timeout_s=self._timeout_s)

            if not keys or (promised := guard.call(ask, None)) is None:
                return 0
            flight.promises.append(promised)
            if others is None:
                others, coming = promised.others, promised.present | promised.others
            else:
                coming[asked] &= promised.present
        return _leading(coming)

    def _watch(self) -> None:
        """Look for what is expected, and renew what is promised."""
        renewed = time.monotonic()
        while not self._closed.is_set():
            now = time.monotonic()
            with self._lock:
                due = [flight for flight in self._expected if flight.next_look <= now]
            for flight in due:
                self._look(flight)
            if now - renewed > RENEW_S:
                renewed = now
                self._renew()
            with self._lock:
                looks = [flight.next_look for flight in self._expected]
                self._news.clear()
            self._news.wait(max(0.0, min([renewed + RENEW_S, *looks]) - time.monotonic()))

    def _look(self, flight: Flight) -> None:
        coming = len(flight.keys)
        for guard in self._guards:
            timeout_s = min(self._timeout_s, max(LATE_S, flight.deadline - time.monotonic()))

            def ask(store: Store, timeout_s: float = timeout_s) -> Lookup:
                return store.lookup(flight.keys, timeout_s=timeout_s)

            found = guard.call(ask, None)
            coming = min(coming, found.promised if found is not None else 0)
        now, flight.seen = time.monotonic(), coming
        if flight.enough <= coming < len(flight.keys):  # it was looked at while the rest was on its way to other shards
            flight.deadline, flight.enough = min(flight.deadline, now + ENOUGH_S), len(flight.keys)
        if coming == len(flight.keys) or now >= flight.deadline:
            if not coming:
                self._counters.add("unpromised_requests")
            flight.known_at = now
            flight.coming = coming
            with self._lock:
                self._expected.pop(flight, None)
        flight.next_look, flight.look_s = now + flight.look_s, min(LAST_LOOK_S, 2 * flight.look_s)

    def _renew(self) -> None:
        for flight in list(self._flights):
            with flight.lock:
                for promise in () if flight.ended else flight.promises:
                    try:
                        promise.renew()
                    except Exception as error:
                        self._guards[0].failed(error)


def _leading(flags: Present) -> int:
    return len(flags) if flags.all() else int(flags.argmin())
