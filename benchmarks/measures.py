"""The folders and files that each benchmark measures. A benchmark's results become stale only when the code of one of
its paths changes (`code_changes.py`).

If a path were missing here or no longer existed, outdated figures would count as current. So
tests/unit/test_measures.py checks that every benchmark has a row and that every path exists. If a benchmark uses most
files of a folder, the folder is listed instead of the files, because files are moved and split more often than folders.
"""

from __future__ import annotations

from typing import Final

# The first list is the code of a shard without a disk. The second adds the code that a client's call uses until the
# blocks are in the client's memory.
SHARD: Final = ("cext", "kvstore/wire", "kvstore/shard", "kvstore/store", "kvstore/huge_pages.py")
CALLS: Final = (*SHARD, "kvstore_client/client.py", "kvstore_client/_calls", "kvstore_client/_links")
SHARED: Final = (*CALLS, "kvstore_client/memory.py")
CONNECTOR: Final = (*SHARED, "kvstore_client/engine", "kvstore_client/vllm")
PROXY: Final = (*CONNECTOR, "kvstore_serving/proxy")
COPIES: Final = ("cext", "kvstore_client/engine", "kvstore_client/vllm")  # copies on one host, without a server
LOAD: Final = ("kvstore_serving/load",)
PLANNER: Final = ("kvstore_serving/planning", *LOAD)
PIPELINE: Final = (*CALLS, "kvstore_serving/planning/pipeline.py")

# A key is the name of a benchmark's module, or of a step of `scripts/on_gpu.sh` that runs tests.
MEASURES: Final[dict[str, tuple[str, ...]]] = {
    "bench_memory_io": COPIES,
    "bench_zmq_transfer": ("benchmarks/remote_kv_cache/baseline",),  # measures libzmq, no code of the product
    "bench_server": CALLS,
    "bench_shared_memory": SHARED,
    "bench_small_blocks": CALLS,
    "bench_processor_time": CALLS,
    "bench_clients": CALLS,
    "bench_many_clients": CALLS,
    "bench_cores": SHARED,
    "bench_connections": CALLS,
    "bench_nixl": CALLS,
    "bench_logins": (*CALLS, "kvstore/auth"),
    "bench_block_macs": SHARED,
    "bench_tls": (*CALLS, "kvstore/tls"),
    "bench_beside_python": CALLS,
    "bench_lookup": CALLS,
    "bench_waiters": (*CALLS, "kvstore_client/promises.py"),
    "bench_key_hashing": ("cext", "kvstore_client/keys.py"),
    "bench_sharding": (*CALLS, "kvstore/cluster"),
    "bench_swap": COPIES,
    "bench_disk_tier": (*CALLS, "kvstore/disk"),
    "bench_placement": tuple(
        f"benchmarks/persistence_kv_cache/{name}.py" for name in ("placements", "stores", "files")
    ),
    "eviction": SHARD,
    "chains": (*CALLS, "kvstore_client/keys.py"),
    "cluster_sim": ("cext", "kvstore/cluster"),
    "batch_latency": (*CALLS, "kvstore/cluster"),
    "bench_transfer_out": CONNECTOR,
    "bench_transfer_in": CONNECTOR,
    "bench_long_prefill": CONNECTOR,
    "bench_documents": CONNECTOR,
    "bench_slow_store": CONNECTOR,
    "bench_hooks": CONNECTOR,
    "bench_hand_over": CONNECTOR,
    "bench_request_time": CONNECTOR,
    "bench_layer_parts": CONNECTOR,
    "bench_layer_loads": CONNECTOR,
    "bench_proxy_links": PROXY,
    "bench_proxy_capacity": ("kvstore_serving/proxy", "kvstore_serving/sse.py"),
    "bench_proxy_frozen": ("kvstore_serving/proxy", "kvstore_serving/sse.py"),
    "bench_apart": CONNECTOR,
    "bench_conversation": (*PROXY, *LOAD),
    "bench_faults": PROXY,
    "bench_load_generators": LOAD,
    "bench_demo": (*CONNECTOR, "examples/demo.py"),
    "bench_simulator": PLANNER,
    "bench_parallelism": PLANNER,
    "bench_headline": PLANNER,
    "bench_predicted": (*PROXY, *PLANNER),
    "bench_predicted_apart": (*PROXY, *PLANNER),
    "bench_interference": (*PROXY, *LOAD),
    "bench_pipeline": PIPELINE,
    "bench_pushed": PIPELINE,
    "bench_tokens": PIPELINE,
    "copies": COPIES,
    "worker": CONNECTOR,
    "memcheck": CONNECTOR,
    "bench_first_token": CONNECTOR,
    "bench_vllm": CONNECTOR,
    "vllm_tests": CONNECTOR,
}


def measured_by(benchmark: str) -> tuple[str, ...]:
    """Return the paths that a benchmark measures, or no paths if there is no such benchmark. `benchmark`: its name, or
    the name of its module."""
    return MEASURES.get(benchmark.rpartition(".")[2], ())
