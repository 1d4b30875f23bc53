"""Block MACs: which data they cover, and which secrets are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvstore._cext import BlockFrames
from kvstore.secret_files import read_secret
from kvstore.wire import decode_namespace
from kvstore_client import KVStoreClient, Namespace
from kvstore_client._links.block_mac import BlockMac, mac_of

NAMESPACE = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=8, extra={"a": "b"})
SECRET = bytes(range(32))
KEYS = np.arange(32, dtype=np.uint8).reshape(2, 16)


def one_mac(secret: bytes, namespace: Namespace, key: np.ndarray, block: bytes) -> int:
    return int(BlockMac(secret, namespace).batch(key.reshape(1, -1)).of([0], [memoryview(block)])[0])


def test_a_mac_equals_the_vector_of_the_protocol() -> None:
    """The expected values are those of docs/protocol.md."""
    mac = BlockMac(SECRET, NAMESPACE)
    names = blake3(SECRET, derive_key_context="kvstore 2026-11 name of a key of block MACs").digest()
    name = "blake3-" + blake3(NAMESPACE.canonical(), key=names).hexdigest(length=8)
    assert mac.namespace.extra == {"a": "b", "block_mac": name}
    root = blake3(SECRET, derive_key_context="kvstore 2026-11 key of block MACs").digest()
    key = blake3(mac.namespace.canonical(), key=root).digest()
    expected = blake3(b"contents" + KEYS[1].tobytes(), key=key).digest()[:8]
    assert mac.batch(KEYS).of([1], [memoryview(b"contents")]).tobytes() == expected
    assert (name, expected.hex()) == ("blake3-ef0d49e6dfa5de8f", "50f61c91e6a19edd")


def test_every_covered_field_changes_the_mac() -> None:
    other = Namespace(model="n", dtype="uint8", block_tokens=16, block_bytes=8, extra={"a": "b"})
    macs = [
        one_mac(SECRET, NAMESPACE, KEYS[0], b"contents"),
        one_mac(SECRET, NAMESPACE, KEYS[0], b"contenu?"),
        one_mac(SECRET, NAMESPACE, KEYS[1], b"contents"),
        one_mac(SECRET, other, KEYS[0], b"contents"),
        one_mac(SECRET[::-1], NAMESPACE, KEYS[0], b"contents"),
    ]
    assert len(set(macs)) == len(macs)


def test_a_tenant_added_by_the_server_never_makes_two_keys_equal() -> None:
    """The server may put two clients into the same tenant: one that names this tenant, and one that names none."""
    named = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=8, tenant="t", extra={"a": "b"})
    assert BlockMac(SECRET, named).namespace.extra != BlockMac(SECRET, NAMESPACE).namespace.extra


def test_a_server_knows_which_namespaces_have_macs() -> None:
    assert not decode_namespace(NAMESPACE.canonical()).opaque_sums
    assert decode_namespace(BlockMac(SECRET, NAMESPACE).namespace.canonical()).opaque_sums


def test_a_namespace_accepts_its_own_mac_mark_and_refuses_another() -> None:
    marked = BlockMac(SECRET, NAMESPACE).namespace
    assert BlockMac(SECRET, marked).namespace == marked
    with pytest.raises(ValueError, match=r"block_mac.*another block secret"):
        BlockMac(SECRET[::-1], marked)


@pytest.mark.parametrize(
    ("secret", "error", "said"),
    [
        (b"", ValueError, "0 bytes: expected at least 16"),
        ("fifteen letters", ValueError, "15 bytes: expected at least 16"),
        (17, TypeError, "block_secret is of type int: expected bytes or a string"),
    ],
)
def test_an_invalid_secret_is_refused(secret: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        KVStoreClient("127.0.0.1:1", NAMESPACE, block_secret=secret, fail_open=True)  # type: ignore[arg-type]


def test_blocks_with_macs_are_verified_in_any_case() -> None:
    with pytest.raises(ValueError, match="checksum=False and a block secret"):
        KVStoreClient("127.0.0.1:1", NAMESPACE, block_secret=SECRET, checksum=False, fail_open=True)


def test_the_environment_names_one_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET.hex().encode() + b"\n")
    file.chmod(0o640)
    assert mac_of(NAMESPACE, None) is None
    monkeypatch.setenv("KVSTORE_BLOCK_SECRET_FILE", str(file))
    found = mac_of(NAMESPACE, None)
    assert found is not None and found.namespace == BlockMac(SECRET.hex().encode(), NAMESPACE).namespace
    monkeypatch.setenv("KVSTORE_BLOCK_SECRET", "another secret, of 29 letters")
    with pytest.raises(ValueError, match="both KVSTORE_BLOCK_SECRET and KVSTORE_BLOCK_SECRET_FILE"):
        mac_of(NAMESPACE, None)


def test_a_secret_file_readable_by_everybody_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for content, mode, said in (
        (b"secret", 0o644, "its mode is 0644, so every user"),
        (b" \n", 0o600, "it is empty"),
        (b"s" * 5000, 0o600, "more than 4096 bytes"),
    ):
        file.write_bytes(content)
        file.chmod(mode)
        with pytest.raises(ValueError, match=said):
            read_secret(file, "--option")
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(ValueError, match=said):
            read_secret(path, "--option")


def test_checksums_must_be_one_per_block() -> None:
    blocks = [bytes(4), bytes(4)]
    BlockFrames(b"", blocks, 4, 1, np.zeros(2, dtype=np.uint64))
    with pytest.raises(ValueError, match="sums"):
        BlockFrames(b"", blocks, 4, 1, np.zeros(3, dtype=np.uint64))
