"""What is to be sent, and what became of it: the records that the other modules of the load generator share.

A request is planned with its time and lengths before the run starts. When it has ended, its outcome holds when it was
sent and when each part of the answer arrived. All times are seconds since the start of the run, on one monotonic clock.

What must hold: an outcome either has all that was asked for, or an error. TTFT, TPOT and the inter-token latencies are
only ever derived from the arrival times, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kvstore_serving.load.prompts import HASHED_TOKENS


class Planned(msgspec.Struct, frozen=True):
    """A request to send. `hash_ids`: one for each `block_tokens` of the prompt, the last of which may be cut.
    `output_tokens`: of each answer."""

    index: int
    at_s: float
    hash_ids: Sequence[int]
    input_tokens: int
    output_tokens: int
    counted: bool = True  # False: it warms the server up
    clipped: bool = False  # the trace asked for more tokens
    block_tokens: int = HASHED_TOKENS


class Outcome(msgspec.Struct):
    """What became of one request.

    `answers`: to the prompt, as many as were asked for (`n` of the API); together they are complete or not.
    `arrivals_s`: when each chunk with tokens arrived. `choices`: to which of several answers each of those chunks
    belongs; empty: all to the same. `whole`: it came as one JSON object, not as a stream. `tokens`: what the server
    says it generated, or else the number of those chunks. `error`: its kind, or empty. Kinds: see
    `kvstore_serving.load.client`.
    """

    planned: Planned
    answers: int = 1
    sent_s: float = 0.0
    ended_s: float = 0.0
    http_status: int | None = None
    arrivals_s: list[float] = []
    choices: list[int] = []
    whole: bool = False
    tokens: int = 0
    tokens_reported: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""

    @property
    def lateness_s(self) -> float:
        """How much later than planned it was sent: the generator's fault, never the server's."""
        return self.sent_s - self.planned.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending, which includes connecting, to the arrival of the first chunk."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def latency_s(self) -> float:
        """From sending to the end of the whole answer, or of what came of it."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one, of each answer. None if the tokens came at one time: if there is
        but one, or the answer came whole."""
        streams = [times for times in self._streams() if len(times) > 1]
        later = self.tokens - max(1, len(self._streams()))
        if not streams or later < 1:
            return None
        return sum(times[-1] - times[0] for times in streams) / later

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks of one answer. A chunk of several tokens has one gap, which is
        not split."""
        return [after - before for times in self._streams() for before, after in pairwise(times)]

    def _streams(self) -> list[list[float]]:
        """The arrivals of each answer."""
        if not self.choices:
            return [self.arrivals_s]
        found: dict[int, list[float]] = {}
        for choice, at_s in zip(self.choices, self.arrivals_s, strict=True):
            found.setdefault(choice, []).append(at_s)
        return list(found.values())

    @property
    def asked_tokens(self) -> int:
        """Of all answers to the prompt."""
        return self.planned.output_tokens * self.answers

    def fail(self, kind: str, message: str) -> None:
        """Say that the request failed. The first failure stays."""
        if not self.error:
            self.error, self.message = kind, message

    def line(self) -> dict[str, object]:
        """The outcome as a line of `--output`."""
        planned = self.planned
        return {
            "index": planned.index,
            "counted": planned.counted,
            "scheduled_s": planned.at_s,
            "sent_s": self.sent_s,
            "ended_s": self.ended_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "itl_s": self.itl_s,
            "latency_s": self.latency_s,
            "input_tokens": planned.input_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.asked_tokens,
            "tokens": self.tokens,
            "tokens_reported": self.tokens_reported,
            "whole": self.whole,
            "http_status": self.http_status,
            "error": self.error or None,
            "message": self.message or None,
        }
