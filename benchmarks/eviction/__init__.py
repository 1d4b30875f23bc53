"""Compares eviction policies: hit rate against capacity on traces of requests, beside the clairvoyant optimum.

`python -m benchmarks.eviction --trace FILE` replays a trace through a shard of the server, without its sockets
(`simulator`), and through textbook policies (`baselines`); with `--live`, through a real server too (`live`).
`traces` makes chains of traces in Mooncake's format, `synthetic` makes traces, `cost` times the policies; `tables` and
`charts` hold what the terminal and the documents show.
"""
