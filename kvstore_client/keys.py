"""The names of blocks: namespaces, prefix keys of tokens, and keys packed as the wire takes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import _cext
from kvstore.wire import MAX_BLOCK_BYTES, MAX_KEY_BYTES, MIN_KEY_BYTES, NAMESPACE_VERSION, namespace_id
from kvstore_client import _arguments
from kvstore_client.errors import KeySizeMismatch

__all__ = ["DTYPES", "KeyArray", "Keys", "Namespace", "TokenIds", "pack_keys", "prefix_keys"]

Keys: TypeAlias = "Iterable[bytes] | npt.NDArray[np.uint8]"
KeyArray: TypeAlias = "npt.NDArray[np.uint8]"
TokenIds: TypeAlias = "Iterable[int] | npt.NDArray[np.integer[Any]]"

# Bytes of one element, for the names of dtypes that NumPy, torch and engines use.
DTYPES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
}
_MAX_TOKEN: Final = (1 << 32) - 1


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that must agree for the bytes of two blocks to be interchangeable. Namespaces with equal fields are
    the same namespace. Immutable and hashable.

    Fields: `model`; `dtype`, one of `DTYPES`; `block_tokens`, tokens per block; `block_bytes`, the size of every block;
    `layout`, how the bytes of a block are ordered; `rank` of `world`, if an engine splits a block over several
    processes; `tenant`; `extra`, names and values of anything else that must agree (adapter, quantisation …).

    For most models `block_bytes` follows from the model's shape: see `for_model`. Raises `TypeError` for a field of a
    wrong type and `ValueError` for one outside its range, naming the field.
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
        for name, least, most in (
            ("block_tokens", 1, None),
            ("block_bytes", 1, MAX_BLOCK_BYTES),
            ("world", 1, None),
            ("rank", 0, None),
            ("version", 1, None),
        ):
            number = _arguments.whole_number(f"Namespace.{name}", getattr(self, name), least, most)
            msgspec.structs.force_setattr(self, name, number)  # NumPy's integers become Python's
        for name in ("model", "dtype", "layout", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"Namespace.{name}={value!r}: a {type(value).__name__}: expected a string")
        _itemsize("Namespace.dtype", self.dtype)
        if self.rank >= self.world:
            raise ValueError(f"Namespace.rank={self.rank}: expected less than world={self.world}")
        if not isinstance(self.extra, dict) or not all(
            isinstance(text, str) for pair in self.extra.items() for text in pair
        ):
            raise TypeError(f"Namespace.extra={self.extra!r}: expected a dict of strings to strings")
        msgspec.structs.force_setattr(self, "extra", dict(self.extra))  # the caller may change its own dict later

    def __hash__(self) -> int:
        return hash(self.canonical())

    @classmethod
    def for_model(
        cls, name: str, *, layers: int, kv_heads: int, head_size: int, dtype: str, block_tokens: int, **rest: Any
    ) -> Namespace:
        """The namespace of a model whose layers all keep keys and values of one shape.

        `block_bytes` = `layers` * 2 * `block_tokens` * `kv_heads` * `head_size` * bytes of a `dtype` element: the
        layout `(layers, 2, block_tokens, kv_heads, head_size)`. With tensor parallelism, give the `kv_heads` that one
        rank holds, and `rank` and `world`. `rest`: further fields of a `Namespace`.
        """
        if "block_bytes" in rest:
            raise TypeError("block_bytes: it is computed from the model's shape; Namespace(...) takes it as given")
        shape = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size, "block_tokens": block_tokens}
        block_bytes = 2 * _itemsize("dtype", dtype)
        for field, value in shape.items():
            block_bytes *= _arguments.whole_number(field, value, 1)
        if block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"{', '.join(f'{field}={value}' for field, value in shape.items())}, dtype={dtype!r}: a block of "
                f"{block_bytes} bytes: expected at most {MAX_BLOCK_BYTES}; choose fewer block_tokens"
            )
        return cls(model=name, dtype=dtype, block_tokens=block_tokens, block_bytes=block_bytes, **rest)

    def keys(self, token_ids: TokenIds) -> KeyArray:
        """The keys of a prompt's full blocks, head first: `prefix_keys(token_ids, self.block_tokens)`."""
        return prefix_keys(token_ids, self.block_tokens)

    def canonical(self) -> bytes:
        """Canonical JSON: keys sorted, no spaces, UTF-8."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def id(self) -> str:
        """xxh3-128 of the canonical JSON, in hexadecimal."""
        return namespace_id(self.canonical()).hex()


def _itemsize(name: str, dtype: object) -> int:
    if not isinstance(dtype, str):
        raise TypeError(f"{name}={dtype!r}: a {type(dtype).__name__}: expected a string, such as 'bfloat16'")
    itemsize = DTYPES.get(dtype)
    if itemsize is None:
        raise ValueError(f"{name}={dtype!r}: expected one of {', '.join(DTYPES)}")
    return itemsize


def prefix_keys(
    token_ids: TokenIds, block_tokens: int, seed: bytes = b"", parent: bytes | KeyArray | None = None
) -> KeyArray:
    """The chain of prefix keys of a token sequence: row i names block i and everything before it.

    `token_ids`: n tokens, each 0 to 2**32 - 1: a list, a 1-D array or CPU tensor of integers, or any iterable of ints.
    -> `(n // block_tokens, 16)` uint8; a last block that is not full has no key. Another `seed` (a salt, an adapter)
    gives another chain for the same tokens. `parent`, the last key of an earlier call, continues that call's chain;
    `seed` is then not used. So if `len(a)` is a multiple of `block_tokens`, the keys of `a + b` are the keys of `a`
    and then the keys of `b` with `parent=keys_of_a[-1]`.

    The keys are the same on every machine. The layout, for other implementations (XXH3-128 with seed 0 throughout,
    canonical digest: 16 bytes, big-endian, high half first)::

        key[-1] = xxh3_128(seed)                                            # the root; or `parent`
        key[i]  = xxh3_128(key[i-1] + tokens of block i, each as 4 bytes little-endian unsigned)

    Raises `TypeError` for tokens that are not integers, `ValueError` for a token out of range or `block_tokens` < 1.
    Thread-safe.
    """
    block_tokens = _arguments.whole_number("block_tokens", block_tokens, 1)
    return _cext.prefix_keys(_token_array(token_ids), block_tokens, seed, parent)


def _token_array(token_ids: Any) -> npt.NDArray[np.integer[Any]]:
    """The tokens as `_cext.prefix_keys` takes them; int32 and int64 arrays without a copy."""
    torch = sys.modules.get("torch")  # never imported here: tensors exist only if torch was imported already
    if torch is not None and isinstance(token_ids, torch.Tensor):
        if token_ids.device.type != "cpu":
            raise ValueError(f"token_ids: a tensor on {token_ids.device}: expected one in CPU memory")
        array: npt.NDArray[Any] = token_ids.detach().numpy()
    elif isinstance(token_ids, np.ndarray):
        array = token_ids
    elif isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Iterable):
        raise TypeError(f"token_ids: a {type(token_ids).__name__}: expected integers in a list, array or iterable")
    else:
        listed = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
        try:
            array = np.array(listed) if listed else np.empty(0, dtype=np.int64)
        except (OverflowError, ValueError) as error:  # too large, or lists of unequal length
            raise ValueError(f"token_ids: {error}: expected integers, 0 to 2**32 - 1") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"token_ids: {array.dtype} of shape {array.shape}: expected one row of integers")
    if array.dtype in (np.int32, np.int64):
        return array
    if len(array) and int(array.max()) > _MAX_TOKEN:  # checked here, since int64 may not hold it
        raise ValueError(f"token_ids: {int(array.max())}: expected 0 to 2**32 - 1")
    return array.astype(np.int64)


def pack_keys(keys: Keys) -> KeyArray:
    """`keys` as one C-contiguous `(n, key_bytes)` uint8 array; not copied if it is one already.

    Raises `KeySizeMismatch` for keys of unequal lengths or outside 8 to 64 bytes, `ValueError` for an array of another
    dtype or shape, `TypeError` for keys that are not bytes.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2:
            raise ValueError(f"keys: an array of {keys.dtype} {keys.shape}: expected uint8 (n, key_bytes)")
        packed = np.ascontiguousarray(keys)
    else:
        packed = _join_keys(keys)
    if len(packed) and not MIN_KEY_BYTES <= packed.shape[1] <= MAX_KEY_BYTES:
        raise KeySizeMismatch(f"keys of {packed.shape[1]} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return packed


def _join_keys(keys: Iterable[bytes]) -> KeyArray:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise TypeError(f"keys: a single {type(keys).__name__}: expected a list, or another iterable, of bytes objects")
    if not isinstance(keys, list | tuple):
        if not isinstance(keys, Iterable):
            raise TypeError(f"keys: a {type(keys).__name__}: expected a list, or another iterable, of bytes objects")
        keys = list(keys)
    if not keys:
        return np.empty((0, MIN_KEY_BYTES), dtype=np.uint8)
    try:
        joined = b"".join(keys)
        lengths = set(map(len, keys))
    except (TypeError, BufferError) as error:
        raise TypeError(f"keys: {error}: expected bytes objects") from None
    key_bytes = len(keys[0])
    if len(joined) != key_bytes * len(keys) or lengths != {key_bytes}:
        raise KeySizeMismatch(f"keys of {sorted(lengths)} bytes: expected one length for all keys of a namespace")
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), key_bytes)
