"""Which keys of a batch follow each other in a chain, and how that is told to the shards that get some of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore import wire
from kvstore_client._calls.batches import chunks
from kvstore_client._links.view import Numbers
from kvstore_client.keys import KeyArray, pack_keys

Parent: TypeAlias = "bytes | KeyArray | Sequence[bytes | None] | None"


class Chain(NamedTuple):
    """Keys of one batch that follow each other in a chain."""

    start: int = 0  # the index of the first key in the batch; they reach to the next chain
    parent: bytes = b""  # the key before the first one; empty: the chain begins with it
    position: int = 0  # of the first one in the chain
    call: int = 0  # a number by which the shards know that their parts belong together


class Part(NamedTuple):
    """The place of one request's keys in their chain: see `wire.Set`."""

    parent: bytes
    end: bytes
    position: int
    call: int
    offsets: bytes


def chains_of(packed: KeyArray, parent: Parent, position: int) -> Sequence[Chain]:
    """The chains of a batch whose first key has the index `position` in its chain. `parent`: the key before the first
    one, or a sequence or an `(n, key_bytes)` array of the keys before each one. Raises `ValueError`, `TypeError` and
    `KeySizeMismatch`."""
    if not len(packed):
        return ()
    if isinstance(parent, np.ndarray):  # a row of packed keys, or several
        parent = parent.tobytes() if parent.ndim == 1 else [row.tobytes() for row in parent]
    if parent is None or isinstance(parent, bytes):
        return (Chain(0, _checked(parent, packed), position, _new_call()),)
    if len(parent) != len(packed):
        raise ValueError(f"{len(packed)} keys and {len(parent)} parents: expected a key, or one for each key")
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
        raise ValueError(f"a parent of {key.shape[1]} bytes for keys of {packed.shape[1]}: expected as many")
    return key.tobytes()


def requests_of(
    packed: KeyArray, positions: Numbers, mine: Numbers, chains: Sequence[Chain], most: int, alone: bool
) -> Iterator[tuple[Numbers, Part]]:
    """Cut what one shard gets into requests of up to `most` keys, each a part of one chain.

    positions, mine: in ascending order, what is to be set of the batch, and what of that goes to this shard.
    alone: there is no other shard.
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
            yield some, Part(parent, b"" if end == last else end, position, call, offsets)
            parent = last
