"""A caller's batch of keys: finding repeated keys, cutting the batch into parts, and making the messages for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import checksum_into
from kvstore.wire.zmtp import frame, frame_head
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message
from kvstore_client._links.staging import SetAnswer, Staging
from kvstore_client.keys import KeyArray


def milliseconds(seconds: float) -> int:
    """A deadline as requests carry it: in milliseconds, at least 1."""
    return max(1, int(seconds * 1000))


def chunks(positions: npt.NDArray[np.intp], size: int) -> list[npt.NDArray[np.intp]]:
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def take(packed: KeyArray, positions: npt.NDArray[np.intp]) -> KeyArray:
    if len(positions) == len(packed):
        return packed
    return packed[positions]


def first_occurrences(packed: KeyArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For each key the position of its first occurrence; and the positions of all first occurrences, in order."""
    count = len(packed)
    everything = np.arange(count)
    data, size = packed.tobytes(), packed.shape[1]
    names = [data[at : at + size] for at in range(0, len(data), size)]
    if len(set(names)) == count:
        return everything, everything
    seen: dict[bytes, int] = {}
    first = np.array([seen.setdefault(name, position) for position, name in enumerate(names)], dtype=np.intp)
    return first, np.flatnonzero(first == everything)


def keyed_message(request: wire.Request, keys: KeyArray) -> Message:
    data = keys.tobytes()
    yield [frame(wire.encode(request), True) + frame_head(len(data), False) + data]


def staged_message(
    request: wire.Set,
    keys: KeyArray,
    positions: npt.NDArray[np.intp],
    source: BlockSource,
    staging: Staging,
    call: Call,
) -> Message:
    """The message of a SET by references: header and keys, then frames that tell where the blocks are."""
    answer = call.answer
    assert isinstance(answer, SetAnswer)
    numbers = positions.tolist()
    data = keys.tobytes()
    head = frame(wire.encode(request), True) + frame_head(len(data), True) + data
    for start in range(0, len(numbers), staging.group):
        some = numbers[start : start + staging.group]
        end = start + len(some)
        entries = staging.name(source, some)
        if entries is None:
            if not staging.has_room():
                yield staging.has_room
            entries = staging.stage(source, some, answer, end)
        yield [head + frame(entries.tobytes(), end < len(numbers))]
        head = b""


def set_message(request: wire.Set, keys: KeyArray, positions: npt.NDArray[np.intp], source: BlockSource) -> Message:
    """The message of a SET: header and keys, the payload frame by frame, and last the checksums. The blocks of a frame
    are hashed just before the frame is sent."""
    block_bytes = source.block_bytes
    numbers = positions.tolist()
    data = keys.tobytes()
    head = frame(wire.encode(request), True) + frame_head(len(data), True) + data
    per_frame = wire.frame_blocks(block_bytes)
    sums = np.empty(len(numbers), dtype="<u8")
    for start in range(0, len(numbers), per_frame):
        some = numbers[start : start + per_frame]
        checksum_into([source.view(number) for number in some], sums[start : start + len(some)])
        yield [head + frame_head(len(some) * block_bytes, True), *source.views(some)]
        head = b""
    yield [frame(sums.tobytes(), False)]
