"""Measures how much time each request loses because of the connector: how much later the engine can begin with the
request than without kvstore.

A request is held back while the engine asks in every step what can be loaded and gets the answer "ask again". It is
also held back while its load is in progress. Without kvstore, the engine would have needed some of this time to compute
earlier prompts and the loaded blocks. Only the rest is lost. The lost time is at most the time of a lookup
(`admission.MIN_LOOKUP_S`) plus one or two steps of the engine. The steps count because the engine learns of an answer
or of a load's end only between steps. (With `always_load`, a load may take `timeout_s`.) The same limit holds for a
load that fails, because the load ends in time and its blocks are then computed.

Prompts that another engine computes are not counted, because they have metrics of their own.

Only the engine core's thread uses this module. No call blocks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# The number of requests whose times are kept until they are read. The number is limited because an engine with
# statistics turned off never reads them.
MOST_UNTAKEN: Final = 10_000


class HeldBack(NamedTuple):
    """The times of one request, in seconds."""

    asked_s: float  # how long the engine had to ask again
    load_s: float  # how long its load took
    computing_s: float  # how long computing would have taken; 0 if that is not known

    @property
    def seconds(self) -> float:
        """The time for which the request was held back."""
        return max(0.0, self.asked_s + self.load_s - self.computing_s)


@dataclass
class _Asking:
    step: int
    told_at: float = 0.0  # when the last answer was given, if it was "ask again"; otherwise 0
    asked_s: float = 0.0
    first: int = 0  # tokens of the engine's own cache at the first query
    began: float = 0.0  # when its load began
    computing_s: float = 0.0


class HeldBackTimes:
    """The requests that are being held back. Not thread-safe."""

    def __init__(self) -> None:
        self._step = 0
        self._asking: dict[str, _Asking] = {}
        self._ended: deque[float] = deque(maxlen=MOST_UNTAKEN)

    def __len__(self) -> int:
        return len(self._asking)

    def step(self) -> None:
        """Note that the engine has scheduled a step. If the engine does not query a request in the next step, the
        request waits for the engine, not for the connector."""
        self._step += 1

    def asked(self, request_id: str, computed_tokens: int, *, again: bool) -> None:
        """Note that the engine queried a request of which `computed_tokens` are already in its cache. `again`: whether
        the answer was "ask again"."""
        now = time.monotonic()
        asking = self._asking.get(request_id)
        if asking is None:
            asking = self._asking[request_id] = _Asking(self._step, first=computed_tokens)
        elif asking.told_at and asking.step == self._step - 1:
            asking.asked_s += now - asking.told_at
        asking.step, asking.told_at = self._step, now if again else 0.0

    def allocated(self, request_id: str, end: int, computing_s: Callable[[int, int], float]) -> None:
        """Note that the engine gave blocks to the request. Each of its tokens before `end` is in the cache, or is to be
        loaded, or its load was declined. `computing_s(first, end)`: a function that returns how long the engine would
        have taken to compute these tokens after other prompts. It returns `math.inf` if that is not known."""
        if (asking := self._asking.get(request_id)) is None:
            return
        asking.began = time.monotonic()
        seconds = computing_s(asking.first, end) if end > asking.first else 0.0
        asking.computing_s = 0.0 if math.isinf(seconds) else seconds

    def ended(self, request_id: str) -> HeldBack | None:
        """Note that the engine can continue with the request now. Return the request's times, or None if the engine has
        not queried it."""
        if (asking := self._asking.pop(request_id, None)) is None:
            return None
        load_s = time.monotonic() - asking.began
        found = HeldBack(asking.asked_s, load_s, asking.computing_s)
        self._ended.append(found.seconds)
        return found

    def forget(self, request_id: str) -> None:
        """Drop the request's times, because it has ended."""
        self._asking.pop(request_id, None)

    def take(self) -> list[float]:
        """Return how long each request was held back, in seconds, for all requests since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended
