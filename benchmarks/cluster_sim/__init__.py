"""Simulates clusters too large for one machine: placement and changes of up to 1000 nodes, on a trace of requests.

`python -m benchmarks.cluster_sim --trace FILE` replays a trace through a cluster of the server's block indices
(`cluster`), placed by the server's own placement, while nodes join, leave and crash (`scenarios`), and looks at how
evenly keys and reads lie (`balance`); `tables` and `charts` hold what the terminal and the documents show.
`python -m benchmarks.cluster_sim.batch_latency` measures, on real servers, what it costs to ask many shards.
"""
