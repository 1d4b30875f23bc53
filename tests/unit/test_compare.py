"""The comparison of two checkouts."""

from __future__ import annotations

import pytest

from benchmarks.compare import median_interval


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (9, (2, 8)), (10, (2, 9)), (15, (4, 12)), (20, (6, 15))])
def test_the_interval_of_a_median_has_the_ranks_of_printed_tables(count: int, ranks: tuple[int, int]) -> None:
    """Of the 95 % interval, as in the tables of order statistics for a median (binomial with p = 1/2)."""
    assert median_interval([float(number) for number in range(count, 0, -1)]) == ranks
