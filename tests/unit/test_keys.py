"""Namespaces have one canonical form, and keys that cannot be keys are refused before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import wire
from kvstore_client import Namespace
from kvstore_client.keys import pack_keys

FIELDS: dict[str, Any] = {"model": "m", "dtype": "bfloat16", "block_tokens": 16, "block_bytes": 4096}


def namespace(**changed: Any) -> Namespace:
    return Namespace(**{**FIELDS, **changed})


def test_the_canonical_form_is_sorted_json_without_spaces() -> None:
    canonical = namespace(model="Qwen/Qwen2.5-7B", extra={"b": "2", "a": "ü"}).canonical()
    fields = json.loads(canonical)
    again = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical == again.encode()
    assert fields["version"] == wire.NAMESPACE_VERSION and fields["extra"] == {"a": "ü", "b": "2"}


def test_the_id_is_xxh3_of_the_canonical_form() -> None:
    one = namespace()
    assert one.id == xxhash.xxh3_128_hexdigest(one.canonical())
    assert bytes.fromhex(one.id) == wire.namespace_id(one.canonical())


def test_equal_fields_are_the_same_namespace() -> None:
    one, other = namespace(extra={"a": "1", "b": "2"}), namespace(extra={"b": "2", "a": "1"})
    assert one == other and one.id == other.id


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"dtype": "float16"},
        {"block_tokens": 32},
        {"block_bytes": 8192},
        {"layout": "layer"},
        {"world": 2},
        {"world": 2, "rank": 1},
        {"tenant": "t"},
        {"extra": {"a": "b"}},
    ],
)
def test_any_field_that_differs_is_another_namespace(changed: dict[str, Any]) -> None:
    others = [namespace(), namespace(world=2)] if "rank" in changed else [namespace()]
    assert namespace(**changed).id not in [other.id for other in others]


@pytest.mark.parametrize(
    ("changed", "error", "part"),
    [
        ({"block_bytes": 0}, ValueError, "block_bytes=0: expected 1 to 67108864"),
        ({"block_bytes": 2**26 + 1}, ValueError, "67108865"),
        ({"block_bytes": 4096.0}, TypeError, "block_bytes=4096.0: expected a whole number"),
        ({"block_tokens": True}, TypeError, "block_tokens=True"),
        ({"block_tokens": 0}, ValueError, "block_tokens=0: expected at least 1"),
        ({"rank": 1}, ValueError, "rank=1, world=1"),
        ({"rank": -1}, ValueError, "rank=-1"),
        ({"model": b"m"}, TypeError, "model=b'm': expected a string"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
)
def test_a_field_that_cannot_be_is_named(changed: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        namespace(**changed)
    assert part in str(caught.value)


def test_a_namespace_does_not_change() -> None:
    with pytest.raises(AttributeError):
        namespace().model = "other"


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_bytes", [8, 9, 16, 64])
def test_bytes_and_arrays_pack_alike(key_bytes: int) -> None:
    keys = [bytes([number]) * key_bytes for number in range(5)]
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(5, key_bytes)
    for given in (keys, tuple(keys), [bytearray(key) for key in keys], array):
        packed = pack_keys(given)
        assert packed.shape == (5, key_bytes) and packed.tobytes() == b"".join(keys)


def test_an_array_of_keys_is_not_copied() -> None:
    array = np.zeros((5, 16), dtype=np.uint8)
    assert np.shares_memory(pack_keys(array), array)


def test_keys_out_of_an_array_with_other_columns_are_packed() -> None:
    table = np.arange(5 * 40, dtype=np.uint8).reshape(5, 40)
    assert pack_keys(table[:, 8:24]).tobytes() == b"".join(row[8:24].tobytes() for row in table)


def test_no_keys_are_fine() -> None:
    assert len(pack_keys([])) == 0
    assert len(pack_keys(np.empty((0, 16), dtype=np.uint8))) == 0


@pytest.mark.parametrize(
    ("keys", "error", "part"),
    [
        ([b"short"], ValueError, "keys of 5 bytes: expected 8 to 64"),
        ([bytes(65)], ValueError, "keys of 65 bytes: expected 8 to 64"),
        ([bytes(8), bytes(9)], ValueError, "[8, 9]"),
        ([bytes(9), bytes(8), bytes(10)], ValueError, "[8, 9, 10]"),
        (bytes(16), TypeError, "a single bytes"),
        ("a key as text", TypeError, "a single str"),
        (["a key as text"], TypeError, "expected bytes"),
        (np.zeros((2, 7), dtype=np.uint8), ValueError, "keys of 7 bytes: expected 8 to 64"),
        (np.zeros((2, 16), dtype=np.int8), ValueError, "int8 (2, 16): expected uint8 (n, key_bytes)"),
        (np.zeros(16, dtype=np.uint8), ValueError, "uint8 (16,): expected uint8 (n, key_bytes)"),
    ],
)
def test_keys_that_are_none_are_refused(keys: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        pack_keys(keys)
    assert part in str(caught.value)
