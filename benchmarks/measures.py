"""What each benchmark measures: the folders and files whose change makes its results stale, and no other.

A path that is missing here, or is gone from the tree, would leave old figures standing as if they were new, so
tests/unit/test_measures.py holds that every benchmark has a row and that every path is there. A folder is named rather
than its files where the benchmark passes through most of them: files are moved and split more often than folders.
"""

from __future__ import annotations

from typing import Final

# A shard without a disk; and with it what a client's call passes through until the blocks are in its memory.
SHARD: Final = ("cext", "kvstore/wire", "kvstore/shard", "kvstore/store", "kvstore/pages.py")
CALLS: Final = (*SHARD, "kvstore_client/client.py", "kvstore_client/_calls", "kvstore_client/_links")
SHARED: Final = (*CALLS, "kvstore_client/memory.py")
CONNECTOR: Final = (*SHARED, "kvstore_client/engine", "kvstore_client/vllm")
PROXY: Final = (*CONNECTOR, "kvstore_serving/proxy")
COPIES: Final = ("cext", "kvstore_client/engine", "kvstore_client/vllm")  # on one host: no server takes part
LOAD: Final = ("kvstore_serving/load",)
PLANNER: Final = ("kvstore_serving/planning", *LOAD)
PIPELINE: Final = (*CALLS, "kvstore_serving/planning/pipeline.py")

# By the name of a benchmark's module, or of a step of `scripts/on_gpu.sh` that is tests.
MEASURES: Final[dict[str, tuple[str, ...]]] = {
    "test_memory_io": COPIES,
    "test_zmq_transfer": ("benchmarks/remote_kv_cache/baseline",),  # libzmq: none of the product
    "test_server": CALLS,
    "test_shared_memory": SHARED,
    "test_small_blocks": CALLS,
    "test_processor_time": CALLS,
    "test_clients": CALLS,
    "test_many_clients": CALLS,
    "test_cores": SHARED,
    "test_connections": CALLS,
    "test_nixl": CALLS,
    "test_logins": (*CALLS, "kvstore/auth"),
    "test_block_macs": SHARED,
    "test_tls": (*CALLS, "kvstore/tls"),
    "test_beside_python": CALLS,
    "test_lookup": CALLS,
    "test_waiters": (*CALLS, "kvstore_client/promises.py"),
    "test_key_hashing": ("cext", "kvstore_client/keys.py"),
    "test_sharding": (*CALLS, "kvstore/cluster"),
    "test_swap": COPIES,
    "test_disk_tier": (*CALLS, "kvstore/disk"),
    "test_placement": tuple(f"benchmarks/persistence_kv_cache/{name}.py" for name in ("placements", "stores", "files")),
    "eviction": SHARD,
    "chains": (*CALLS, "kvstore_client/keys.py"),
    "cluster_sim": ("cext", "kvstore/cluster"),
    "batch_latency": (*CALLS, "kvstore/cluster"),
    "test_transfer_out": CONNECTOR,
    "test_transfer_in": CONNECTOR,
    "test_long_prefill": CONNECTOR,
    "test_documents": CONNECTOR,
    "test_slow_store": CONNECTOR,
    "test_hooks": CONNECTOR,
    "test_hand_over": CONNECTOR,
    "test_request_time": CONNECTOR,
    "test_layer_parts": CONNECTOR,
    "test_proxy_links": PROXY,
    "test_proxy_capacity": ("kvstore_serving/proxy", "kvstore_serving/sse.py"),
    "test_proxy_frozen": ("kvstore_serving/proxy", "kvstore_serving/sse.py"),
    "test_apart": CONNECTOR,
    "test_conversation": (*PROXY, *LOAD),
    "test_faults": PROXY,
    "test_load_generators": LOAD,
    "test_demo": (*CONNECTOR, "examples/demo.py"),
    "test_simulator": PLANNER,
    "test_parallelism": PLANNER,
    "test_headline": PLANNER,
    "test_predicted": (*PROXY, *PLANNER),
    "test_predicted_apart": (*PROXY, *PLANNER),
    "test_interference": (*PROXY, *LOAD),
    "test_pipeline": PIPELINE,
    "test_pushed": PIPELINE,
    "test_tokens": PIPELINE,
    "copies": COPIES,
    "worker": CONNECTOR,
    "memcheck": CONNECTOR,
    "test_first_token": CONNECTOR,
    "test_vllm": CONNECTOR,
    "vllm_tests": CONNECTOR,
}


def measured_by(benchmark: str) -> tuple[str, ...]:
    """The paths that a benchmark measures; none if there is no such benchmark. benchmark: its name or its module's."""
    return MEASURES.get(benchmark.rpartition(".")[2], ())
