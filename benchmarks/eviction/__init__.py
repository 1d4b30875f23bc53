"""Compares eviction policies by their hit rate at several capacities on traces of requests. It also shows the
clairvoyant optimum.

`python -m benchmarks.eviction --trace FILE` replays a trace through a shard of the server without its sockets
(`simulator`), and through textbook policies (`baselines`). With `--live`, it also replays the trace through a real
server (`live`). `traces` turns traces in Mooncake's format into chains, `synthetic` makes traces, and `cost` times the
policies. `tables` and `charts` make the tables and charts of the terminal and the documents.
"""
