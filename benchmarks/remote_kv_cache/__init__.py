"""What the store reaches, beside the physical limit and the peers of the same run.

Each module is a program: `python -m benchmarks.remote_kv_cache.NAME --help`. The pieces they share: `shapes` (what is
moved), `harness` (rounds, options, the JSON), `report` (statistics and tables), `processes` (server, Redis, peers),
`plain` (the plain socket, the limit of everything over TCP) and `transfers` (the operations that are compared).
"""
