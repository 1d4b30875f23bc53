"""Lookups of chunks in the background: which chunks the store holds. The scheduler never waits.

The framework asks for one key at a time, and again in every step until it gets an answer. So the keys of a step are
collected, and one question for all of them is sent at the end of the step. While that question is under way, the keys
of further steps are collected into the next question. All requests that ask for a key while its answer is fresh share
that answer. The answer is final for a request that has used it: the framework relies on a chunk whose load failed not
being promised to the same request again.

vLLM's `AsyncLookupManager` is not used because it asks request by request, has no deadline, and reports a chunk as
missing for as long as the first request that asked for it runs, even if the chunk has been stored meanwhile.
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

# An answer younger than this serves requests that have not asked for the key before.
VALID_S: Final = 1.0
# How long found chunks are pinned: longer than a load waits for its turn.
PIN_S: Final = 10.0
# Most keys that wait to be touched. Beyond that the oldest are dropped: a touch is only a hint to the store.
MOST_TOUCHES: Final = 1 << 16


class ChunkLookup:
    """The answer for one key. ``found``: whether the store has the key, None until known. The lookup thread sets it
    once; the scheduler sets it at the deadline, or when a load has shown that the chunk is missing."""

    __slots__ = ("asked_at", "found", "holders")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.found: bool | None = None
        self.holders = 0  # requests that have used this answer and still run


class ChunkLookups:
    """The lookups of one tier. Call every method from the scheduler's thread. No method blocks, except ``close``.

    guard: used by these lookups alone, since on a shared connection answers would wait behind blocks. Only the lookup
    thread waits for the store.
    """

    def __init__(self, guard: StoreGuard, *, timeout_s: float, counters: Counters) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._counters = counters
        self._latest: dict[bytes, ChunkLookup] = {}
        self._of_request: dict[str, dict[bytes, ChunkLookup]] = {}
        self._step: dict[bytes, ChunkLookup] = {}  # first asked for in this step
        self._step_touches: dict[bytes, None] = {}
        self._unheld: list[tuple[bytes, ChunkLookup]] = []  # not answered yet, and no request waits for them
        self._changed = threading.Condition()  # guards the attributes that follow
        self._unasked: dict[bytes, ChunkLookup] = {}
        self._untouched: dict[bytes, None] = {}
        self._sending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-tier-lookup", daemon=True)
        self._thread.start()

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Whether the store has the key. None: not known yet, ask again in a later step. After the deadline: False."""
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
        """Have the recency of keys refreshed in the store, at some later time."""
        self._step_touches.update(dict.fromkeys(keys))

    def end_step(self) -> None:
        """End the step: send the question for the keys that were asked in it."""
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
        """A load has shown that these keys are missing: answer so to this request and to new ones."""
        used = self._of_request.get(request_id, {})
        for key in keys:
            for answer in (used.get(key), self._latest.get(key)):
                if answer is not None:
                    answer.found = False

    def forget(self, request_id: str) -> None:
        """Forget a request that asks no more. Lookups under way are kept, for other requests to share."""
        for key, answer in self._of_request.pop(request_id, {}).items():
            answer.holders -= 1
            if not answer.holders and not self._drop(key, answer):
                self._unheld.append((key, answer))

    def distrust(self) -> None:
        """Answers so far serve no request that has not used them, and what waits to be asked or touched is not."""
        self._latest.clear()
        self._step_touches.clear()
        with self._changed:
            self._untouched.clear()

    @property
    def known(self) -> int:
        """How many keys have an answer, or a lookup under way, that can be shared."""
        return len(self._latest)

    @property
    def waiting(self) -> int:
        """How many keys wait to be asked for or touched, or are in the request under way."""
        with self._changed:
            return len(self._unasked) + len(self._untouched) + self._sending

    def close(self) -> None:
        """End the thread. Waits for a question under way, which ends when the guard is closed or by its deadline."""
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
        """Forget an answer that no request holds any more, unless it is not known yet: others may share it.
        -> False if that must be tried again later."""
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
                if not asked:  # requests wait for an answer, nobody waits for a touch
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
            present = self._guard.call(partial(_present, list(asked), left, PIN_S), None)
        hits = [False] * len(asked) if present is None else present.tolist()
        for answer, hit in zip(asked.values(), hits, strict=True):
            if answer.found is None:  # else the scheduler has set it: the deadline passed, or a load failed
                answer.found = hit


def _present(keys: Sequence[bytes], timeout_s: float, pin_s: float, client: Store) -> npt.NDArray[np.bool_]:
    return client.contains(keys, refresh=True, pin_s=pin_s, timeout_s=timeout_s)
