"""How many blocks `kvstore bench` may set on a shard that is in use without evicting other blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.wire import DiskInfo, NamespaceInfo, ShardInfo
from kvstore_cli.bench import room_for

SEGMENT = 4 << 20
BLOCK = 1 << 20


def shard(segments_free: int, **fields: Any) -> ShardInfo:
    zeros = dict.fromkeys(ShardInfo.__struct_fields__, 0)
    known = {"node": "n", "version": "", "policy": "default", "disk": None, "name": "n/0", "namespaces": []}
    return ShardInfo(**{**zeros, **known, "segment_bytes": SEGMENT, "segments_free": segments_free, **fields})


def disk(segments_free: int, state: str = "on") -> DiskInfo:
    zeros = dict.fromkeys(DiskInfo.__struct_fields__, 0)
    return DiskInfo(**{**zeros, "state": state, "segment_bytes": SEGMENT, "segments_free": segments_free})


def namespace(blocks: int, segments: int) -> NamespaceInfo:
    zeros = dict.fromkeys(NamespaceInfo.__struct_fields__, 0)
    return NamespaceInfo(**{**zeros, "id": "", "namespace": "{}", "blocks": blocks, "segments": segments})


@pytest.mark.parametrize(("free", "blocks"), [(0, 0), (1, 4), (10, 40)])
def test_free_segments_hold_whole_blocks(free: int, blocks: int) -> None:
    assert room_for(shard(free), BLOCK) == blocks
    assert room_for(shard(free), BLOCK + 1) == 3 * free
    assert room_for(shard(free), SEGMENT + 1) == 0


def test_segments_of_namespaces_that_hold_nothing_are_free() -> None:
    assert room_for(shard(1, namespaces=[namespace(0, 2), namespace(1, 5)]), BLOCK) == 3 * 4


def test_the_index_of_small_blocks_takes_memory_from_blocks() -> None:
    room = room_for(shard(1024), 64)
    assert 0 < room < 1024 * SEGMENT // 64 // 2
    # An index that already exceeds its free allowance leaves less room.
    assert room_for(shard(4, index_bytes=(96 << 20) + SEGMENT), BLOCK) == 2 * 4
    assert room_for(shard(4, index_bytes=(96 << 20) + 9 * SEGMENT), BLOCK) == 0


def test_a_full_disk_leaves_no_room_unless_it_takes_no_blocks() -> None:
    assert room_for(shard(10, disk=disk(0)), BLOCK) == 0
    assert room_for(shard(10, disk=disk(1)), BLOCK) == 0
    assert room_for(shard(10, disk=disk(3)), BLOCK) == 2 * 4
    assert room_for(shard(10, disk=disk(0, "off")), BLOCK) == 40
    assert room_for(shard(10, disk=disk(9, "out of space")), BLOCK) == 40
