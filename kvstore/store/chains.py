"""What a shard remembers of chains while they are being set: how their parts join.

A prompt's blocks are set in several calls, perhaps by several clients, and a shard gets only some of each call. The
index links the blocks that it has. To find the block to which a part is to be linked, the shard remembers how calls
ended: a call's last key, which the next call names as its parent, may be at another shard, or may have been refused; or
the next call may come first.

All of it is bounded, and forgetting costs only a link: without it the order of use decides what is evicted.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from kvstore._cext import BlockIndex
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots

MOST_ENDS: Final = 8192  # remembered for all namespaces together; about 6 MB

_Key = tuple[bytes, bytes]  # namespace id, key
_Value = TypeVar("_Value")


class Chains:
    """Joins the parts of chains."""

    def __init__(self) -> None:
        self._ends: OrderedDict[_Key, bytes | None] = OrderedDict()  # a call's last key -> its last key here
        self._expected: OrderedDict[_Key, bytes] = OrderedDict()  # a parent that is not here -> who named it

    def find(self, namespace: NamespaceStore, parent: bytes) -> bytes | None:
        """-> the key here that a part continues whose parent is `parent`: itself, if it is here or nothing is known of
        it; the last key here of the call that ended with it; None if that call was refused."""
        if not parent or namespace.memory.index.state_of(parent) != BlockIndex.FREE:
            return parent
        return self._ends.get((namespace.id, parent), parent)

    def join(self, namespace: NamespaceStore, keys: bytes, slots: Slots, before: bytes, end: bytes) -> None:
        """A part of a chain has been set: link its blocks with each other, with the part before it and with one that
        came too early. `before`: what `find` has found. `end`: the last key of its call; empty: the last of `keys`."""
        index, size = namespace.memory.index, namespace.key_bytes
        index.link(keys, before, slots)
        last, refused = keys[-size:], bool((slots == BlockIndex.NO_SPACE).any())
        if before and not refused and index.state_of(before) != BlockIndex.READY:
            _put(self._expected, (namespace.id, before), keys[:size])
        for key in {last, end or last}:
            name = namespace.id, key
            if key != last or refused:
                _put(self._ends, name, None if refused else last)
            else:
                self._ends.pop(name, None)
            follower = self._expected.pop(name, None)
            if follower is not None and not refused:
                index.link(follower, last)

    def place(self, namespace: NamespaceStore, keys: bytes, before: bytes, slots: Slots) -> None:
        """Copies of another shard's blocks have been set: link each with the one that it follows, which may come later.

        before: a key for each of `keys`; its own for a block that follows none.
        """
        index, size = namespace.memory.index, namespace.key_bytes
        index.link(keys, before, slots)
        for at in range(0, len(keys), size):
            key, followed = keys[at : at + size], before[at : at + size]
            if followed != key and index.state_of(followed) != BlockIndex.READY:
                _put(self._expected, (namespace.id, followed), key)
            follower = self._expected.pop((namespace.id, key), None)
            if follower is not None:
                index.link(follower, key)


def _put(keys: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    keys[key] = value
    keys.move_to_end(key)
    if len(keys) > MOST_ENDS:
        keys.popitem(last=False)
