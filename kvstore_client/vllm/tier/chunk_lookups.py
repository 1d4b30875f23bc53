"""Which chunks the store holds, asked in the background of a scheduler that must not wait.

The framework asks key by key, and again in every step until it is told. So keys are collected during a step and one
question for all of them leaves at its end; while it is on its way, what further steps ask is collected into the next.
An answer is shared by all requests that ask for the key while it is fresh, and it is final for a request that has
used it: the framework relies on a load that failed not being promised again to the same request.

vLLM's `AsyncLookupManager` is not used because it asks request by request, has no deadline, and keeps telling that a
chunk is missing for as long as the first request that asked for it runs, whatever was stored meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore_client import KVStoreClient

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvstore_client.engine.guard import Counters, StoreGuard

# An answer younger than this serves requests that have not asked for the key before.
VALID_S: Final = 1.0
# What was found stays until it has been read: longer than a load waits for its turn.
PIN_S: Final = 10.0
# Keys that wait to be touched at most; the oldest are dropped, touching them is only advice.
MOST_TOUCHES: Final = 1 << 16


class ChunkLookup:
    """Whether the store has a key: None until it is known. Set once by the asking thread, or by the scheduler."""

    __slots__ = ("asked_at", "found", "holders")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.found: bool | None = None
        self.holders = 0  # requests that have used it


class ChunkLookups:
    """The lookups of one tier. Every method is called by the scheduler and none blocks.

    guard: of these lookups alone, since on one connection answers would wait behind blocks. Its thread is the only one
    that waits for the store.
    """

    def __init__(self, guard: StoreGuard, *, timeout_s: float, counters: Counters) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._counters = counters
        self._latest: dict[bytes, ChunkLookup] = {}
        self._of_request: dict[str, dict[bytes, ChunkLookup]] = {}
        self._step: dict[bytes, ChunkLookup] = {}  # asked for in this step
        self._step_touches: dict[bytes, None] = {}
        self._unheld: list[tuple[bytes, ChunkLookup]] = []  # still on their way
        self._changed = threading.Condition()  # guards the following
        self._unasked: dict[bytes, ChunkLookup] = {}
        self._untouched: dict[bytes, None] = {}
        self._sending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-tier-lookup", daemon=True)
        self._thread.start()

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Whether the store has the key; None: ask again in a later step. From the deadline on it has not."""
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
        """Refresh the recency of keys, some time."""
        self._step_touches.update(dict.fromkeys(keys))

    def end_step(self) -> None:
        """The step is over: send what was asked in it."""
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
        """A load has shown that these are not there: neither this request nor a new one is told otherwise."""
        used = self._of_request.get(request_id, {})
        for key in keys:
            for answer in (used.get(key), self._latest.get(key)):
                if answer is not None:
                    answer.found = False

    def forget(self, request_id: str) -> None:
        """The request asks no more. Answers on their way stay, for others to share."""
        for key, answer in self._of_request.pop(request_id, {}).items():
            answer.holders -= 1
            if not answer.holders and not self._drop(key, answer):
                self._unheld.append((key, answer))

    @property
    def known(self) -> int:
        """Keys something is remembered about."""
        return len(self._latest)

    @property
    def waiting(self) -> int:
        """Keys that are yet to be asked for or touched, or are on their way."""
        with self._changed:
            return len(self._unasked) + len(self._untouched) + self._sending

    def close(self) -> None:
        """End the thread. A question on its way ends with the guard, or by its deadline."""
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
        """Forget an answer that nobody holds any more; not while it is on its way, for others to share."""
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
            if answer.found is None:  # its deadline has not passed
                answer.found = hit


def _present(keys: Sequence[bytes], timeout_s: float, pin_s: float, client: KVStoreClient) -> npt.NDArray[np.bool_]:
    return client.contains(keys, refresh=True, pin_s=pin_s, timeout_s=timeout_s)
