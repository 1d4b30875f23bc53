"""MACs of blocks: with a secret, the checksum of a block is a keyed hash that only clients with the secret can make.

The hash is keyed BLAKE3 over the block's bytes and its key, cut to the 8 bytes that the protocol has for a checksum.
The hash's key is derived from the secret and the namespace's canonical JSON. So a block of another namespace, another
key or another secret does not match. All blocks of a namespace have the same length, and so do all keys. So it is clear
where a block's bytes end and its key begins.

A namespace with MACs has a mark in `extra`, which names the hash's key. So clients without the secret, or with another
one, have other namespaces, and servers know that they cannot check these checksums. The name also depends on the
namespace that was given to the client. So namespaces with different hash keys stay different even if a server adds a
tenant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore_client.keys import KeyArray, Namespace

SECRET_VARIABLE: Final = "KVSTORE_BLOCK_SECRET"
SECRET_FILE_VARIABLE: Final = "KVSTORE_BLOCK_SECRET_FILE"
MIN_SECRET_BYTES: Final = 16
EXTRA: Final = "block_mac"  # the name of the mark in the namespace's `extra`
MAC_BYTES: Final = 8
_KEY_CONTEXT: Final = "kvstore 2026-11 key of block MACs"
_NAME_CONTEXT: Final = "kvstore 2026-11 name of a key of block MACs"

Sums = npt.NDArray[np.uint64]


class BatchMacs:
    """Computes the MACs of one call's blocks. `keys[i]` is the key of the block at position i. Thread-safe."""

    __slots__ = ("_key", "_keys")

    def __init__(self, key: bytes, keys: KeyArray) -> None:
        self._key = key
        self._keys = keys

    def of(self, positions: Sequence[int], blocks: Iterable[memoryview]) -> Sums:
        """Return the MACs of the blocks at these positions. The GIL is released while hashing."""
        from blake3 import blake3

        key, keys = self._key, self._keys
        macs = bytearray()
        for position, block in zip(positions, blocks, strict=True):
            hasher = blake3(block, key=key)
            hasher.update(keys[position])
            macs += hasher.digest(MAC_BYTES)
        return np.frombuffer(macs, dtype="<u8")


class BlockMac:
    """Makes the MACs of one namespace with one secret. `namespace` is the one with a mark in `extra`. Thread-safe."""

    def __init__(self, secret: bytes, namespace: Namespace) -> None:
        from blake3 import blake3

        unmarked = {field: text for field, text in namespace.extra.items() if field != EXTRA}
        canonical = msgspec.structs.replace(namespace, extra=unmarked).canonical()
        names = blake3(secret, derive_key_context=_NAME_CONTEXT).digest()
        name = "blake3-" + blake3(canonical, key=names).hexdigest(length=8)
        given = namespace.extra.get(EXTRA, name)
        if given != name:
            raise ValueError(
                f"Namespace.extra[{EXTRA!r}]={given!r} belongs to another block secret or tenant: this secret "
                f"gives {name!r}. Leave this field out"
            )
        self.namespace = msgspec.structs.replace(namespace, extra={**namespace.extra, EXTRA: name})
        root = blake3(secret, derive_key_context=_KEY_CONTEXT).digest()
        self._key = blake3(self.namespace.canonical(), key=root).digest()

    def batch(self, keys: KeyArray) -> BatchMacs:
        """Return the object that computes the MACs of blocks with these keys."""
        return BatchMacs(self._key, keys)


class SecretMissing:
    """Stands for a secret that the client lacks. The client can then look up and remove blocks, but not read or set
    them."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def batch(self, keys: KeyArray) -> BatchMacs:
        """Raise `ValueError`."""
        raise ValueError(
            f"Namespace.extra[{EXTRA!r}]={self.namespace.extra[EXTRA]!r}: blocks of this namespace have MACs: expected "
            f"their secret, as block_secret, {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}"
        )


def mac_of(namespace: Namespace, secret: bytes | str | None) -> BlockMac | SecretMissing | None:
    """Return the object that makes and checks the MACs of a namespace's blocks, or None if its blocks have no MACs. If
    `secret` is None, the environment's secret is used.

    Raises `TypeError` or `ValueError` for a value that cannot be a secret.
    """
    secret = _from_environment() if secret is None else secret
    if secret is None:
        return SecretMissing(namespace) if EXTRA in namespace.extra else None
    if not isinstance(secret, bytes | str):
        raise TypeError(f"block_secret is of type {type(secret).__name__}: expected bytes or a string")
    data = secret.encode() if isinstance(secret, str) else secret
    if len(data) < MIN_SECRET_BYTES:
        raise ValueError(
            f"block_secret has {len(data)} bytes: expected at least {MIN_SECRET_BYTES} random bytes, such as the "
            "output of `openssl rand -hex 32`"
        )
    return BlockMac(data, namespace)


def _from_environment() -> str | bytes | None:
    secret, file = os.environ.get(SECRET_VARIABLE), os.environ.get(SECRET_FILE_VARIABLE)
    if secret and file:
        raise ValueError(f"both {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are set: expected one of them")
    if file:
        from kvstore.secret_files import read_secret  # few clients need it

        return read_secret(file, SECRET_FILE_VARIABLE)
    return secret or None
