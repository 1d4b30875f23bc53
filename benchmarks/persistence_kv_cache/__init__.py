"""Benchmarks of blocks on disk: ways to place their bytes, and the server's disk tier compared with plain pread and
pwrite.

`python -m benchmarks.persistence_kv_cache.bench_placement` compares placements within one process, without a server;
`bench_disk_tier` measures a real server. They share `files` (aligned memory, cold caches, space) and the harness of
`benchmarks.remote_kv_cache`; `placements` has the candidates; `tables` and `charts` make the tables and charts of the
documents.
"""
