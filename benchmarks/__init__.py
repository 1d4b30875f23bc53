"""Benchmarks, and `benchmarks.draw`, which makes charts and tables from their results in `benchmarks/results`."""
