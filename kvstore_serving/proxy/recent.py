"""The requests of the last five minutes, summed up for the proxy's page and for /status.

The event loop serves streams meanwhile, so a summary must cost little however many requests there were. Requests are
counted in slots of `SLOT_S`. Percentiles come from a random sample of the latencies of each slot (Vitter's algorithm R,
1985), and a summary is kept for `FRESH_S`.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvstore_serving.proxy.record import NOT_SERVED, Record

WINDOW_S: Final = 300.0
SLOT_S: Final = 5.0  # the time of one point of the history
SAMPLED: Final = 64  # requests of each slot and decision whose latencies are kept
FRESH_S: Final = 1.0


class _Latency(NamedTuple):
    ttft_s: float | None  # None unless the answer was streamed
    tpot_s: float | None


@dataclass
class _Slot:
    """The requests that ended in one period of `SLOT_S`."""

    number: int  # monotonic seconds / SLOT_S
    decisions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[_Latency]] = field(default_factory=dict)  # a sample for each decision

    def add(self, record: Record) -> None:
        decision = record.decision
        self.decisions[decision] += 1
        self.outcomes[record.outcome] += 1
        self.tokens["prompt"] += record.prompt_tokens
        self.tokens["cached"] += record.cached_tokens
        self.tokens["output"] += record.output_tokens
        sample, latency = (
            self.latencies.setdefault(decision, []),
            _Latency(record.ttft_s, record.tpot_s),
        )
        if len(sample) < SAMPLED:
            sample.append(latency)
        elif (at := random.randrange(self.decisions[decision])) < SAMPLED:
            sample[at] = latency


class Recent:
    """The last requests. Used by the event loop only."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._status: dict[str, Any] = {}
        self._made_at = -FRESH_S

    def add(self, record: Record) -> None:
        """Note a request at its end."""
        number = int(time.monotonic() / SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._forget(number)
            self._slots.append(_Slot(number))
        self._slots[-1].add(record)

    def status(self) -> dict[str, Any]:
        """Return what `recent` in /status has. Times are in seconds. Lists of the history have one number for each
        `slot_s`, the oldest first; the last slot is not over yet."""
        now = time.monotonic()
        if now - self._made_at >= FRESH_S:
            self._status, self._made_at = self._summary(int(now / SLOT_S)), now
        return self._status

    def _forget(self, now: int) -> None:
        while self._slots and now - self._slots[0].number >= WINDOW_S / SLOT_S:
            self._slots.popleft()

    def _summary(self, now: int) -> dict[str, Any]:
        self._forget(now)
        decisions, outcomes, tokens = (
            sum((getattr(slot, name) for slot in self._slots), Counter[str]())
            for name in ("decisions", "outcomes", "tokens")
        )
        slots = {slot.number: slot for slot in self._slots}
        history = [slots.get(number) or _Slot(number) for number in range(now - int(WINDOW_S / SLOT_S) + 1, now + 1)]
        return {
            "window_s": WINDOW_S,
            "requests": decisions.total(),
            "decisions": dict(decisions),
            "outcomes": dict(outcomes),
            "split_share": _split_share(decisions),
            "prompt_tokens": tokens["prompt"],
            "cached_tokens": tokens["cached"],
            "latency": [self._latency(decision, count) for decision, count in sorted(decisions.items())],
            "slot_s": SLOT_S,
            "history": {
                "requests_per_s": [round(slot.decisions.total() / SLOT_S, 2) for slot in history],
                "split_share": [_split_share(slot.decisions) for slot in history],
                "ttft_p50_s": [_quantiles(_all(slot), "ttft_s", 0.5)[0] for slot in history],
                "ttft_p90_s": [_quantiles(_all(slot), "ttft_s", 0.9)[0] for slot in history],
                "output_tokens_per_s": [round(slot.tokens["output"] / SLOT_S, 1) for slot in history],
            },
        }

    def _latency(self, decision: str, count: int) -> dict[str, Any]:
        mine = [latency for slot in self._slots for latency in slot.latencies.get(decision, ())]
        row: dict[str, Any] = {"decision": decision, "requests": count}
        for name in ("ttft", "tpot"):
            p50, p90, p99 = _quantiles(mine, f"{name}_s", 0.5, 0.9, 0.99)
            row |= {f"{name}_p50_s": p50, f"{name}_p90_s": p90, f"{name}_p99_s": p99}
        return row


def _all(slot: _Slot) -> list[_Latency]:
    return [latency for sample in slot.latencies.values() for latency in sample]


def _split_share(decisions: Counter[str]) -> float | None:
    """Return the fraction of the served requests that P and D served together; None if there was no request."""
    served = decisions.total() - decisions[NOT_SERVED]
    return round(decisions["split"] / served, 4) if served else None


def _quantiles(latencies: Iterable[_Latency], name: str, *shares: float) -> Sequence[float | None]:
    """Return, for each of `shares`, the least value that at least this fraction of the values do not exceed; None
    without values."""
    known = sorted(value for latency in latencies if (value := getattr(latency, name)) is not None)
    return [round(known[max(0, -int(-share * len(known) // 1) - 1)], 4) if known else None for share in shares]
