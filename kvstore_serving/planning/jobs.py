"""The simulator's record of a request, and the links over which its blocks move. Times are in seconds of simulated
time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in the simulator. Each time is -1 until its event has happened.

    context: the tokens of the prompt and, after a failure, the tokens that had been generated; a prefill computes all
    of them except for `hits`
    left: the number of output tokens that are still to come
    """

    at_s: float
    input: int
    output: int
    hits: int
    counted: bool
    context: int = field(init=False)
    left: int = field(init=False)
    missed: bool = False  # whether it is already known to miss an SLO
    loaded_s: float = field(init=False)  # when the blocks that the store had were loaded
    begun_s: float = -1.0  # when its prefill began
    prefilled_s: float = -1.0
    first_s: float = -1.0
    sent_s: float = -1.0  # when all its blocks were in the store
    admitted_s: float = -1.0  # when the decode engine had memory for it
    ready_s: float = -1.0  # when all its blocks were at the decode engine
    last_s: float = -1.0

    def __post_init__(self) -> None:
        self.context, self.left, self.loaded_s = self.input, self.output, self.at_s

    def prefilled(self, now: float) -> None:
        """Note that the prompt is computed. This also gives the first token, or the next one after a failure."""
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
        """The time per token after the first one. It is 0 for an answer of one token."""
        return (self.last_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(slots=True, eq=False)
class NetworkLink:
    """A shared link. It sends transfers one after another, so that its rate is never exceeded."""

    bytes_per_s: float
    free_s: float = 0.0
    sent_bytes: float = 0.0


def transfer(now: float, nbytes: float, path: Sequence[tuple[NetworkLink, float]]) -> float:
    """Send bytes over all links of a path at the same time. Returns the time at which the last byte has arrived.

    path: each link with the share of the bytes that goes over it. A link begins as soon as its earlier transfers are
    sent, so a busy link does not delay the other links of the path.
    """
    end = now
    for link, share in path:
        link.free_s = max(now, link.free_s) + nbytes * share / link.bytes_per_s
        link.sent_bytes += nbytes * share
        end = max(end, link.free_s)
    return end
