"""Looks up in the background which chunks the store holds. The scheduler never waits.

The framework asks for one key at a time, and repeats this in every step until it gets an answer. So the keys of a step
are collected, and one lookup of all of them is sent at the end of the step. While that lookup is in progress, the keys
of further steps are collected for the next lookup. All requests that ask for a key while its answer is fresh share that
answer. An answer does not change any more for a request that has used it. In particular, the framework requires that a
chunk whose load failed is not reported as present to the same request again.

vLLM's `AsyncLookupManager` is not used, because it sends a lookup for each request and has no deadline. It also reports
a missing chunk as missing until the first request that asked for it ends, even if the chunk has been stored meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.store import Store

# Only answers younger than this are given to requests that have not asked for the key before.
VALID_S: Final = 1.0
# How long found chunks are pinned, which is longer than a load waits before it starts.
CHUNK_PIN_S: Final = 10.0
# The largest number of keys that wait to be touched. If there are more, the oldest are dropped, because a touch is only
# a hint.
MOST_TOUCHES: Final = 1 << 16


class ChunkLookup:
    """The answer for one key. ``found``: whether the store has the key, or None until that is known. The lookup thread
    sets it once. The scheduler sets it at the deadline, or when a load has shown that the chunk is missing."""

    __slots__ = ("asked_at", "found", "holders")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.found: bool | None = None
        self.holders = 0  # how many requests have used this answer and still run


class ChunkLookups:
    """The lookups of one tier. Call every method from the scheduler's thread. No method except ``close`` blocks, as
    only the lookup thread waits for the store.

    guard: a guard that only these lookups use, because on a shared connection, answers would wait behind blocks.
    """

    def __init__(self, guard: StoreGuard, *, timeout_s: float, counters: Counters) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._counters = counters
        self._latest: dict[bytes, ChunkLookup] = {}
        self._of_request: dict[str, dict[bytes, ChunkLookup]] = {}
        self._step: dict[bytes, ChunkLookup] = {}  # keys that were first asked for in this step
        self._step_touches: dict[bytes, None] = {}
        self._unheld: list[tuple[bytes, ChunkLookup]] = []  # unanswered lookups for which no request waits
        self._changed = threading.Condition()  # guards the attributes that follow
        self._unasked: dict[bytes, ChunkLookup] = {}
        self._untouched: dict[bytes, None] = {}
        self._sending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-tier-lookup", daemon=True)
        self._thread.start()

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Return whether the store has the key; after the deadline, return False. Return None if the answer is not
        known yet. The caller then asks again in a later step."""
        used = self._of_request.setdefault(request_id, {})
        answer = used.get(key)
        if answer is None:
            answer = used[key] = self._ask(key)
            answer.holders += 1
        if answer.found is None and time.monotonic() - answer.asked_at > self._timeout_s:
            answer.found = False
            self._counters.add("lookup_timeouts")
        return answer.found

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make the store count a use of these keys, at some later time."""
        self._step_touches.update(dict.fromkeys(keys))

    def end_step(self) -> None:
        """End the step, and send one lookup of the keys that were asked for in it."""
        self._unheld = [(key, answer) for key, answer in self._unheld if not self._drop(key, answer)]
        if not self._step and not self._step_touches:
            return
        with self._changed:
            self._unasked.update(self._step)
            self._untouched.update(self._step_touches)
            surplus = max(0, len(self._untouched) - MOST_TOUCHES)
            for key in list(itertools.islice(self._untouched, surplus)):
                del self._untouched[key]
            self._changed.notify()
        self._step, self._step_touches = {}, {}

    def deny(self, keys: Iterable[bytes], request_id: str) -> None:
        """From now on, report these keys as missing to this request and to new ones, because a load has shown that they
        are missing."""
        used = self._of_request.get(request_id, {})
        for key in keys:
            for answer in (used.get(key), self._latest.get(key)):
                if answer is not None:
                    answer.found = False

    def forget(self, request_id: str) -> None:
        """Forget a request that will not ask any more. Lookups in progress are kept, so that other requests can share
        them."""
        for key, answer in self._of_request.pop(request_id, {}).items():
            answer.holders -= 1
            if not answer.holders and not self._drop(key, answer):
                self._unheld.append((key, answer))

    def distrust(self) -> None:
        """Stop giving the present answers to further requests, and drop the touches that wait."""
        self._latest.clear()
        self._step_touches.clear()
        with self._changed:
            self._untouched.clear()

    @property
    def known(self) -> int:
        """The number of keys whose answer, or whose lookup in progress, can be shared by requests."""
        return len(self._latest)

    @property
    def waiting(self) -> int:
        """The number of keys that wait to be looked up or touched, or that are in the request in progress."""
        with self._changed:
            return len(self._unasked) + len(self._untouched) + self._sending

    def close(self) -> None:
        """End the thread. This waits for a lookup in progress, which ends at its deadline or if the guard is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self._timeout_s)

    def _ask(self, key: bytes) -> ChunkLookup:
        now = time.monotonic()
        latest = self._latest.get(key)
        if latest is not None and (latest.found is None or now - latest.asked_at < VALID_S):
            return latest
        self._latest[key] = self._step[key] = answer = ChunkLookup(now)
        return answer

    def _drop(self, key: bytes, answer: ChunkLookup) -> bool:
        """Forget an answer that no request uses any more. If the answer is not known yet, keep it for other requests to
        share, and return False: the caller then tries again later."""
        if answer.found is None and not answer.holders:
            return False
        if not answer.holders and self._latest.get(key) is answer:
            del self._latest[key]
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unasked or self._untouched or self._closed)
                if self._closed:
                    return
                asked, self._unasked = self._unasked, {}
                touched: dict[bytes, None] = {}
                if not asked:  # lookups come first, because requests wait for them but not for touches
                    touched, self._untouched = self._untouched, {}
                self._sending = len(asked) + len(touched)
            if asked:
                self._answer(asked)
            else:
                self._guard.call(partial(_present, list(touched), self._timeout_s, 0.0), None)
            with self._changed:
                self._sending = 0

    def _answer(self, asked: dict[bytes, ChunkLookup]) -> None:
        left = min(answer.asked_at for answer in asked.values()) + self._timeout_s - time.monotonic()
        present = None
        if left > 0:
            self._counters.add("lookups")
            present = self._guard.call(partial(_present, list(asked), left, CHUNK_PIN_S), None)
        hits = [False] * len(asked) if present is None else present.tolist()
        for answer, hit in zip(asked.values(), hits, strict=True):
            if answer.found is None:  # otherwise the scheduler set it at the deadline or after a failed load
                answer.found = hit


def _present(keys: Sequence[bytes], timeout_s: float, pin_s: float, client: Store) -> npt.NDArray[np.bool_]:
    return client.contains(keys, refresh=True, pin_s=pin_s, timeout_s=timeout_s)
