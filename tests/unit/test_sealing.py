"""Blocks that are stored on disk with additional bytes: a change of any byte of a slot, or of the block's identity, is
detected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.disk.encryption import AESGCMCipher, DiskKey, read_key
from kvstore.disk.sealing import Encrypted, Seal, Summed, seal_of
from kvstore.disk.segments import CORRUPT

CANONICAL, KEY_BYTES, BLOCK, COUNT = b'{"a":1}', 16, 1000, 5
KEY = bytes(range(32))
KEYS = os.urandom(COUNT * KEY_BYTES)
SUMS = np.arange(COUNT, dtype=np.uint64)
PLACES = np.arange(COUNT, dtype=np.int64)[::-1].copy() * BLOCK


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def seals(block_bytes: int = BLOCK, key: bytes = KEY, canonical: bytes = CANONICAL) -> list[Seal]:
    return [
        Encrypted(canonical, KEY_BYTES, block_bytes, AESGCMCipher(key)),
        Summed(canonical, KEY_BYTES, block_bytes),
    ]


def read(seal: Seal, fd: int, keys: bytes = KEYS, sums: np.ndarray = SUMS) -> tuple[list[int], bytes]:
    memory = bytearray(COUNT * BLOCK)
    offsets = np.arange(COUNT, dtype=np.int64) * seal.slot_bytes
    return seal.read(fd, memoryview(memory), PLACES, offsets, keys, sums).tolist(), bytes(memory)


def write(seal: Seal, fd: int) -> bytes:
    memory = os.urandom(COUNT * BLOCK)
    offsets = np.arange(COUNT, dtype=np.int64) * seal.slot_bytes
    assert seal.write(fd, memory, PLACES, offsets, KEYS, SUMS) == 0
    return memory


@pytest.mark.parametrize("which", [0, 1], ids=["encrypted", "summed"])
def test_any_flipped_byte_is_noticed_without_affecting_other_blocks(fd: int, which: int) -> None:
    seal = seals()[which]
    memory = write(seal, fd)
    assert read(seal, fd) == ([0] * COUNT, memory)
    for at in [*range(0, BLOCK, 83), *range(BLOCK, seal.slot_bytes)]:
        place = 2 * seal.slot_bytes + at
        byte = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte[0] ^ 0x10]), place)
        assert read(seal, fd)[0] == [0, 0, CORRUPT, 0, 0], at
        os.pwrite(fd, byte, place)
    assert read(seal, fd) == ([0] * COUNT, memory)


@pytest.mark.parametrize("which", [0, 1], ids=["encrypted", "summed"])
def test_a_block_is_bound_to_its_namespace_key_and_checksum(fd: int, which: int) -> None:
    seal = seals()[which]
    write(seal, fd)
    other_key = KEYS[:KEY_BYTES] + KEYS[:KEY_BYTES] + KEYS[2 * KEY_BYTES :]
    assert read(seal, fd, keys=other_key)[0] == [0, CORRUPT, 0, 0, 0]
    assert read(seal, fd, sums=SUMS + np.array([0, 0, 0, 9, 0], dtype=np.uint64))[0] == [0, 0, 0, CORRUPT, 0]
    assert read(seals(canonical=b'{"a":2}')[which], fd)[0] == [CORRUPT] * COUNT


def test_a_truncated_file_lacks_its_last_blocks(fd: int) -> None:
    for seal in seals():
        write(seal, fd)
        os.ftruncate(fd, 3 * seal.slot_bytes + 1)
        assert read(seal, fd)[0] == [0, 0, 0, CORRUPT, CORRUPT]


def test_another_key_reads_nothing_and_nonces_never_repeat(fd: int) -> None:
    seal, other = seals()[0], seals(key=KEY[::-1])[0]
    write(seal, fd)
    assert read(other, fd)[0] == [CORRUPT] * COUNT
    cipher, nonces = AESGCMCipher(KEY), set()
    cipher._left = 1  # the last nonce with this prefix
    for _ in range(5):
        cipher._left = min(cipher._left, 3)
        nonces.add(cipher._next_nonce())
    assert len(nonces) == 5 and len({nonce[:8] for nonce in nonces}) >= 2


def test_slots_that_bypass_the_page_cache_are_whole_pages() -> None:
    for block_bytes, slots in ((1000, (1028, 1008)), (64 << 10, (17 << 12, 17 << 12)), (65_537, (65_565, 65_545))):
        assert tuple(seal.slot_bytes for seal in seals(block_bytes)) == slots
    assert seal_of(CANONICAL, KEY_BYTES, BLOCK, False, None) is None


def test_keys_are_derived_for_each_folder_and_shard() -> None:
    key, other = DiskKey(KEY), DiskKey(KEY[::-1])
    one, two = key.new_encryption(), key.new_encryption()
    assert one != two and key.is_key_of(one) and not other.is_key_of(one)
    keys = {key.shard_key(each, shard) for each in (one, two) for shard in (0, 1)}
    assert len(keys) == 4 and KEY not in keys and all(len(each) == 32 for each in keys)


def test_an_invalid_command_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for command, said in (("", "is empty"), ("'", "No closing quotation"), (f"{tmp_path}/program x", "No such file")):
        with pytest.raises(ValueError, match=said):
            read_key(None, command)
    file.write_text(bytes(31).hex())
    with pytest.raises(ValueError, match="31 bytes"):
        read_key(None, f"cat {file}")
    file.write_text(f" {KEY.hex()}\n")
    read = read_key(None, f"cat '{file}'")
    assert read is not None and read.is_key_of(DiskKey(KEY).new_encryption())
    assert read_key(None, None) is None
