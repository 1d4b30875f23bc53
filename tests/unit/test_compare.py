"""The benchmark that compares two checkouts."""

from __future__ import annotations

import pytest

from benchmarks.compare import median_interval


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (9, (2, 8)), (10, (2, 9)), (15, (4, 12)), (20, (6, 15))])
def test_the_medians_interval_has_the_ranks_of_printed_tables(count: int, ranks: tuple[int, int]) -> None:
    """The expected ranks are from tables of order statistics: those of the 95 % interval for a median (binomial with p
    = 1/2)."""
    assert median_interval([float(number) for number in range(count, 0, -1)]) == ranks
