"""What a shard remembers of chains while they are being set: how their parts join, and where other shards cut them.

A prompt's blocks are set in several calls, perhaps by several clients, and a shard gets only some of each call. The
index links the blocks that it has. To find the block to which a part is to be linked, the shard remembers how calls
ended: a call's last key, which the next call names as its parent, may be at another shard, or may have been refused; or
the next call may come first.

The shards of a node also agree where a chain ends: when one of them evicts or refuses a block, the others evict what
comes after it, which nobody can use any more. They know a call by the number that its client gave it, and a block by
its place in the call. They do so for blocks that exist once, and in memory only: a copy on another node, or on disk, is
still of use. When a mover has listed the blocks of a namespace, other nodes may have copies, too.

All of it is bounded, and forgetting costs only a link: without it the order of use decides what is evicted.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import Set

MOST_ENDS: Final = 8192  # of each kind, for all namespaces together; about 12 MB in all
# How long a cut keeps blocks behind it out: so long the next calls of the same prompt may be under way. Who has to
# compute a lost block again takes longer.
CUT_S: Final = 0.25
CUT_BLOCKS: Final = 1024  # evicted at a time; about 0.2 ms

Offsets = npt.NDArray[np.uint32]


class Part(NamedTuple):
    """What a SET says of the place of its keys."""

    end: bytes  # the last key of its call
    call: int  # the number of the call; 0: not known
    offsets: Offsets  # the place of each key in the call


_Key = tuple[bytes, bytes]  # namespace id, key
_Call = tuple[bytes, int]  # namespace id, number of a call
_Name = TypeVar("_Name", _Key, _Call)
_Value = TypeVar("_Value")


def part_of(request: Set, keys: bytes) -> Part:
    """-> what a SET of at least one key says."""
    offsets = np.frombuffer(request.offsets, dtype="<u4") if request.offsets else np.arange(request.count)
    return Part(request.end or keys[-request.key_bytes :], request.call, offsets.astype(np.uint32))


class Cut(NamedTuple):
    """A shard has no block at `offset` of a call any more, nor any after it."""

    namespace: bytes  # its id
    call: int
    offset: int


class Chains:
    """Joins the parts of chains. `shared`: other shards get parts of them, too."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.cuts: dict[_Call, int] = {}  # to be told to the other shards: the offset in each call
        self.heard: deque[Cut] = deque(maxlen=MOST_ENDS)  # what others have told, to be cut here
        self._ends: OrderedDict[_Key, bytes | None] = OrderedDict()  # a call's last key -> its last key here
        self._expected: OrderedDict[_Key, bytes] = OrderedDict()  # a parent that is not here -> who named it
        self._calls: OrderedDict[_Call, bytes] = OrderedDict()  # a call -> the last of its blocks that is here
        self._call_of: OrderedDict[_Key, int] = OrderedDict()  # a call's last key -> the call
        self._cut: OrderedDict[_Call, tuple[int, float]] = OrderedDict()  # by others: the offset, until when it counts

    def find(self, namespace: NamespaceStore, parent: bytes) -> bytes | None:
        """-> the key here that a part continues whose parent is `parent`: itself, if it is here or nothing is known of
        it; the last key here of the call that ended with it; None if that call was refused."""
        if not parent or namespace.memory.index.state_of(parent) != BlockIndex.FREE:
            return parent
        return self._ends.get((namespace.id, parent), parent)

    def is_cut(self, namespace: NamespaceStore, parent: bytes, now: float) -> bool:
        """Whether another shard has just lost blocks of the call that ended with `parent`."""
        if not self._cut:
            return False
        return self._cut_at(namespace, self._call_of.get((namespace.id, parent), 0), now) is not None

    def join(self, namespace: NamespaceStore, keys: bytes, slots: Slots, before: bytes, part: Part, now: float) -> None:
        """A part of a chain has been set: link its blocks with each other, with the part before it and with one that
        came too early. `before`: what `find` has found."""
        index, size = namespace.memory.index, namespace.key_bytes
        last, refused = keys[-size:], slots == BlockIndex.NO_SPACE
        if part.call and self._agrees(namespace):
            index.link(keys, before, slots, part.call, part.offsets)
            self._remember(namespace, keys, refused, part, now)
        else:
            index.link(keys, before, slots)
        if before and not refused.any() and index.state_of(before) != BlockIndex.READY:
            _put(self._expected, (namespace.id, before), keys[:size])
        for key in {last, part.end}:
            name = namespace.id, key
            if key != last or refused.any():
                _put(self._ends, name, None if refused.any() else last)
            else:
                self._ends.pop(name, None)
            follower = self._expected.pop(name, None)
            if follower is not None and not refused.any():
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

    # ---- where chains are cut --------------------------------------------------------------------------------

    def _agrees(self, namespace: NamespaceStore) -> bool:
        """Whether the node's shards cut this namespace's chains at one place."""
        return self.shared and namespace.disk is None and namespace.replicas == 1 and not namespace.listed

    def _remember(
        self, namespace: NamespaceStore, keys: bytes, refused: npt.NDArray[np.bool_], part: Part, now: float
    ) -> None:
        size = namespace.key_bytes
        _put(self._call_of, (namespace.id, part.end), part.call)
        kept = np.flatnonzero(~refused)
        if len(kept):
            at = int(kept[-1]) * size
            _put(self._calls, (namespace.id, part.call), keys[at : at + size])
        if refused.any():
            self._tell(namespace, part.call, int(part.offsets[refused].min()))
        cut = self._cut_at(namespace, part.call, now)
        if cut is not None:
            self.heard.append(Cut(namespace.id, part.call, cut))

    def _cut_at(self, namespace: NamespaceStore, call: int, now: float) -> int | None:
        offset, until = self._cut.get((namespace.id, call), (0, 0.0))
        return offset if now < until else None

    def evicted(self, namespace: NamespaceStore) -> None:
        """Blocks of a namespace may have been evicted: note what the other shards have to know."""
        cuts = namespace.memory.cuts
        if not cuts:
            return
        for call, offset, before in cuts:
            self._shorten((namespace.id, call), before)
            if self._agrees(namespace):
                self._tell(namespace, call, offset)
        cuts.clear()

    def _tell(self, namespace: NamespaceStore, call: int, offset: int) -> None:
        name = namespace.id, call
        self.cuts[name] = min(offset, self.cuts.get(name, offset))

    def _shorten(self, name: _Call, last: bytes) -> None:
        if name in self._calls:
            if last:
                self._calls[name] = last
            else:
                del self._calls[name]

    def cut(self, namespace: NamespaceStore, cut: Cut, now: float) -> bool:
        """Another shard has cut a chain: evict what comes after that here, up to `CUT_BLOCKS` blocks. -> whether that
        is done; if not, call it again."""
        if not self._agrees(namespace):
            return True
        name = namespace.id, cut.call
        known = self._cut_at(namespace, cut.call, now)
        _put(self._cut, name, (cut.offset if known is None else min(known, cut.offset), now + CUT_S))
        last = self._calls.get(name)
        if last is None:
            return True
        evicted, left = namespace.memory.index.cut(last, cut.call, cut.offset, now, CUT_BLOCKS)
        namespace.memory.evicted += evicted
        self._shorten(name, left)
        return evicted < CUT_BLOCKS


def _put(values: OrderedDict[_Name, _Value], name: _Name, value: _Value) -> None:
    values[name] = value
    values.move_to_end(name)
    if len(values) > MOST_ENDS:
        values.popitem(last=False)
