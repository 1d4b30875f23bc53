"""The benchmarks. `benchmarks.draw` makes charts and tables from their results in `benchmarks/results`."""
