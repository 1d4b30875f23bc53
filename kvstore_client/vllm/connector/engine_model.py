"""Gets the models of the worker to which a connector belongs.

vLLM does not pass its models to a connector. But a worker makes its connector itself, so the worker can be found among
the callers of the connector's constructor.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore_client.engine.paged.weights import Fingerprints, watches

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")

RPC = "kvstore_new_weights"


def calling_worker() -> Any:
    """Return the vLLM worker that is among the callers, or None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if callable(getattr(type(caller), "get_model", None)) and hasattr(caller, "model_runner"):
            return caller
        frame = frame.f_back
    return None


def offer_naming(worker: Any) -> None:
    """Add `new_weights` to a worker as ``kvstore_new_weights``, so that `collective_rpc` finds it."""
    if worker is not None and not hasattr(worker, RPC):
        setattr(worker, RPC, new_weights)


def fingerprints_of(worker: Any, config: VllmConfig) -> Fingerprints | None:
    """Return an object that takes fingerprints of a worker's weights. If the weights cannot be checked, log that and
    return None."""
    why = None
    if worker is None:
        why = "this vLLM makes its connectors in another way than vLLM 0.28 to 0.33, with which kvstore is tested"
    elif config.parallel_config.enable_eplb:
        why = "--enable-eplb moves experts while the engine runs"
    elif _are_moved(config):
        why = "they are moved between host and device while the engine runs"
    else:
        try:
            found = Fingerprints(lambda: _models(worker), awake=are_awake)
            found.take().value()
            return found
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    logger.warning(
        "kvstore: the weights cannot be read: %s. After a reset of the engine's cache nothing is shared any more, "
        "unless the option weights_version says that the weights never change. Weights that change without a reset "
        "are not noticed",
        why,
    )
    return None


def _models(worker: Any) -> Sequence[torch.nn.Module]:
    draft = getattr(worker, "get_draft_model", lambda: None)()
    models = [worker.get_model(), draft]
    return [model for model in models if hasattr(model, "named_modules")]


def _are_moved(config: VllmConfig) -> bool:
    offload = getattr(config, "offload_config", None)
    if offload is None:
        return False
    return bool(offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0)


def are_awake() -> bool:
    """Return whether the weights are in memory. They are not while vLLM's sleep mode has freed their memory."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(cumem.CuMemAllocator, "instance", None) if cumem is not None else None
    if allocator is None:
        return True
    return not any(each.is_asleep for each in allocator.pointer_to_data.values() if each.tag == "weights")


def new_weights(version: str) -> None:
    """See `kvstore_client.vllm.new_weights`."""
    if not isinstance(version, str) or not version:
        raise ValueError(f"kvstore: the name of the weights is {version!r}; expected a name such as 'step-1200'")
    if not watches:
        raise RuntimeError(
            "kvstore: this process has no worker with KVStoreConnector; call new_weights in the engine's workers, with "
            "collective_rpc('kvstore_new_weights', args=(version,))"
        )
    for watch in list(watches):
        watch.rename(version)
    logger.info("kvstore: the weights of this rank are called %s from now on", version)
