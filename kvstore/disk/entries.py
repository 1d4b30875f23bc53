"""Records of the persistent index: how a namespace and the place of a block on disk are encoded and checked.

Table `blocks`: the namespace's ordinal (u16, big endian) + block key -> an `ENTRY` + its guard.
Table `namespaces`: the ordinal -> length of its keys (u8) + copies of each block (u8) + guard + canonical JSON.

Safety property: no field of a record is used before the record's guard is checked. The guard of an entry covers the
entry, the namespace's id and the block's key. So the check also fails if damage has moved a record to another key or
namespace.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore._cext import checksum_blocks
from kvstore.wire import MAX_KEY_BYTES, MAX_REPLICAS, MIN_KEY_BYTES, namespace_id

Entries = npt.NDArray[np.void]  # of dtype `ENTRY`

ENTRY: Final = np.dtype(
    [
        ("segment", "<u4"),
        ("place", "<u4"),  # the slot within the segment
        ("checksum", "<u8"),
        ("tick", "<u8"),  # recency
        ("expires", "<u4"),  # seconds of the wall clock; 0: never
        ("priority", "<u4"),
        ("before", "<u8"),  # `names_of` the block that it follows in its chain, or its own name if there is none
    ]
)
VALUE_BYTES: Final = ENTRY.itemsize + 8  # the entry and its guard
ORDINAL_BYTES: Final = 2
_NAMESPACE_HEAD_BYTES: Final = 10


def pack_ordinal(ordinal: int) -> bytes:
    return ordinal.to_bytes(ORDINAL_BYTES, "big")


def unpack_ordinal(key: bytes) -> int:
    """Return the ordinal of the namespace in a key of either table. The key begins with this ordinal."""
    return int.from_bytes(key[:ORDINAL_BYTES], "big")


def record_keys(ordinal: int, key_bytes: int, keys: bytes) -> list[bytes]:
    """Return the keys in table `blocks` for a namespace's blocks. `keys`: the keys of these blocks, concatenated."""
    prefix = pack_ordinal(ordinal)
    return [prefix + keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


def pack_entries(canonical: bytes, key_bytes: int, keys: bytes, entries: Entries) -> list[bytes]:
    """Return the values in table `blocks` for a namespace's blocks. Row i of `entries` belongs to key i."""
    count = len(entries)
    values = np.empty((count, VALUE_BYTES), np.uint8)
    values[:, : ENTRY.itemsize] = entries.view(np.uint8).reshape(count, ENTRY.itemsize)
    guards = _guards(canonical, key_bytes, keys, values)
    values[:, ENTRY.itemsize :] = guards.view(np.uint8).reshape(count, 8)
    packed = values.tobytes()
    return [packed[at : at + VALUE_BYTES] for at in range(0, len(packed), VALUE_BYTES)]


def check_entries(
    canonical: bytes, key_bytes: int, keys: bytes, values: bytes
) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """Split `values`, which are concatenated values of table `blocks`, into entries. Return the entries, and for each
    one whether its guard is right."""
    rows = np.frombuffer(values, np.uint8).reshape(-1, VALUE_BYTES)
    entries = np.ascontiguousarray(rows[:, : ENTRY.itemsize]).view(ENTRY).reshape(-1)
    guards = np.ascontiguousarray(rows[:, ENTRY.itemsize :]).view("<u8").reshape(-1)
    return entries, guards == _guards(canonical, key_bytes, keys, rows)


def _guards(canonical: bytes, key_bytes: int, keys: bytes, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return for each row the xxh3-64 of namespace id + key + entry."""
    count = len(values)
    guards = np.empty(count, np.uint64)
    if not count:
        return guards
    head = namespace_id(canonical)
    start, end = len(head), len(head) + key_bytes
    rows = np.empty((count, end + ENTRY.itemsize), np.uint8)
    rows[:, :start] = np.frombuffer(head, np.uint8)
    rows[:, start:end] = np.frombuffer(keys, np.uint8).reshape(count, key_bytes)
    rows[:, end:] = values[:, : ENTRY.itemsize]
    checksum_blocks(rows, rows.shape[1], guards)
    return guards


def pack_namespace(canonical: bytes, key_bytes: int, replicas: int) -> bytes:
    """Return a namespace's value in table `namespaces`."""
    head = bytes([key_bytes, replicas])
    return head + xxhash.xxh3_64_intdigest(head + canonical).to_bytes(8, "little") + canonical


def unpack_namespace(value: bytes) -> tuple[bytes, int, int] | None:
    """Return the canonical JSON, the length of a key in bytes and the number of copies of each block. Return None if
    `value` is damaged."""
    if len(value) <= _NAMESPACE_HEAD_BYTES:
        return None
    key_bytes, replicas, canonical = value[0], value[1], value[_NAMESPACE_HEAD_BYTES:]
    if not (MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES and 1 <= replicas <= MAX_REPLICAS):
        return None
    return (canonical, key_bytes, replicas) if pack_namespace(canonical, key_bytes, replicas) == value else None
