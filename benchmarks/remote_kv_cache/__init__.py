"""Benchmarks of the store over TCP, compared with the physical limit and with other systems in the same run.

Each `bench_*` module is a program: `python -m benchmarks.remote_kv_cache.NAME --help`. They share `shapes` (the blocks
that are moved), `harness` (rounds, options, the JSON), `report` (statistics and tables) and `processes` (server, Redis,
peers). `plain` has the plain socket, the limit of everything over TCP, and `transfers` the operations that are
compared. For real engines there are `engines` with `engine_process` (vLLM in its own process), `engine_models` and
`engine_checks`.
"""
