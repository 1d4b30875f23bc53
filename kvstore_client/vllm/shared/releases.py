"""What differs between the supported releases of vLLM, 0.28 to 0.33. All other modules use vLLM as if it had one
release.

A difference is found by looking for the feature, never by comparing version numbers. So a release that moves a feature
back, or a build of a commit between releases, works too. `docs/vllm.md` says which releases are tested.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")


def _found(module: str, name: str) -> Any:
    """Return a part of vLLM; None if this release lacks it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


# Since 0.32: where cached tokens came from. Earlier releases do not ask.
CacheHitSource: Final = _found("vllm.v1.metrics.cache_hit_source", "CacheHitSource")

# Modules that take a second to import. So they are imported when they are needed.
_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_HASHES: Final = "vllm.v1.core.kv_cache_utils"


@functools.cache
def transfer_results() -> Any:
    """Since 0.30, this is the class of the results of transfers, which name the requests whose blocks could not be
    loaded. Earlier releases ask for the ids of such blocks, which works only for a cache with one group. The result is
    then None."""
    return _found(_CONNECTOR, "KVConnectorTransferResults")


@functools.cache
def binds_manager() -> bool:
    """Return whether the scheduler gives its connector the manager of its cache, as it does since 0.30. Earlier
    releases give it only the manager's pool of blocks."""
    return hasattr(_found(_CONNECTOR, "KVConnectorBase_V1"), "bind_kv_cache_manager")


class BlockTables(NamedTuple):
    """The block tables of a step's requests.

    * `block_ids(request_id)`: the ids of the request's blocks, by group; None if the request is not in the step.
    * `boundary_states`: states at the ends of blocks that the connector may save, by request.
    """

    block_ids: Callable[[str], Sequence[Sequence[int]] | None]
    boundary_states: Mapping[str, Sequence[tuple[int, int, int]]]


def block_tables(output: SchedulerOutput, manager: KVCacheManager | None) -> BlockTables | None:
    """Return the block tables of the step that was just scheduled; None if the engine gives its connector none."""
    if not hasattr(output, "kv_connector_block_state"):  # before 0.29
        return BlockTables(manager.get_block_ids, {}) if manager is not None else None
    state = output.kv_connector_block_state
    if state is None:
        return None
    block_ids = state.get_block_ids if hasattr(state, "get_block_ids") else state.block_ids.get  # 0.29: a dict
    return BlockTables(block_ids, state.boundary_state_offloads)


def manager_of(pool: BlockPool) -> KVCacheManager:
    """Return the manager of this pool, which the calling scheduler has. Raises ValueError if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        manager = getattr(frame.f_locals.get("self"), "kv_cache_manager", None)
        if getattr(manager, "block_pool", None) is pool:
            return manager
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        "kvstore: this scheduler has no manager of its cache where vLLM 0.28 to 0.33 have it. Use one of these releases"
    )


def failed_requests(output: KVConnectorOutput) -> Iterable[str]:
    """Return the requests whose blocks could not be loaded, as far as workers report requests instead of blocks."""
    return getattr(output, "failed_recving", None) or ()


def hashes_reproducibly() -> bool:
    """Return whether block hashes begin with a seed that is the same in all processes, unless the hash is not
    cryptographic. In 0.28, the seed is random unless PYTHONHASHSEED is set."""
    return _found(_HASHES, "resolve_none_hash_seed") is not None


def first_parent(function: Callable[[Any], bytes]) -> BlockHash:
    """Return the hash that stands before a prompt's first block, as `init_none_hash` makes it. It differs from call to
    call if it differs from process to process."""
    from vllm.v1.core.kv_cache_utils import BlockHash

    if hashes_reproducibly():
        return BlockHash(function(_found(_HASHES, "resolve_none_hash_seed")(function)))
    seed = os.getenv("PYTHONHASHSEED")
    return BlockHash(os.urandom(32) if seed is None else function(seed))


def event_extra_keys(extra_keys: tuple[Any, ...] | None) -> list[tuple[Any, ...] | None] | None:
    """Return the extra keys of one block in the form of KV events. Since 0.31, the extra keys of a hash have tags,
    which events leave out."""
    untagged = _found(_HASHES, "to_event_extra_keys")
    if untagged is None:
        return None if extra_keys is None else [extra_keys]
    keys: list[tuple[Any, ...] | None] | None = untagged([extra_keys])
    return keys


def hash_tokens(cache: KVCacheConfig, config: VllmConfig) -> int | None:
    """Return the number of tokens that one hash covers; None if it is a group's block size."""
    if hasattr(cache, "hash_block_size"):  # since 0.32
        tokens: int | None = cache.hash_block_size
    else:
        _, tokens = _found(_HASHES, "resolve_kv_cache_block_sizes")(cache, config)
    return tokens


def layer_specs(spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    """Return the specs of a group's layers."""
    layers = getattr(spec, "kv_cache_specs", None)  # only in a group whose layers have different specs
    return (spec,) if layers is None else layers.values()


def tokens_per_state(spec: KVCacheSpec) -> Any:
    """Return for how many tokens a layer keeps one state; 1 for attention without compression."""
    return getattr(spec, "tokens_per_state", None) or getattr(spec, "compress_ratio", 1)


def made(struct: type[T], **fields: Any) -> T:
    """Make a message of vLLM, without the fields that this release lacks."""
    known = struct.__struct_fields__  # type: ignore[attr-defined]
    return struct(**{name: value for name, value in fields.items() if name in known})


def host_register() -> tuple[Callable[[int, int], bool], Callable[[int], None]]:
    """Return the two functions that page-lock memory and unlock it, as `kvstore_client.engine.paged.device` wants them.
    Before 0.32, vLLM has no such functions, but calls the runtime of CUDA or ROCm, as this does."""
    module = "vllm.v1.kv_offload.cpu.host_register"
    lock, unlock = _found(module, "host_register"), _found(module, "host_unregister")
    return (lock, unlock) if lock is not None and unlock is not None else (_lock, _unlock)


def _lock(ptr: int, num_bytes: int) -> bool:
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(ptr, num_bytes, 0))
    if code:
        logger.warning("kvstore: the driver page-locked no memory (code %d); copies are slower", code)
    return not code


def _unlock(ptr: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(ptr)
