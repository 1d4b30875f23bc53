"""How much later than without kvstore the engine may begin with a request: what the connector took of its time.

A request is held back while the engine asks in every step what can be loaded and is told to ask again, and while its
load is under way. What the engine would have needed to compute what is loaded, behind the prompts before it, is not
lost. The rest is, and it has a bound: what a lookup may take, `admission.LEAST_S`, and a step or two of the engine,
which hears of an answer or of a load's end only between steps. (With `always_load` a load may take `timeout_s`.) A load
that fails is no exception: it ends in time, and its blocks are computed then.

Prompts that another engine computes are not counted; they have metrics of their own.

Thread: the engine core's. Nothing blocks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# Requests whose times nobody has taken: an engine whose statistics are off never does.
MOST_UNTAKEN: Final = 10_000


class HeldBack(NamedTuple):
    """Of one request, in seconds."""

    asked_s: float  # it was asked for, and the engine was told to ask again
    load_s: float  # its load took
    computing_s: float  # computing would have taken, as fast as the engine is; 0 if that is not known

    @property
    def seconds(self) -> float:
        """What it was held back."""
        return max(0.0, self.asked_s + self.load_s - self.computing_s)


@dataclass
class _Asking:
    step: int
    told_at: float = 0.0  # to ask again; 0: it was not, last time
    asked_s: float = 0.0
    first: int = 0  # tokens of the engine's own cache when it was asked for first
    began: float = 0.0  # its load
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
        """The engine has scheduled a step. A request that it does not ask for in the next one waits for the engine."""
        self._step += 1

    def asked(self, request_id: str, computed_tokens: int, *, again: bool) -> None:
        """The engine asked for a request, of which its cache has so many tokens. again: it is to ask again."""
        now = time.monotonic()
        asking = self._asking.get(request_id)
        if asking is None:
            asking = self._asking[request_id] = _Asking(self._step, first=computed_tokens)
        elif asking.told_at and asking.step == self._step - 1:
            asking.asked_s += now - asking.told_at
        asking.step, asking.told_at = self._step, now if again else 0.0

    def allocated(self, request_id: str, end: int, computing_s: Callable[[int, int], float]) -> None:
        """It has blocks, and its tokens up to `end` are there, to be loaded, or were to be. computing_s: how long the
        engine would have computed tokens from one to another, behind other prompts; `math.inf`: that is not known."""
        if (asking := self._asking.get(request_id)) is None:
            return
        asking.began = time.monotonic()
        seconds = computing_s(asking.first, end) if end > asking.first else 0.0
        asking.computing_s = 0.0 if math.isinf(seconds) else seconds

    def ended(self, request_id: str) -> HeldBack | None:
        """The engine can go on with it now. None: nobody has asked for it."""
        if (asking := self._asking.pop(request_id, None)) is None:
            return None
        load_s = time.monotonic() - asking.began
        found = HeldBack(asking.asked_s, load_s, asking.computing_s)
        self._ended.append(found.seconds)
        return found

    def forget(self, request_id: str) -> None:
        """It has ended before that, or another engine computes its prompt."""
        self._asking.pop(request_id, None)

    def take(self) -> list[float]:
        """-> the seconds of each request since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended
