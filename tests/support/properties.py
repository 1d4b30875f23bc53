"""Budgets of property tests, as multiples of the Hypothesis profile in use (tests/conftest.py has the profiles)."""

from __future__ import annotations

from hypothesis import settings


def examples(factor: float) -> int:
    """So many examples, for `@settings(max_examples=examples(0.3))`: a share of the profile's."""
    return max(1, round(settings().max_examples * factor))
