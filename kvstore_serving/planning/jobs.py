"""What the simulator keeps of a request, and the links that its blocks take. Times are seconds of simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `context`: what a prefill computes, but for `hits`: the prompt, and, after a failure, what
    had been generated. `left`: output tokens that are still to come. A time that has not come is -1."""

    at_s: float
    input: int
    output: int
    hits: int
    counted: bool
    context: int = field(init=False)
    left: int = field(init=False)
    missed: bool = False  # an SLO, as far as it is known
    loaded_s: float = field(init=False)  # what the store has of it was there
    begun_s: float = -1.0  # its prefill began
    prefilled_s: float = -1.0
    first_s: float = -1.0
    sent_s: float = -1.0  # all its blocks are in the store
    admitted_s: float = -1.0  # the decode engine has memory for it
    ready_s: float = -1.0  # the decode engine has its blocks
    last_s: float = -1.0

    def __post_init__(self) -> None:
        self.context, self.left, self.loaded_s = self.input, self.output, self.at_s

    def prefilled(self, now: float) -> None:
        """Its prompt is computed, which gives a token."""
        self.prefilled_s = now
        if self.first_s < 0:
            self.first_s = now
        self.left -= 1
        self.context += 1

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """0 for an answer of one token."""
        return (self.last_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(slots=True, eq=False)
class Link:
    """A link that many share: what is sent goes one after the other, so that its rate is never exceeded."""

    bytes_per_s: float
    free_s: float = 0.0
    sent_bytes: float = 0.0


def transfer(now: float, nbytes: float, path: Sequence[tuple[Link, float]]) -> float:
    """Send bytes over the links of a path at once. -> when the last has arrived.

    path: each link with the share of the bytes that goes over it. Each link sends what it is given in turn, and begins
    when it is free: one that is behind does not keep the others of the path from sending.
    """
    end = now
    for link, share in path:
        link.free_s = max(now, link.free_s) + nbytes * share / link.bytes_per_s
        link.sent_bytes += nbytes * share
        end = max(end, link.free_s)
    return end
