"""Benchmarks of the store over TCP, beside the physical limit and other systems in the same run.

Each `test_*` module is a program: `python -m benchmarks.remote_kv_cache.NAME --help`. They share: `shapes` (the blocks
that are moved), `harness` (rounds, options, the JSON), `report` (statistics and tables), `processes` (server, Redis,
peers), `plain` (the plain socket, the limit of everything over TCP), `transfers` (the operations that are compared);
and for real engines `engines` with `engine_process` (vLLM in a process of its own), `engine_models` and
`engine_checks`.
"""
