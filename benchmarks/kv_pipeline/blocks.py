"""The blocks of the decoder's KV in the store: one block for each layer and sequence."""

from __future__ import annotations

from typing import Final

from benchmarks.kv_pipeline.decoder import Shape
from kvstore_client import KVStoreClient, Namespace

TIMEOUT_S: Final = 60.0


def namespace(shape: Shape) -> Namespace:
    """The namespace of blocks of this shape."""
    return Namespace(
        model=f"kv-pipeline-{shape.context}", dtype="float32", block_tokens=shape.context, block_bytes=shape.block_bytes
    )


def keys_of(shape: Shape, layer: int) -> list[bytes]:
    """Return the keys of a layer's blocks, one for each sequence."""
    return [f"layer {layer:04d} seq {sequence:04d}".encode() for sequence in range(shape.batch)]


def connect(endpoint: str, shape: Shape, shared_memory: bool) -> KVStoreClient:
    """Return a client for these blocks."""
    return KVStoreClient(endpoint, namespace(shape), timeout_s=TIMEOUT_S, shared_memory=shared_memory)
