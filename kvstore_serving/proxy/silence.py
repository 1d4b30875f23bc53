"""Tells silent engines from slow ones, so that no request waits for a silent engine.

A frozen engine may accept connections and answer /health for hours, but it cannot send the bytes of an answer. An
engine is suspect if it sent no byte of any answer while a request has waited too long. Too long is `TIMES` times as
long as usual at this engine, and at least `MIN_SILENCE_S`. The proxy then asks the engine for one token itself. If that
token does not come either, the engine is silent: it gets no requests, and the requests that wait for it are given up.
It gets requests again only after it has answered one of the proxy's own probes; no user's request is used to try it.

The usual time is learned from answers: the seconds to the first byte, divided by the weight of the request. For an
engine with fewer than `ENOUGH_ANSWERS` answers, the usual time at all engines is used. As long as all engines together
have too few answers, only the time-outs of requests apply. Used by one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, TypeAlias

TIMES: Final = 5.0
MIN_SILENCE_S: Final = 1.5
ENOUGH_ANSWERS: Final = 8  # this many answers are enough to know the usual time
_KEPT_ANSWERS: Final = 64  # only the latest answers are kept
_TOKENS: Final = 512  # this many tokens of a prompt weigh as much as a request
_OUTPUT_TOKENS: Final = 16  # this many tokens of an answer that comes in one piece weigh as much as a request


def weight(prompt_tokens: int, output_tokens: int = 0) -> float:
    """Return how much work a request needs before its first byte.

    prompt_tokens: the length of the prompt
    output_tokens: the length of an answer that comes in one piece; 0 for a stream
    """
    return 1.0 + prompt_tokens / _TOKENS + output_tokens / _OUTPUT_TOKENS


class AwaitedAnswer:
    """A request that waits for an engine's answer. `given_up`: done when nothing waits for the rest of the answer any
    longer."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.began = time.monotonic()
        self.answered = False  # the first byte has come, or the last byte of an answer in one piece
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()


Usual: TypeAlias = "deque[float]"
"""Of the last answers: seconds by weight."""


def nothing_usual() -> Usual:
    """Return an empty record of answers."""
    return deque(maxlen=_KEPT_ANSWERS)


class Silence:
    """What is known of one engine's silence. `everywhere`: the last answers of all engines, including this one."""

    def __init__(self, everywhere: Usual | None = None) -> None:
        self._heard = 0.0  # when the last part of any answer came
        self._usual = nothing_usual()
        self._everywhere = nothing_usual() if everywhere is None else everywhere
        self._waiting: dict[AwaitedAnswer, None] = {}
        self._unanswered: list[float] = []  # the start of the first two requests unanswered since `_heard`

    def begin(self, weight: float) -> AwaitedAnswer:
        """Note that a request is sent. `ended` must follow."""
        found = AwaitedAnswer(weight)
        self._waiting[found] = None
        return found

    def came(self, waiting: AwaitedAnswer) -> None:
        """Note that a part of an answer came."""
        self.answers()
        if not waiting.answered:
            waiting.answered = True
            if waiting.weight < float("inf"):
                took = (self._heard - waiting.began) / waiting.weight
                self._usual.append(took)
                self._everywhere.append(took)

    def ended(self, waiting: AwaitedAnswer) -> None:
        """Note that an answer is complete or is no longer wanted. For example, a prefill engine's answer is not wanted
        when the decode engine was faster."""
        lacks = waiting in self._waiting and not waiting.answered and not waiting.given_up.done()
        self._waiting.pop(waiting, None)
        if lacks and waiting.weight < float("inf") and waiting.began > self._heard and len(self._unanswered) < 2:
            self._unanswered.append(waiting.began)

    def refused(self, waiting: AwaitedAnswer) -> None:
        """Note that the engine refused the request. A refusal does not show whether the engine still computes."""
        self._waiting.pop(waiting, None)

    def answers(self) -> None:
        """Note that the engine computes. An answer, or the proxy's own probe, has shown this."""
        self._heard = time.monotonic()
        self._unanswered.clear()

    def limit_s(self, weight: float) -> float:
        """Return the number of seconds after which a request of this weight is late."""
        return max(MIN_SILENCE_S, TIMES * self._usual_s() * weight)

    def _usual_s(self) -> float:
        """Return the time in which nearly all requests of weight 1 are answered, in seconds. It is infinite if not
        known."""
        usual = self._usual if len(self._usual) >= ENOUGH_ANSWERS else self._everywhere
        return sorted(usual)[int(0.95 * len(usual))] if len(usual) >= ENOUGH_ANSWERS else float("inf")

    def late(self) -> bool:
        """Return whether the engine has sent nothing for too long: while a request waited that is now late, or since
        the first of two requests that ended without an answer."""
        now = time.monotonic()
        if len(self._unanswered) > 1 and now - self._unanswered[0] > MIN_SILENCE_S:
            return True
        # The rest of an answer may have to wait while the engine computes the prompts of other requests.
        prompts = 1.0 + sum(each.weight for each in self._waiting if not each.answered)
        longest_s = TIMES * self._usual_s()
        return any(
            now - max(each.began, self._heard)
            > max(MIN_SILENCE_S, longest_s * (prompts if each.answered else each.weight))
            for each in self._waiting
        )

    def give_up(self) -> None:
        """Give up waiting for all answers, so that another engine can answer these requests."""
        for each in list(self._waiting):
            if not each.given_up.done():
                each.given_up.set_result(None)
