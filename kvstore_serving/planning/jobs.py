"""What the simulator keeps of a request, and the links that its blocks take. Times are seconds of simulated time."""

from __future__ import annotations

from collections.abc import Sequence


class Job:
    """A request on its way. `tokens`: what a prefill computes: all but `hits` of the prompt, and, after a failure, what
    had been generated. `left`: output tokens that are still to come."""

    __slots__ = (
        "admitted_s",
        "at_s",
        "begun_s",
        "context",
        "counted",
        "first_s",
        "hits",
        "input",
        "last_s",
        "left",
        "loaded_s",
        "missed",
        "output",
        "prefilled_s",
        "ready_s",
        "sent_s",
    )

    def __init__(self, at_s: float, tokens: int, output: int, hits: int, counted: bool) -> None:
        self.at_s = at_s
        self.input = tokens
        self.output = output
        self.hits = hits
        self.counted = counted
        self.context = tokens
        self.left = output
        self.missed = False  # an SLO, as far as it is known
        self.loaded_s = at_s  # what the store has of it was there
        self.begun_s = -1.0  # its prefill began
        self.prefilled_s = -1.0
        self.first_s = -1.0
        self.sent_s = -1.0  # all its blocks are in the store
        self.admitted_s = -1.0  # the decode engine has memory for it
        self.ready_s = -1.0  # the decode engine has its blocks
        self.last_s = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """0 for an answer of one token."""
        return (self.last_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0


class Link:
    """A link that many share: what is sent goes one after the other, so that its rate is never exceeded."""

    __slots__ = ("bytes_per_s", "free_s", "sent_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.sent_bytes = 0.0


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
