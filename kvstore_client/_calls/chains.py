"""The chains in a batch of keys, and how requests describe them to shards. A shard gets only some of the keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore import wire
from kvstore_client._calls.batches import chunks
from kvstore_client._links.view import Numbers
from kvstore_client.keys import KeyArray, pack_keys

Parent: TypeAlias = "bytes | KeyArray | Sequence[bytes | None] | None"


class Chain(NamedTuple):
    """Keys of one batch that follow each other in a chain."""

    start: int = 0  # the index of its first key in the batch; its keys end where the next chain starts
    parent: bytes = b""  # the key before the first one; empty if the first one begins the chain
    position: int = 0  # the first key's position in the chain
    call: int = 0  # a number that shows shards which parts belong together


class ChainFields(NamedTuple):
    """The place of one request's keys in their chain: see `wire.Set`."""

    parent: bytes
    end: bytes
    position: int
    call: int
    offsets: bytes


def chains_of(packed: KeyArray, parent: Parent, position: int) -> Sequence[Chain]:
    """Return the chains of a batch whose first key has the index `position` in its chain.

    `parent` is the key before the first key. For several chains, it is a sequence or an `(n, key_bytes)` array with
    the key before each key. Raises `ValueError`, `TypeError` and `KeySizeMismatch`.
    """
    if not len(packed):
        return ()
    if isinstance(parent, np.ndarray):  # a row of packed keys, or several
        parent = parent.tobytes() if parent.ndim == 1 else [row.tobytes() for row in parent]
    if isinstance(parent, bytearray | memoryview):
        parent = bytes(parent)
    if isinstance(parent, str) or not isinstance(parent, Iterable | None):
        raise TypeError(f"parent={parent!r} is of type {type(parent).__name__}: expected a key, which is bytes")
    if parent is None or isinstance(parent, bytes):
        return (Chain(0, _checked(parent, packed), position, _new_call()),)
    parent = [each if each is None or isinstance(each, bytes) else pack_keys([each]).tobytes() for each in parent]
    if len(parent) != len(packed):
        raise ValueError(f"{len(packed)} keys and {len(parent)} parents: expected one parent, or one for each key")
    chains = [Chain(0, _checked(parent[0], packed), position, _new_call())]
    for index, key in enumerate(parent[1:], start=1):
        if key != packed[index - 1].tobytes():
            chains.append(Chain(index, _checked(key, packed), 0 if key is None else 1, _new_call()))
    return chains


def _new_call() -> int:
    return (int.from_bytes(os.urandom(8), "little") >> 2) + 1


def _checked(parent: bytes | None, packed: KeyArray) -> bytes:
    if parent is None:
        return b""
    key = pack_keys([parent])
    if key.shape[1] != packed.shape[1]:
        raise ValueError(
            f"a parent of {key.shape[1]} bytes for keys of {packed.shape[1]} bytes: expected the same length"
        )
    return key.tobytes()


def requests_of(
    packed: KeyArray, positions: Numbers, mine: Numbers, chains: Sequence[Chain], most: int, alone: bool
) -> Iterator[tuple[Numbers, ChainFields]]:
    """Cut one shard's share of a batch into requests of at most `most` keys. Each request is a part of one chain.

    * `positions`: All positions of the batch that are to be set, in ascending order.
    * `mine`: The positions that go to this shard, also in ascending order.
    * `alone`: Whether this is the store's only shard.
    """
    starts = [chain.start for chain in chains[1:]]
    for chain, following, of_chain in zip(
        chains, [*starts, len(packed)], np.split(mine, np.searchsorted(mine, starts)), strict=True
    ):
        parent, call = chain.parent, 0 if alone else chain.call
        for some in chunks(of_chain, most):
            last = packed[some[-1]].tobytes()
            end = packed[positions[np.searchsorted(positions, following) - 1]].tobytes()
            position = min(chain.position + int(some[0]) - chain.start, wire.MAX_POSITION)
            offsets = b"" if alone else (some - chain.start).astype("<u4").tobytes()
            yield some, ChainFields(parent, b"" if end == last else end, position, call, offsets)
            parent = last
