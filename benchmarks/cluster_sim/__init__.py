"""Simulates clusters of up to 1000 nodes, which are too large for one machine, with the requests of a trace. It shows
how evenly blocks are placed, and what changes of the cluster cost.

`python -m benchmarks.cluster_sim --trace FILE` replays a trace through a simulated cluster (`cluster`), which uses the
server's own block indices and placement. Meanwhile nodes join, leave and crash (`scenarios`). It also measures how
evenly keys and reads are spread (`balance`). `tables` and `charts` make the tables and charts of the terminal and the
documents. `python -m benchmarks.cluster_sim.batch_latency` measures the cost of requests to many shards on real
servers.
"""
