"""Checks that other processes compute the same block hashes as this one.

A block's key is the engine's own hash of the block's tokens and of everything before them. If two processes hash
differently, neither ever finds a block that the other has stored. So the hashes are checked while the engine starts,
and the namespace includes a probe of the engine's hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from kvstore_client import Namespace
from kvstore_client.vllm.shared.releases import first_parent, hashes_reproducibly

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROBE_TOKENS = tuple(range(1, 17))


def check_hash_reproducible(vllm_config: VllmConfig) -> None:
    """Raise ValueError if this process hashes with a random seed, because no other process has that seed."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    if first_parent(function) == first_parent(function):
        return
    lost = "No engine would find the blocks of another engine, or its own blocks after a restart."
    if hashes_reproducibly():
        raise ValueError(
            f"kvstore: --prefix-caching-hash-algo is {algorithm!r}, whose block hashes differ in every process unless "
            f"PYTHONHASHSEED is set. {lost} Set --prefix-caching-hash-algo sha256 (or sha256_cbor), or set "
            "PYTHONHASHSEED to the same value for every engine"
        )
    raise ValueError(
        "kvstore: in this release of vLLM, block hashes differ in every process unless PYTHONHASHSEED is set. "
        f"{lost} Set PYTHONHASHSEED to the same value for every engine"
    )


def hash_probe(vllm_config: VllmConfig) -> str:
    """Return a probe of how this process hashes: the algorithm, and a digest of the hash of a fixed block. Two
    processes hash alike if and only if their probes are equal. The probe does not reveal the seed, and making it does
    not change vLLM's own state."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    block = hash_block_tokens(function, first_parent(function), PROBE_TOKENS, (("cache_salt", "kvstore"),))
    return f"{algorithm}-{hashlib.sha256(block).hexdigest()[:16]}"


def check_same_hash(vllm_config: VllmConfig, namespaces: Iterable[Namespace]) -> None:
    """Raise ValueError if a worker hashes differently from this process. The scheduler's process calls this with the
    workers' namespaces."""
    mine = hash_probe(vllm_config)
    for namespace in namespaces:
        if (theirs := namespace.extra["hash"]) != mine:
            raise ValueError(
                f"kvstore: the worker of rank {namespace.rank} and the scheduler hash blocks differently ({theirs} and "
                f"{mine}), so no block that the worker stores would ever be found. Start all processes of the engine, "
                "on every node, with the same PYTHONHASHSEED (or all without it) and the same version of Python"
            )
