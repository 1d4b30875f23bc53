"""The blocks that this engine has promised to set, and those that it expects other engines to set.

A flight tracks the blocks of one prompt until they are in the store. An engine that will compute the blocks promises
them, and learns which of them are stored already or promised by other engines. It may wait for the promised ones
instead of computing them again (single flight). An engine to which a prompt is handed over expects its blocks: it waits
until another engine has promised them.

A promise is renewed until the flight ends. It ends early when this engine withdraws it, or when the engine's connection
is lost. For a client that waits for the promise, the blocks are then misses at once.

Threads: only the scheduler's thread calls a `Flights` object. Threads of that object send the requests to the store.
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
from kvstore_client.engine.store import Present, Store, StorePromise
from kvstore_client.results import Lookup

# How long a promise is valid if it is not renewed, and how often it is renewed. If a producer hangs but keeps its
# connection, other engines wait PROMISE_S for it.
PROMISE_S: Final = 30.0
RENEW_PROMISE_S: Final = 10.0
# The first and the longest pause between two checks of whether expected blocks were promised. The pause doubles.
FIRST_POLL_S: Final = 0.002
LAST_LOOK_S: Final = 0.05
# How long after its deadline a flight's result may still arrive. The threads may be busy with other flights, or wait
# for a store that has stalled.
FLIGHT_GRACE_S: Final = 0.25
# How much later the end of a prompt may be promised than the blocks before that end.
ENOUGH_S: Final = 0.01
# The most flights in progress. Blocks of further requests are neither promised nor expected.
MOST_FLIGHTS: Final = 1024
THREADS: Final = 2


@dataclass(eq=False)
class Flight:
    """The flight of one request. `coming`: how many leading blocks are in the store or promised by other engines. It is
    None until that is known."""

    keys: Sequence[bytes]
    deadline: float  # when `coming` must be known
    coming: int | None = None
    known_at: float = 0.0  # when `coming` became known, by `time.monotonic`
    ended: bool = False
    promises: list[StorePromise] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `promises` and `ended`
    enough: int = 0  # for expected blocks: when this many leading ones are coming, the wait for the rest is short
    seen: int = 0  # for expected blocks: how many leading ones were coming at the last check
    next_look: float = 0.0
    look_s: float = FIRST_POLL_S


class Flights:
    """The flights of one engine. `guards` has one entry for each distinct namespace of the ranks.

    Call every method from the scheduler's thread. No method except `close` blocks. If the store fails, it counts as a
    store without promises.
    """

    def __init__(self, guards: Sequence[StoreGuard], *, timeout_s: float, counters: Counters) -> None:
        """`timeout_s`: how long to wait for the answer to a promise, in seconds."""
        self._guards = guards
        self._timeout_s = timeout_s
        self._counters = counters
        self._closed = threading.Event()
        self._flights: dict[Flight, None] = {}
        self._news = threading.Event()  # wakes the thread that watches
        self._asked: SimpleQueue[Flight | None] = SimpleQueue()
        self._expected: dict[Flight, None] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def pending(self) -> int:
        """The number of flights in progress."""
        return len(self._flights)

    def promise(self, keys: Sequence[bytes]) -> Flight:
        """Promise the blocks that are neither set nor promised yet. The promise lasts until `end`. `poll` returns how
        many leading blocks are stored or promised by others."""
        flight = Flight(keys, time.monotonic() + self._timeout_s)
        if self._begin(flight):
            self._asked.put(flight)
        return flight

    def expect(self, keys: Sequence[bytes], enough: int, within_s: float) -> Flight:
        """Start to wait until all blocks are stored or promised, for at most `within_s` seconds. `poll` returns the
        result. `enough`: when this many leading blocks are stored or promised, the wait ends soon, because an engine
        promises the rest together with them or never."""
        flight = Flight(keys, time.monotonic() + within_s, enough=enough)
        if self._begin(flight):
            with self._lock:
                self._expected[flight] = None
            self._news.set()
        return flight

    def poll(self, flight: Flight) -> int | None:
        """Return `flight.coming`, or None while it is not known. It is known `FLIGHT_GRACE_S` after the flight's
        deadline at the latest."""
        if flight.coming is None and time.monotonic() >= flight.deadline + FLIGHT_GRACE_S:
            flight.coming = flight.seen
        return flight.coming

    def end(self, flight: Flight) -> None:
        """Withdraw the promised blocks that are not set."""
        flight.ended = True  # set before the flight is queued, so that the thread that takes it withdraws
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
        """Promise the blocks in all namespaces, the first one first. The answer for the first namespace decides which
        engine computes a block. Otherwise, if two engines ask at the same time, each could get the blocks of some
        ranks."""
        others: Present | None = None
        coming: Present = np.zeros(len(flight.keys), dtype=np.bool_)
        for guard in self._guards:
            asked = np.arange(len(flight.keys)) if others is None else np.flatnonzero(~others)
            keys = [flight.keys[at] for at in asked.tolist()]

            def ask(store: Store, keys: Sequence[bytes] = keys) -> StorePromise:
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
        """Check the expected blocks, and renew the promises."""
        renewed = time.monotonic()
        while not self._closed.is_set():
            now = time.monotonic()
            with self._lock:
                due = [flight for flight in self._expected if flight.next_look <= now]
            for flight in due:
                self._look(flight)
            if now - renewed > RENEW_PROMISE_S:
                renewed = now
                self._renew()
            with self._lock:
                looks = [flight.next_look for flight in self._expected]
                self._news.clear()
            self._news.wait(max(0.0, min([renewed + RENEW_PROMISE_S, *looks]) - time.monotonic()))

    def _look(self, flight: Flight) -> None:
        coming = len(flight.keys)
        for guard in self._guards:
            timeout_s = min(self._timeout_s, max(FLIGHT_GRACE_S, flight.deadline - time.monotonic()))

            def ask(store: Store, timeout_s: float = timeout_s) -> Lookup:
                return store.lookup(flight.keys, timeout_s=timeout_s)

            found = guard.call(ask, None)
            coming = min(coming, found.promised if found is not None else 0)
        now, flight.seen = time.monotonic(), coming
        if flight.enough <= coming < len(flight.keys):  # promises for the rest may be on their way to other shards
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
