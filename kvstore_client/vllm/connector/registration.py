"""Makes the engine's entry in the directory of `kvstore proxy`. The entry describes the engine, and says where its API
and its KV events are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from kvstore.cluster.members import DirectoryError
from kvstore_client.engine.block_names import BlockNames
from kvstore_client.engine.directory import EngineRecord, Registered
from kvstore_client.vllm.connector.options import ConnectorOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def register(
    config: VllmConfig,
    transfer: KVTransferConfig,
    options: ConnectorOptions,
    present: Callable[[], tuple[str, BlockNames]],
) -> Registered:
    """Register this engine for proxies while it runs. Proxies find out themselves when the engine is ready. `present`:
    a function that returns the name of the weights and how the engine names its blocks. A background thread calls this
    function. Raises `ValueError` if the engine cannot be registered."""
    prefill: tuple[Literal["prefill"], ...] = ("prefill",) if transfer.is_kv_producer else ()
    decode: tuple[Literal["decode"], ...] = ("decode",) if transfer.is_kv_consumer else ()
    publisher, replay = "", ""
    published = config.kv_events_config
    # All engines of a data-parallel group have the same URL, so a proxy cannot choose among them by their blocks.
    if (
        published is not None
        and published.enable_kv_cache_events
        and published.publisher == "zmq"
        and config.parallel_config.data_parallel_size == 1
    ):
        publisher = as_reached(published.endpoint, options.engine_url)
        replay = as_reached(published.replay_endpoint or "", options.engine_url)
    record = EngineRecord(
        options.engine_url,
        (*prefill, *decode),
        config.model_config.model,
        options.weights_version,
        config.parallel_config.tensor_parallel_size,
        config.parallel_config.pipeline_parallel_size,
        publisher,
        replay,
    )
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", options.engine_url.partition("://")[2])[:64]

    def latest(record: EngineRecord) -> EngineRecord:
        weights, names = present()
        return msgspec.structs.replace(
            record, weights=weights, namespaces=names.namespaces, generation=names.generation
        )

    try:
        return Registered(options.engines, name, record, latest=latest)
    except (DirectoryError, msgspec.ValidationError) as error:
        raise ValueError(f"kvstore: the engine cannot be registered at {options.engines}: {error}") from None


def as_reached(endpoint: str, engine_url: str) -> str:
    """Return the address at which other hosts reach a socket that an engine binds to `endpoint`. If the socket is bound
    to all interfaces, the host is taken from the engine's URL. The address is empty if only the engine's own process
    reaches the socket."""
    if endpoint.startswith("inproc:"):
        return ""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or host not in ("*", "0.0.0.0", "[::]"):
        return endpoint
    reached = urlsplit(engine_url).hostname or ""
    return f"{scheme}{separator}{f'[{reached}]' if ':' in reached else reached}{colon}{port}"
