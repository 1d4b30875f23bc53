"""Checks of answers: an engine with a cache must give the tokens that an engine without a cache would give.

Token ids are compared with those of an engine without the connector, but they may differ. In bfloat16 the logits of the
likeliest tokens are coarse (steps of 2^-4 at 8 … 16), so some logits are equal. The last bit of a sum depends on the
number of tokens that a step computes together, even in an engine without any cache. So where tokens differ, the engine
without the connector judges whether each token, given the tokens before it, is within `TIE` of the likeliest one. This
takes long for long prompts, so there only the first differing token is judged, by the log probabilities that came with
the engine's answer.

An engine without any cache was measured with the same prompts one at a time and eight at once. Where its answers
differ, the log probabilities of the tokens differ by 0 … 0.125 with the small model and by 0 … 0.31 with the mid one.
That of a random token differs from that of the right one by 6 and 11 in the median, and by at least 0.7 and 6.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.remote_kv_cache.engine_process import Answer
from benchmarks.remote_kv_cache.engines import Engine, compute_threads
from benchmarks.remote_kv_cache.harness import Benchmark

TIE: Final = 0.5  # difference of log probabilities
_SHOWN: Final = 20


class Checks:
    """Counts the right and wrong answers of a benchmark."""

    def __init__(self) -> None:
        self.equal = 0
        self.tied = 0
        self.wrong: list[str] = []
        self.cached_wrong: list[str] = []
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def tokens(
        self,
        what: str,
        prompts: Sequence[list[int]],
        answers: Sequence[Answer],
        expected: Sequence[Answer],
        reference: Engine,
    ) -> None:
        """Check tokens. expected: the answers of `reference`, the engine without the connector."""
        for number, (prompt, answer, right) in enumerate(zip(prompts, answers, expected, strict=True)):
            if answer.token_ids == right.token_ids:
                self.equal += 1
                continue
            if answer.tops and right.tops:
                gap = gap_where_they_part(answer, right)
            else:
                case = (tuple(prompt), tuple(answer.token_ids))
                if case not in self._judged:
                    self._judged[case] = max(reference.gaps(prompt, answer.token_ids))
                gap = self._judged[case]
            if len(answer.token_ids) == len(right.token_ids) and gap <= TIE:
                self.tied += 1
            else:
                self.wrong.append(f"{what}, prompt {number}: {answer.token_ids}, expected {right.token_ids}")

    def cached(self, what: str, answers: Sequence[Answer], least: int, most: int) -> None:
        """Check that `least` to `most` tokens of every prompt came from a cache."""
        counts = [answer.cached_tokens for answer in answers]
        if min(counts) < least or max(counts) > most:
            self.cached_wrong.append(f"{what}: cached tokens {counts}, expected {least} … {most}")

    def that(self, holds: bool, otherwise: str) -> None:
        """Check a fact about the conditions of a row; `otherwise` is the failure's text."""
        if not holds:
            self.cached_wrong.append(otherwise)

    @property
    def failures(self) -> list[str]:
        """Return the failures as text; only the first ones if there are many."""
        found = [f"WRONG TOKENS: {text}" for text in self.wrong] + [f"not as expected: {t}" for t in self.cached_wrong]
        return found[:_SHOWN]

    @property
    def summary(self) -> str:
        return (
            f"answers: {self.equal} equal to those without a cache, {self.tied} that differ where logits are equal, "
            f"{len(self.wrong)} wrong; cached tokens {'NOT ' if self.cached_wrong else ''}as expected"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "answers_equal": self.equal,
            "answers_tied": self.tied,
            "answers_wrong": len(self.wrong),
            "cached_as_expected": not self.cached_wrong,
            "failures": self.failures,
        }


def gap_where_they_part(answer: Answer, right: Answer) -> float:
    """Return how much less likely the answer's token is than the right one at the first difference, according to the
    engine that gave the right answer. Both have the same tokens before it. Return infinity if the answer's token is not
    among the likeliest ones, and 0 if no token differs."""
    for mine, its, tops in zip(answer.token_ids, right.token_ids, right.tops, strict=False):
        if mine != its:
            return tops[its] - tops.get(mine, -math.inf)
    return 0.0


def conclude(benchmark: Benchmark, checks: Checks, **parameters: Any) -> int:
    """Print the result of the checks and write the JSON. Return the exit status: 1 if a check failed."""
    benchmark.say(checks.summary)
    for failure in checks.failures:
        benchmark.say(failure)
    benchmark.finish(**parameters, compute_threads=compute_threads(), checks=checks.to_json())
    return 1 if checks.failures else 0
