"""Chains while they are being set: how their parts join, and where other shards have cut them.

A prompt's blocks are set in several calls, perhaps by several clients, and a shard gets only some of the blocks of each
call. The index links the blocks that it has. Each call names the last key of the call before it as its parent. The
block of that key may be at another shard, it may have been refused, or it may arrive later than the call that names its
key. So the shard remembers how calls ended, in order to find the block to which a part must be linked.

Several clients may write the same chain at once, because their engines compute the same new prompt. The index links a
block also to one that is still being written. If that write is given up, its followers are linked to the block before
it until another client sets the missing block.

The shards of a node also agree where a chain ends. When one of them evicts or refuses a block, the others evict the
blocks after it, because no client can use these any more. To say where a chain ends, the shards use the number that a
client gave to its call, and the block's position in that call. They evict only blocks whose single copy is in memory,
because a copy on another node or on disk is still of use. Once a mover has listed the blocks of a namespace, other
nodes may have copies of them, too.

The number of these records is bounded. If a record is forgotten, only a link is lost, and the order of use then decides
which blocks are evicted.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.store.expected import split
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import Set

MOST_ENDS: Final = 8192  # the most records of each kind, for all namespaces together; about 16 MB for all kinds
MOST_BRANCHES: Final = 8  # the most followers of one missing block that are remembered
# How long a shard refuses the blocks after a cut, in seconds. The next calls of the same prompt may take this long to
# arrive. A client that computes a lost block again takes longer.
CUT_S: Final = 0.25
CUT_BLOCKS: Final = 1024  # the most blocks evicted at a time, in about 0.2 ms

CallOffsets = npt.NDArray[np.uint32]


class SetCall(NamedTuple):
    """What a SET says about the place of its keys in a call."""

    end: bytes  # the last key of its call
    call: int  # the number of the call; 0: unknown
    offsets: CallOffsets  # the place of each key in the call


_Key = tuple[bytes, bytes]  # namespace id, key
_Call = tuple[bytes, int]  # namespace id, number of a call
_Name = TypeVar("_Name", _Key, _Call)
_Value = TypeVar("_Value")


def part_of(request: Set, keys: bytes) -> SetCall:
    """Return what a SET of at least one key says about its place in a call."""
    offsets = np.frombuffer(request.offsets, dtype="<u4") if request.offsets else np.arange(request.count)
    return SetCall(request.end or keys[-request.key_bytes :], request.call, offsets.astype(np.uint32))


class Cut(NamedTuple):
    """A shard no longer has the block at `offset` of a call, nor any block after it."""

    namespace: bytes  # its id
    call: int
    offset: int


class Chains:
    """Joins the parts of chains. `shared`: whether other shards get parts of the same chains."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.cuts: dict[_Call, int] = {}  # cuts to send to the other shards: the offset in each call
        self.heard: deque[Cut] = deque(maxlen=MOST_ENDS)  # received from other shards, to be carried out here
        self._ends: OrderedDict[_Key, bytes | None] = OrderedDict()  # a call's last key -> its last key that is here
        self._expected: OrderedDict[_Key, bytes] = OrderedDict()  # a missing block -> the keys that directly follow it
        self._calls: OrderedDict[_Call, bytes] = OrderedDict()  # a call -> the last of its blocks that is here
        self._call_of: OrderedDict[_Key, int] = OrderedDict()  # a call's last key -> the call
        self._cut: OrderedDict[_Call, tuple[int, float]] = OrderedDict()  # other shards' cuts: offset and end time

    def find(self, namespace: NamespaceStore, parent: bytes) -> bytes | None:
        """Return the key of the block on this shard to which a part with this parent is linked. That is `parent` itself
        if its block is here, or if the shard does not know it. Otherwise it is the last key on this shard of the call
        that ended with `parent`, or None if that call was refused."""
        if not parent or namespace.memory.index.state_of(parent) != BlockIndex.FREE:
            return parent
        return self._ends.get((namespace.id, parent), parent)

    def is_cut(self, namespace: NamespaceStore, parent: bytes, now: float) -> bool:
        """Return whether another shard has just lost blocks of the call that ended with `parent`."""
        if not self._cut:
            return False
        return self._cut_at(namespace, self._call_of.get((namespace.id, parent), 0), now) is not None

    def join(
        self, namespace: NamespaceStore, keys: bytes, slots: Slots, before: bytes, part: SetCall, now: float
    ) -> None:
        """Link the blocks of a part that has been set to each other and to the part before it. If the part after it
        came first, link that part to these blocks. `before`: the result of `find`."""
        index, size = namespace.memory.index, namespace.key_bytes
        last, refused = keys[-size:], slots == BlockIndex.NO_SPACE
        if before and index.state_of(before) == BlockIndex.FREE:  # the call that ended with it may have ended since
            before = self._ends.get((namespace.id, before)) or before
        if part.call and self._agrees(namespace):
            index.link(keys, before, slots, part.call, part.offsets)
            self._remember(namespace, keys, refused, part, now)
        else:
            index.link(keys, before, slots)
        if before and not refused.any() and index.state_of(before) == BlockIndex.FREE:
            self._expect(namespace, before, keys[:size])
        for key in {last, part.end}:
            name = namespace.id, key
            if key != last or refused.any():
                _put(self._ends, name, None if refused.any() else last)
            else:
                self._ends.pop(name, None)
            if not refused.any():
                self._link_expected(namespace, key, last)

    def abandon(self, namespace: NamespaceStore, keys: bytes, slots: Slots, before: bytes) -> None:
        """Prepare the index for the end of a write that is given up. Blocks that other clients have set behind these
        blocks will be linked to the blocks before them, and to these blocks if they are set after all. Afterwards the
        slots must be aborted. `before`: the result of `find`."""
        index, size, last = namespace.memory.index, namespace.key_bytes, keys[-namespace.key_bytes :]
        followers = self._expected.get((namespace.id, last), b"")
        if not followers and not index.links_of(slots)[0]:
            return  # no other block is linked to these
        index.link(keys, before, slots)
        index.link(followers, last * (len(followers) // size))
        ours = set(split(index.keys_of(slots[slots >= 0]), size))
        for follower, key in zip(*(split(each, size) for each in index.links_of(slots)), strict=True):
            if key in ours and follower not in ours:
                self._expect(namespace, key, follower)

    def _expect(self, namespace: NamespaceStore, key: bytes, follower: bytes) -> None:
        """Note that the block of `key` is missing, and that the block of `follower` is to be linked to it."""
        known = self._expected.get((namespace.id, key), b"")
        if follower not in split(known, namespace.key_bytes):
            known = (known + follower)[-MOST_BRANCHES * namespace.key_bytes :]
        _put(self._expected, (namespace.id, key), known)

    def _link_expected(self, namespace: NamespaceStore, key: bytes, last: bytes) -> None:
        """Link the blocks that wait for the block of `key` to the block of `last`, unless that is missing, too."""
        if (namespace.id, key) not in self._expected or namespace.memory.index.state_of(last) == BlockIndex.FREE:
            return
        followers = self._expected.pop((namespace.id, key))
        namespace.memory.index.link(followers, last * (len(followers) // namespace.key_bytes))

    def place(self, namespace: NamespaceStore, keys: bytes, before: bytes, slots: Slots) -> None:
        """Link copies of another shard's blocks that have been set. Each copy is linked to the block that it follows,
        even if that block comes later.

        before: for each of `keys`, the key of the block that its block follows, or the key itself if there is none.
        """
        index, size = namespace.memory.index, namespace.key_bytes
        index.link(keys, before, slots)
        for at in range(0, len(keys), size):
            key, followed = keys[at : at + size], before[at : at + size]
            if followed != key and index.state_of(followed) == BlockIndex.FREE:
                self._expect(namespace, followed, key)
            self._link_expected(namespace, key, key)

    # ---- where chains are cut --------------------------------------------------------------------------------

    def _agrees(self, namespace: NamespaceStore) -> bool:
        """Return whether the node's shards end this namespace's chains at the same block."""
        return self.shared and namespace.disk is None and namespace.replicas == 1 and not namespace.listed

    def _remember(
        self, namespace: NamespaceStore, keys: bytes, refused: npt.NDArray[np.bool_], part: SetCall, now: float
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
        """Note which cuts the other shards must learn, because blocks of a namespace may have been evicted."""
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
        """Evict up to `CUT_BLOCKS` of the blocks that come after a cut by another shard. Return whether all of those
        blocks are evicted. If not, call this method again."""
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
        namespace.cut_off += evicted
        self._shorten(name, left)
        return evicted < CUT_BLOCKS


def _put(values: OrderedDict[_Name, _Value], name: _Name, value: _Value) -> None:
    values[name] = value
    values.move_to_end(name)
    if len(values) > MOST_ENDS:
        values.popitem(last=False)
