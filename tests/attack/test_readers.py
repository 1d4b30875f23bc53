"""One faulty reader cannot harm the blocks of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.wire import remote_memory
from kvstore_client import KVStoreClient
from kvstore_client._links import targets
from tests.support.harness import (
    DELETE,
    DELETE_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    blocks_of,
    make_keys,
    pack,
    set_frames,
)


def test_a_reader_with_a_broken_checksum_deletes_nothing(
    server: Server, new_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, keys = new_namespace(4096), make_keys(50)
    blocks = blocks_of(keys, 4096)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(keys, blocks)
        with monkeypatch.context() as patch:
            break_checksums(patch)
            assert client.get(keys).hit == 0 and client.stats.checksum_errors == 50
        assert client.get(keys).blocks == blocks


def break_checksums(patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of every checksum that this process computes."""
    right = targets.checksum_into

    def wrong(buffers: object, out: object) -> None:
        right(buffers, out)  # type: ignore[arg-type] # whatever it was given
        out[:] ^= 1  # type: ignore[index] # an array

    patch.setattr(targets, "checksum_into", wrong)
    landed = targets.IntoTarget.landed

    def all_wrong(self: targets.IntoTarget, positions: Any, landing: Any) -> tuple[Any, Any]:
        right, bad = landed(self, positions, landing)
        self.present[positions] = False
        self.bad.extend(positions[right].tolist())
        return right & False, right | bad

    patch.setattr(targets.IntoTarget, "landed", all_wrong)
    copy = remote_memory.copy_blocks

    def wrong_copies(*arguments: Any, **options: Any) -> Any:
        return copy(*arguments, **options) ^ np.uint64(1)

    patch.setattr(remote_memory, "copy_blocks", wrong_copies)


def test_only_damaged_blocks_are_deleted_as_damaged(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(4096), make_keys(6)
    blocks = blocks_of(keys, 4096)
    with RawClient(server) as raw, KVStoreClient(server.endpoint, namespace) as client:
        raw.hello(namespace.canonical())
        assert raw.ask(*set_frames(1, keys[:3], blocks[:3]))[3] == 3
        assert raw.ask(*set_frames(2, keys[3:], blocks[3:], sums=bytes(24)))[3] == 3  # checksums of other bytes
        joined = b"".join(keys)
        assert raw.ask(pack(DELETE, 3, 5000, 6, 16, True), joined) == [DELETE_REPLY, 3, 3]
        assert raw.ask(pack(DELETE, 4, 5000, 6, 16, True), joined) == [DELETE_REPLY, 4, 0]
        assert list(client.contains(keys)) == [True] * 3 + [False] * 3
        assert client.get(keys[:3]).blocks == blocks[:3]
