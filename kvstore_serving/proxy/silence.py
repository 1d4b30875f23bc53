"""Engines that say nothing: told from those that are only slow, so that nobody waits for them.

A frozen engine may accept connections and answer /health for hours. What it cannot do is send the bytes of an answer.
So an engine is suspect when a request has waited for `TIMES` of what such requests usually take there, at least
`LEAST_S`, and no byte of any answer came from the engine meanwhile. Then the proxy asks it for one token itself. If
that does not come either, the engine is silent: it gets no requests, those that wait for it are given up, and only the
proxy's own questions bring it back, never a user's request.

What is usual is learned from the answers: the seconds to the first byte, by the weight of the request. Of an engine
that has not given `ENOUGH` answers, what is usual at all engines counts; before there is that, nothing is known, and
only the time-outs of requests count. One event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, TypeAlias

TIMES: Final = 5.0
LEAST_S: Final = 1.5
ENOUGH: Final = 8  # answers
_KEPT: Final = 64  # answers, the last ones
_TOKENS: Final = 512  # of a prompt, which weigh as much as a request
_OUTPUT_TOKENS: Final = 16  # of an answer that comes in one piece


def weight(prompt_tokens: int, output_tokens: int = 0) -> float:
    """-> how much a request has to compute before its first byte. `output_tokens`: if that is also its last one."""
    return 1.0 + prompt_tokens / _TOKENS + output_tokens / _OUTPUT_TOKENS


class Waiting:
    """A request that an engine answers. `given_up`: done when nobody waits for the rest of the answer any more."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.began = time.monotonic()
        self.answered = False  # the first byte is there; of a whole answer, the last one
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()


Usual: TypeAlias = "deque[float]"
"""Of the last answers: seconds by weight."""


def nothing_usual() -> Usual:
    """-> of no answers."""
    return deque(maxlen=_KEPT)


class Silence:
    """What is known of one engine. `everywhere`: what is usual at all engines, this one among them."""

    def __init__(self, everywhere: Usual | None = None) -> None:
        self._heard = 0.0  # when the last event of an answer came
        self._usual = nothing_usual()
        self._everywhere = nothing_usual() if everywhere is None else everywhere
        self._waiting: dict[Waiting, None] = {}
        self._unanswered: list[float] = []  # when the first two began that were not, since it was last heard

    def begin(self, weight: float) -> Waiting:
        """A request is sent. `ended` must follow."""
        found = Waiting(weight)
        self._waiting[found] = None
        return found

    def came(self, waiting: Waiting) -> None:
        """A part of its answer came."""
        self.answers()
        if not waiting.answered:
            waiting.answered = True
            if waiting.weight < float("inf"):
                took = (self._heard - waiting.began) / waiting.weight
                self._usual.append(took)
                self._everywhere.append(took)

    def ended(self, waiting: Waiting) -> None:
        """Its answer is over, or nobody wants it any more, as the answer of a prefill engine when the decode engine was
        faster."""
        lacks = waiting in self._waiting and not waiting.answered and not waiting.given_up.done()
        self._waiting.pop(waiting, None)
        if lacks and waiting.weight < float("inf") and waiting.began > self._heard and len(self._unanswered) < 2:
            self._unanswered.append(waiting.began)

    def refused(self, waiting: Waiting) -> None:
        """It was answered by a refusal, which says nothing of whether the engine computes."""
        self._waiting.pop(waiting, None)

    def answers(self) -> None:
        """It does, as the proxy's own question has shown, or an answer."""
        self._heard = time.monotonic()
        self._unanswered.clear()

    def limit_s(self, weight: float) -> float:
        """-> after how long a request of this weight is late."""
        return max(LEAST_S, TIMES * self._usual_s() * weight)

    def _usual_s(self) -> float:
        """-> what nearly all requests of weight 1 take at most; infinite: it is not known."""
        usual = self._usual if len(self._usual) >= ENOUGH else self._everywhere
        return sorted(usual)[int(0.95 * len(usual))] if len(usual) >= ENOUGH else float("inf")

    def late(self) -> bool:
        """Whether a request has waited for too long, or two were left without an answer, and nothing else came from the
        engine meanwhile."""
        now = time.monotonic()
        if len(self._unanswered) > 1 and now - self._unanswered[0] > LEAST_S:
            return True
        # The rest of an answer may wait for the prompts of others.
        prompts = 1.0 + sum(each.weight for each in self._waiting if not each.answered)
        longest_s = TIMES * self._usual_s()
        return any(
            now - max(each.began, self._heard) > max(LEAST_S, longest_s * (prompts if each.answered else each.weight))
            for each in self._waiting
        )

    def give_up(self) -> None:
        """End what waits: another engine may answer it."""
        for each in list(self._waiting):
            if not each.given_up.done():
                each.given_up.set_result(None)
