"""Measurements, and `benchmarks.draw`, which makes charts and tables of what they left in `benchmarks/results`."""
