"""The names of blocks: namespaces, prefix keys of tokens, and arrays of keys in the form that the protocol sends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import _cext
from kvstore.wire import MAX_BLOCK_BYTES, MAX_KEY_BYTES, MIN_KEY_BYTES, NAMESPACE_VERSION, namespace_id
from kvstore_client import _arguments
from kvstore_client.errors import KeySizeMismatch

__all__ = ["DTYPES", "DType", "KeyArray", "Keys", "Namespace", "TokenIds", "pack_keys", "prefix_keys"]

Keys: TypeAlias = "Iterable[bytes] | npt.NDArray[np.uint8]"
KeyArray: TypeAlias = "npt.NDArray[np.uint8]"
TokenIds: TypeAlias = "Iterable[int] | npt.NDArray[np.integer[Any]]"


class TorchDType(Protocol):
    """What type checkers take for a dtype of torch, because torch may not be installed."""

    @property
    def itemsize(self) -> int: ...

    @property
    def is_floating_point(self) -> bool: ...


DType: TypeAlias = "str | np.dtype[Any] | type[np.generic] | TorchDType"

# The size of one element in bytes, for each dtype. The names are those that NumPy, torch and engines use.
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
# Other names of some of these.
_DTYPE_ALIASES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
_MAX_TOKEN: Final = (1 << 32) - 1


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that must be equal for the bytes of two blocks to be interchangeable.

    Two namespaces with equal fields are the same namespace. Namespaces are immutable and hashable. For most models,
    `for_model` computes `block_bytes` from the model's shape.

    * `model`: The model's name.
    * `dtype`: The type of the elements: a name of `DTYPES`, such as "bfloat16", or a dtype of torch or NumPy. The
      namespace keeps the name.
    * `block_tokens`: Tokens per block; at least 1.
    * `block_bytes`: The size of every block, in bytes; 1 to 64 MiB.
    * `layout`: A name for the order of the bytes in a block. The namespace's users may agree on any name.
    * `rank`: The number of the part that this namespace holds, if an engine splits blocks over several processes; 0 to
      `world` - 1.
    * `world`: The number of parts that each block is split into; at least 1.
    * `tenant`: The tenant that the blocks belong to, if any. If clients must log in, the server sets it.
    * `extra`: Names and values of anything else that must be equal, such as an adapter or a quantisation.
    * `version`: The version of this description. Do not set it.

    Raises: `TypeError` for a field of a wrong type and `ValueError` for one outside its range. The error's text names
    the field.
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

    if TYPE_CHECKING:  # the field is a string, but may be given as any `DType`

        def __init__(
            self,
            *,
            model: str,
            dtype: DType,
            block_tokens: int,
            block_bytes: int,
            layout: str = "block",
            rank: int = 0,
            world: int = 1,
            tenant: str = "",
            extra: dict[str, str] = {},  # noqa: B006 (as the field has it)
            version: int = NAMESPACE_VERSION,
        ) -> None: ...

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
        msgspec.structs.force_setattr(self, "dtype", _dtype_name("Namespace.dtype", self.dtype))
        for name in ("model", "layout", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"Namespace.{name}={value!r} is of type {type(value).__name__}: expected a string")
        if not self.model:
            raise ValueError("Namespace.model='': expected the model's name, such as 'Qwen/Qwen2.5-7B-Instruct'")
        if self.rank >= self.world:
            raise ValueError(f"Namespace.rank={self.rank}: expected less than world={self.world}")
        if not isinstance(self.extra, dict) or not all(
            isinstance(text, str) for pair in self.extra.items() for text in pair
        ):
            raise TypeError(f"Namespace.extra={self.extra!r}: expected a dict of strings to strings")
        msgspec.structs.force_setattr(self, "extra", dict(self.extra))  # a copy, as the caller may change its dict

    def __hash__(self) -> int:
        return hash(self.canonical())

    @classmethod
    def for_model(
        cls, name: str, *, layers: int, kv_heads: int, head_size: int, dtype: DType, block_tokens: int, **rest: Any
    ) -> Namespace:
        """Return the namespace of a model whose layers all keep keys and values of the same shape.

        `block_bytes` = `layers` * 2 * `block_tokens` * `kv_heads` * `head_size` * bytes of a `dtype` element. The
        layout is `(layers, 2, block_tokens, kv_heads, head_size)`.

        * `name`: The model's name.
        * `layers`: The number of layers that keep keys and values; at least 1.
        * `kv_heads`: The number of key/value heads; at least 1. With tensor parallelism, give the heads of one rank,
          and `rank` and `world` too.
        * `head_size`: The number of elements in one head; at least 1.
        * `dtype`: As in `Namespace`.
        * `block_tokens`: As in `Namespace`.
        * `rest`: Further fields of a `Namespace`, except `block_bytes`.

        Returns: A `Namespace`.

        Raises: The errors of `Namespace`, and `ValueError` if a block would be larger than 64 MiB.
        """
        if "block_bytes" in rest:
            raise TypeError("block_bytes is computed from the model's shape here; to choose it, call Namespace(...)")
        shape = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size, "block_tokens": block_tokens}
        dtype = _dtype_name("dtype", dtype)
        block_bytes = 2 * DTYPES[dtype]
        for field, value in shape.items():
            block_bytes *= _arguments.whole_number(field, value, 1)
        if block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"{', '.join(f'{field}={value}' for field, value in shape.items())}, dtype={dtype!r}: a block has "
                f"{block_bytes} bytes: expected at most {MAX_BLOCK_BYTES}; choose fewer block_tokens"
            )
        return cls(model=name, dtype=dtype, block_tokens=block_tokens, block_bytes=block_bytes, **rest)

    def keys(self, token_ids: TokenIds) -> KeyArray:
        """Return the keys of a prompt's full blocks, head first: `prefix_keys(token_ids, self.block_tokens)`."""
        return prefix_keys(token_ids, self.block_tokens)

    def canonical(self) -> bytes:
        """Return this namespace as canonical JSON: keys sorted, no spaces, UTF-8."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def id(self) -> str:
        """The namespace's id: the XXH3-128 hash of the canonical JSON, in hexadecimal."""
        return namespace_id(self.canonical()).hex()


def _dtype_name(name: str, dtype: DType) -> str:
    """Return the name of a dtype in `DTYPES`. `name`: the argument, for the error."""
    torch = sys.modules.get("torch")  # not imported here, because there are its dtypes only if it was imported already
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        found = np.dtype(dtype).name
    elif isinstance(dtype, str) or (torch is not None and isinstance(dtype, torch.dtype)):
        found = str(dtype).removeprefix("torch.")
        found = _DTYPE_ALIASES.get(found, found)
    else:
        raise TypeError(
            f"{name}={dtype!r} is of type {type(dtype).__name__}: expected a name, such as 'bfloat16', or a dtype of "
            "torch or NumPy"
        )
    if found not in DTYPES:
        raise ValueError(f"{name}={dtype!r}: expected one of {', '.join(DTYPES)}")
    return found


def prefix_keys(
    token_ids: TokenIds, block_tokens: int, seed: bytes = b"", parent: bytes | KeyArray | None = None
) -> KeyArray:
    """Return the chain of prefix keys of a token sequence. Row i names block i together with everything before it.

    The last block has no key if it is not full. If `len(a)` is a multiple of `block_tokens`, the keys of `a + b` are
    the keys of `a`, followed by the keys of `b` with `parent=keys_of_a[-1]`. Thread-safe.

    The keys are the same on every machine. Other implementations can compute them as follows. The hash is XXH3-128,
    always with seed 0. Its digest is in the canonical form: 16 bytes, big-endian, high half first::

        key[-1] = xxh3_128(seed)                                            # the root; or `parent`
        key[i]  = xxh3_128(key[i-1] + tokens of block i, each as 4 bytes little-endian unsigned)

    * `token_ids`: n tokens, each 0 to 2**32 - 1, as a list, a 1-D array or CPU tensor of integers, or any iterable of
      ints.
    * `block_tokens`: The number of tokens in a block; at least 1.
    * `seed`: A salt or an adapter's name. With another seed, the same tokens have another chain of keys. The seed is
      not used if `parent` is given.
    * `parent`: The last key of an earlier call, to continue that call's chain.

    Returns: An `(n // block_tokens, 16)` array of uint8.

    Raises: `TypeError` for tokens that are not integers; `ValueError` for a token outside its range, or for
    `block_tokens` < 1.
    """
    block_tokens = _arguments.whole_number("block_tokens", block_tokens, 1)
    return _cext.prefix_keys(_token_array(token_ids), block_tokens, seed, parent)


def _token_array(token_ids: Any) -> npt.NDArray[np.integer[Any]]:
    """Return the tokens as an array that `_cext.prefix_keys` accepts. Arrays of int32 and int64 are not copied."""
    torch = sys.modules.get("torch")  # not imported here, because there are tensors only if torch was imported already
    if torch is not None and isinstance(token_ids, torch.Tensor):
        if token_ids.device.type != "cpu":
            raise ValueError(f"token_ids is a tensor on {token_ids.device}: expected one in CPU memory")
        array: npt.NDArray[Any] = token_ids.detach().numpy()
    elif isinstance(token_ids, np.ndarray):
        array = token_ids
    elif isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Iterable):
        raise TypeError(f"token_ids is of type {type(token_ids).__name__}: expected an array or iterable of integers")
    else:
        listed = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
        try:
            array = np.array(listed) if listed else np.empty(0, dtype=np.int64)
        except (OverflowError, ValueError) as error:  # too large, or lists of unequal length
            raise ValueError(f"token_ids: {error}: expected integers, 0 to 2**32 - 1") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"token_ids: an array of {array.dtype} of shape {array.shape}: expected one row of integers")
    if array.dtype in (np.int32, np.int64):
        return array
    if len(array) and int(array.max()) > _MAX_TOKEN:  # checked before the conversion, because int64 may be too small
        raise ValueError(f"token_ids: {int(array.max())}: expected 0 to 2**32 - 1")
    return array.astype(np.int64)


def pack_keys(keys: Keys) -> KeyArray:
    """Return `keys` as one C-contiguous `(n, key_bytes)` uint8 array. An array of this form is not copied.

    Raises `KeySizeMismatch` for keys of unequal lengths and for keys that are not 8 to 64 bytes long. Raises
    `ValueError` for an array of another dtype or shape, and `TypeError` for keys that are not bytes.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2:
            raise ValueError(
                f"keys: an array of {keys.dtype} of shape {keys.shape}: expected uint8 of shape (n, key_bytes)"
            )
        packed = np.ascontiguousarray(keys)
    else:
        packed = _join_keys(keys)
    if len(packed) and not MIN_KEY_BYTES <= packed.shape[1] <= MAX_KEY_BYTES:
        raise KeySizeMismatch(f"keys of {packed.shape[1]} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return packed


def _join_keys(keys: Iterable[bytes]) -> KeyArray:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise TypeError(f"keys is of type {type(keys).__name__}: expected a list, or another iterable, of bytes")
    if not isinstance(keys, list | tuple):
        if not isinstance(keys, Iterable):
            raise TypeError(f"keys is of type {type(keys).__name__}: expected a list, or another iterable, of bytes")
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
