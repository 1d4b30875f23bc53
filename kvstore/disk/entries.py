"""Records of the persistent index: how the place of a block on disk and a namespace are encoded and checked.

Table `blocks`: the namespace's ordinal (u16, big endian) + block key -> an `ENTRY` + its guard.
Table `namespaces`: the ordinal -> length of its keys (u8) + copies of each block (u8) + guard + canonical JSON.

Safety property: no field of a record is used before the record's guard is checked. The guard of an entry covers the
entry, the namespace's id and the block's key, so the check also fails for a record that damage moved to another key
or another namespace.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore._cext import checksum_blocks
from kvstore.wire import MAX_KEY_BYTES, MAX_REPLICAS, MIN_KEY_BYTES, namespace_id

Entries = npt.NDArray[np.void]  # of dtype ENTRY

ENTRY: Final = np.dtype(
    [
        ("segment", "<u4"),
        ("place", "<u4"),  # slot within the segment
        ("checksum", "<u8"),
        ("tick", "<u8"),  # recency
        ("expires", "<u4"),  # wall clock, seconds; 0: never
        ("priority", "<u4"),
        ("before", "<u8"),  # `names_of` the block that it follows in its chain; its own: none
    ]
)
VALUE_BYTES: Final = ENTRY.itemsize + 8  # with the guard
ORDINAL_BYTES: Final = 2
_NAMESPACE_HEAD_BYTES: Final = 10


def pack_ordinal(ordinal: int) -> bytes:
    return ordinal.to_bytes(ORDINAL_BYTES, "big")


def unpack_ordinal(key: bytes) -> int:
    """The namespace's ordinal, with which a key of either table begins."""
    return int.from_bytes(key[:ORDINAL_BYTES], "big")


def record_keys(ordinal: int, key_bytes: int, keys: bytes) -> list[bytes]:
    """-> the keys in table `blocks` for a namespace's block keys, which `keys` holds concatenated."""
    prefix = pack_ordinal(ordinal)
    return [prefix + keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


def pack_entries(canonical: bytes, key_bytes: int, keys: bytes, entries: Entries) -> list[bytes]:
    """-> the values in table `blocks` for a namespace's blocks. Row i of `entries` belongs to key i."""
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
    """-> the entries in `values`, concatenated values of table `blocks`, and for each whether its guard is right."""
    rows = np.frombuffer(values, np.uint8).reshape(-1, VALUE_BYTES)
    entries = np.ascontiguousarray(rows[:, : ENTRY.itemsize]).view(ENTRY).reshape(-1)
    guards = np.ascontiguousarray(rows[:, ENTRY.itemsize :]).view("<u8").reshape(-1)
    return entries, guards == _guards(canonical, key_bytes, keys, rows)


def _guards(canonical: bytes, key_bytes: int, keys: bytes, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """xxh3-64 of namespace id + key + entry for each row."""
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
    """-> a namespace's value in table `namespaces`."""
    head = bytes([key_bytes, replicas])
    return head + xxhash.xxh3_64_intdigest(head + canonical).to_bytes(8, "little") + canonical


def unpack_namespace(value: bytes) -> tuple[bytes, int, int] | None:
    """-> canonical JSON, bytes of a key and copies of each block; None when the value is damaged."""
    if len(value) <= _NAMESPACE_HEAD_BYTES:
        return None
    key_bytes, replicas, canonical = value[0], value[1], value[_NAMESPACE_HEAD_BYTES:]
    if not (MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES and 1 <= replicas <= MAX_REPLICAS):
        return None
    return (canonical, key_bytes, replicas) if pack_namespace(canonical, key_bytes, replicas) == value else None
