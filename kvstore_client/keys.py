"""Names of blocks: the namespace they belong to, and their keys as the wire wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore._cext import prefix_keys
from kvstore.wire import MAX_BLOCK_BYTES, MAX_KEY_BYTES, MIN_KEY_BYTES, NAMESPACE_VERSION, namespace_id
from kvstore_client.errors import KeySizeMismatch

__all__ = ["KeyArray", "Keys", "Namespace", "pack_keys", "prefix_keys"]

Keys: TypeAlias = "Sequence[bytes] | npt.NDArray[np.uint8]"
KeyArray: TypeAlias = "npt.NDArray[np.uint8]"


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must agree for two blocks' bytes to be interchangeable. Equal fields: the same namespace.

    `block_bytes` is the size of every block of it; `extra` holds whatever else must agree (adapter, quantisation …).
    """

    model: str
    dtype: str
    block_tokens: int
    block_bytes: int
    layout: str = "block"
    rank: int = 0
    world: int = 1
    tenant: str = ""
    extra: dict[str, str] = {}
    version: int = NAMESPACE_VERSION

    def __post_init__(self) -> None:
        for name in ("block_tokens", "block_bytes", "rank", "world", "version"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Namespace.{name}={value!r}: expected a whole number")
        for name in ("model", "dtype", "layout", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"Namespace.{name}={value!r}: expected a string")
        if not 1 <= self.block_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"Namespace.block_bytes={self.block_bytes}: expected 1 to {MAX_BLOCK_BYTES}")
        if self.block_tokens < 1:
            raise ValueError(f"Namespace.block_tokens={self.block_tokens}: expected at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"Namespace.rank={self.rank}, world={self.world}: expected 0 <= rank < world")

    def canonical(self) -> bytes:
        """Canonical JSON: keys sorted, no spaces, UTF-8."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def id(self) -> str:
        """xxh3-128 of the canonical JSON, in hexadecimal."""
        return namespace_id(self.canonical()).hex()


def pack_keys(keys: Keys) -> KeyArray:
    """`keys` as one C-contiguous `(n, key_bytes)` uint8 array; no copy when it is one already.

    Raises `KeySizeMismatch` for keys of unequal length or outside 8 to 64 bytes, `ValueError` for another array,
    `TypeError` for anything but bytes.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2:
            raise ValueError(f"keys: an array of {keys.dtype} {keys.shape}: expected uint8 (n, key_bytes)")
        packed = np.ascontiguousarray(keys)
    else:
        if isinstance(keys, bytes | bytearray | memoryview | str):
            raise TypeError(f"keys: a single {type(keys).__name__}: expected a sequence of bytes objects")
        if not len(keys):
            return np.empty((0, MIN_KEY_BYTES), dtype=np.uint8)
        key_bytes = len(keys[0])
        try:
            joined = b"".join(keys)
        except TypeError as error:
            raise TypeError(f"keys: {error}: expected bytes objects") from None
        if len(joined) != key_bytes * len(keys) or set(map(len, keys)) != {key_bytes}:
            lengths = sorted(set(map(len, keys)))
            raise KeySizeMismatch(f"keys of {lengths} bytes: expected one length for all keys of a namespace")
        packed = np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), key_bytes)
    if len(packed) and not MIN_KEY_BYTES <= packed.shape[1] <= MAX_KEY_BYTES:
        raise KeySizeMismatch(f"keys of {packed.shape[1]} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return packed
