"""Numbers of examples for property tests, as multiples of the Hypothesis profile in use. tests/conftest.py defines the
profiles."""

from __future__ import annotations

from hypothesis import settings


def examples(factor: float) -> int:
    """Return `factor` times the profile's number of examples, at least 1: `@settings(max_examples=examples(0.3))`."""
    return max(1, round(settings().max_examples * factor))
