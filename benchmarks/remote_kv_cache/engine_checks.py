"""Checks answers: an engine with a cache must give the tokens that an engine without a cache would give.

Token ids are compared with those of an engine without the connector. They need not be equal: in bfloat16 the logits of
the likeliest tokens are so coarse (2^-4 at 8 … 16) that some are the same number, and the last bit of a sum depends on
how many tokens a step computes together, even in an engine without any cache. So where tokens differ, the engine
without the connector judges: given the tokens before it, is each one within `TIE` of the likeliest? Of long prompts,
which take it long, only the first token that differs is judged, by what it said with its answer. Measured of an
engine without any cache, asked the same one prompt at a time and eight at once: where it contradicts itself, the tokens
are 0 … 0.125 apart with the small model and 0 … 0.31 with the mid one; a random token in the place of the right one is
6 and 11 at the median, never less than 0.7 and 6.8.
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
    """The right and wrong answers of a benchmark, counted."""

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
        """Check tokens. expected: the answers of `reference`, the engine without connector."""
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
        """Check that so many tokens of every prompt came from a cache."""
        counts = [answer.cached_tokens for answer in answers]
        if min(counts) < least or max(counts) > most:
            self.cached_wrong.append(f"{what}: cached tokens {counts}, expected {least} … {most}")

    def that(self, holds: bool, otherwise: str) -> None:
        """Check a fact about the conditions of a row."""
        if not holds:
            self.cached_wrong.append(otherwise)

    @property
    def failures(self) -> list[str]:
        """The failures as text for people; not all of them if there are many."""
        found = [f"WRONG TOKENS: {text}" for text in self.wrong] + [f"not as expected: {t}" for t in self.cached_wrong]
        return found[:_SHOWN]

    @property
    def summary(self) -> str:
        return (
            f"answers: {self.equal} equal to those without a cache, {self.tied} with a tie of logits told differently, "
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
    """How much less likely the answer's token is than the right one where the two differ for the first time, by the
    engine that gave the right answer: up to there both continue the same tokens. Infinity if it is none of the
    likeliest, 0 if none differs."""
    for mine, its, tops in zip(answer.token_ids, right.token_ids, right.tops, strict=False):
        if mine != its:
            return tops[its] - tops.get(mine, -math.inf)
    return 0.0


def conclude(benchmark: Benchmark, checks: Checks, **parameters: Any) -> int:
    """Print the result of the checks and write the JSON. -> the exit status: 1 if a check failed."""
    benchmark.say(checks.summary)
    for failure in checks.failures:
        benchmark.say(failure)
    benchmark.finish(**parameters, compute_threads=compute_threads(), checks=checks.to_json())
    return 1 if checks.failures else 0
