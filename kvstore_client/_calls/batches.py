"""A caller's batch of keys: functions that find repeated keys, cut the batch into parts, and make their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import first_of_each
from kvstore.wire.zmtp import frame, frame_head
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message
from kvstore_client._links.staging import SetAnswer, SharedStaging
from kvstore_client.keys import KeyArray

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BatchMacs


def milliseconds(seconds: float) -> int:
    """Return a deadline in the form that requests carry: in milliseconds, at least 1."""
    return max(1, int(seconds * 1000))


def chunks(positions: npt.NDArray[np.intp], size: int) -> list[npt.NDArray[np.intp]]:
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def take(packed: KeyArray, positions: npt.NDArray[np.intp]) -> KeyArray:
    if len(positions) == len(packed):
        return packed
    return packed[positions]


def first_occurrences(packed: KeyArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the position of each key's first occurrence, and the sorted positions of all first occurrences."""
    first = first_of_each(packed)
    is_first = first == np.arange(len(packed))
    return first, first if is_first.all() else np.flatnonzero(is_first)


def keyed_message(request: wire.Request, keys: KeyArray) -> Message:
    data = keys.tobytes()
    yield [frame(wire.encode(request), True) + frame_head(len(data), False) + data]


def staged_message(
    request: wire.Set,
    keys: KeyArray,
    positions: npt.NDArray[np.intp],
    source: BlockSource,
    staging: SharedStaging,
    call: Call,
    macs: BatchMacs | None,
) -> Message:
    """Yield the message of a SET by references: the header, the keys, and frames with the addresses of the blocks."""
    answer = call.answer
    assert isinstance(answer, SetAnswer)
    region = source.only_region()
    if region is not None and region.number not in staging.shared:
        region = None
    data = keys.tobytes()
    head = frame(wire.encode(request), True) + frame_head(len(data), True) + data
    start = 0
    for size in staging.sizes(region is not None):
        some = positions[start : start + size]
        end = start + len(some)
        if region is not None:
            entries = staging.name(source, some, region, macs)
        else:
            if not staging.has_room():
                yield staging.has_room
            entries = staging.stage(source, some.tolist(), answer, end, macs)
        yield [head + frame(entries.tobytes(), end < len(positions))]
        if end == len(positions):
            return
        start, head = end, b""


def set_message(
    request: wire.Set, keys: KeyArray, positions: npt.NDArray[np.intp], source: BlockSource, macs: BatchMacs | None
) -> Message:
    """Yield the message of a SET: the header, the keys, the payload frame by frame, and the checksums. If `macs` is
    given, the checksums are the MACs that it computes."""
    block_bytes = source.block_bytes
    data = keys.tobytes()
    head = frame(wire.encode(request), True) + frame_head(len(data), True) + data
    sums = None
    if macs is not None:
        numbers = positions.tolist()
        sums = macs.of(numbers, map(source.view, numbers))
    yield source.frames(head, positions, wire.frame_blocks(block_bytes), sums)
