"""Benchmarks of blocks on disk: ways to place their bytes, and the server's disk tier beside plain pread and pwrite.

`python -m benchmarks.persistence_kv_cache.test_placement` compares placements within one process, without a server;
`test_disk_tier` measures a real server. They share `files` (aligned memory, cold caches, space) and the harness of
`benchmarks.remote_kv_cache`; `placements` holds the candidates, `tables` and `charts` what the documents show.
"""
