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
    """A request to send. `hash_ids`: one for each `block_tokens` of the prompt, the last of which may be cut."""

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

    `arrivals_s`: when each chunk with tokens arrived. `tokens`: what the server says it generated, or else the number
    of those chunks. `error`: its kind, or empty. Kinds: see `kvstore_serving.load.client`.
    """

    planned: Planned
    sent_s: float = 0.0
    ended_s: float = 0.0
    http_status: int | None = None
    arrivals_s: list[float] = []
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
    def tpot_s(self) -> float | None:
        """Time per output token after the first. None if there is no second token."""
        if self.tokens < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks. A chunk of several tokens has one gap, which is not split."""
        return [after - before for before, after in pairwise(self.arrivals_s)]

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
            "input_tokens": planned.input_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": planned.output_tokens,
            "tokens": self.tokens,
            "tokens_reported": self.tokens_reported,
            "http_status": self.http_status,
            "error": self.error or None,
            "message": self.message or None,
        }
