"""Planned requests and their outcomes: the records that the other modules of the load generator share.

A request's time and lengths are planned before the run starts. When the request has ended, its outcome says when it was
sent, and when each part of the answer arrived. All times are in seconds since the start of the run, from one monotonic
clock.

What must hold: an outcome has either everything that was requested, or an error. TTFT, TPOT and the inter-token
latencies are always derived from the arrival times, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kvstore_serving.load.prompts import HASHED_TOKENS


class Planned(msgspec.Struct, frozen=True):
    """A request to send.

    hash_ids: one id for each block of `block_tokens` tokens of the prompt; the last block may be shorter
    output_tokens: the number of tokens in each answer
    """

    index: int
    at_s: float
    hash_ids: Sequence[int]
    input_tokens: int
    output_tokens: int
    counted: bool = True  # False: the request only warms the server up
    clipped: bool = False  # whether the trace's request has more tokens
    block_tokens: int = HASHED_TOKENS


class RequestOutcome(msgspec.Struct):
    """The outcome of one request.

    answers: the number of answers to the prompt (`n` of the API); either all of them are complete, or none
    arrivals_s: the arrival time of each chunk with tokens
    choices: for each of these chunks, the answer that it belongs to; empty if there is only one answer
    whole: whether the answer came as one JSON object instead of a stream
    tokens: the number of generated tokens that the server reports, or else the number of chunks with tokens
    error: the kind of error, or empty; the kinds are listed in `kvstore_serving.load.client`
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
        """How much later than planned the request was sent. This is the generator's fault, never the server's."""
        return self.sent_s - self.planned.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending, which includes connecting, to the arrival of the first chunk."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def latency_s(self) -> float:
        """The time from sending to the end of the answer, or to the end of the part that arrived."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token of each answer, without its first token. It is None if all tokens came at one time,
        because there is only one or because the answer came whole."""
        streams = [times for times in self._streams() if len(times) > 1]
        later = self.tokens - max(1, len(self._streams()))
        if not streams or later < 1:
            return None
        return sum(times[-1] - times[0] for times in streams) / later

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, which are the gaps between chunks of one answer. A chunk of several tokens counts as
        one gap."""
        return [after - before for times in self._streams() for before, after in pairwise(times)]

    def _streams(self) -> list[list[float]]:
        """Return the arrival times of each answer's chunks."""
        if not self.choices:
            return [self.arrivals_s]
        found: dict[int, list[float]] = {}
        for choice, at_s in zip(self.choices, self.arrivals_s, strict=True):
            found.setdefault(choice, []).append(at_s)
        return list(found.values())

    @property
    def asked_tokens(self) -> int:
        """The number of requested tokens, in all answers to the prompt together."""
        return self.planned.output_tokens * self.answers

    def fail(self, kind: str, message: str) -> None:
        """Note that the request failed. Only the first failure is kept."""
        if not self.error:
            self.error, self.message = kind, message

    def line(self) -> dict[str, object]:
        """Return the outcome as a line of `--output`."""
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
