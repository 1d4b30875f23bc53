"""Namespaces have one canonical form, and invalid keys are refused before anything is sent."""

from __future__ import annotations

import array
import json
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import _cext, wire
from kvstore_client import Namespace, prefix_keys
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
def test_any_different_field_gives_another_namespace(changed: dict[str, Any]) -> None:
    others = [namespace(), namespace(world=2)] if "rank" in changed else [namespace()]
    assert namespace(**changed).id not in [other.id for other in others]


@pytest.mark.parametrize(
    ("changed", "error", "part"),
    [
        ({"block_bytes": 0}, ValueError, "block_bytes=0: expected 1 to 67108864"),
        ({"block_bytes": 2**26 + 1}, ValueError, "67108865"),
        ({"block_bytes": 4096.0}, TypeError, "block_bytes=4096.0 is of type float: expected a whole number"),
        ({"block_tokens": True}, TypeError, "block_tokens=True"),
        ({"block_tokens": 0}, ValueError, "block_tokens=0: expected at least 1"),
        ({"rank": 1}, ValueError, "rank=1: expected less than world=1"),
        ({"rank": -1}, ValueError, "rank=-1"),
        ({"world": 0}, ValueError, "world=0: expected at least 1"),
        ({"model": b"m"}, TypeError, "model=b'm' is of type bytes: expected a string"),
        ({"dtype": "banana"}, ValueError, "dtype='banana': expected one of float64, float32, float16, bfloat16, "),
        ({"dtype": 16}, TypeError, "dtype=16 is of type int: expected a name, such as 'bfloat16', or a dtype"),
        ({"dtype": np.complex64}, ValueError, "expected one of float64"),
        ({"model": ""}, ValueError, "model='': expected the model's name"),
        ({"extra": {"lora": 7}}, TypeError, "extra={'lora': 7}: expected a dict of strings"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
)
def test_an_invalid_field_is_named(changed: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        namespace(**changed)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (np.float16, "float16"),
        (np.dtype("uint8"), "uint8"),
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_a_dtype_may_be_given_by_any_of_its_names(given: Any, name: str) -> None:
    assert namespace(dtype=given) == namespace(dtype=name) and namespace(dtype=given).dtype == name
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_size": 8, "block_tokens": 4}
    assert Namespace.for_model("m", dtype=given, **shape) == Namespace.for_model("m", dtype=name, **shape)


def test_a_dtype_of_torch_is_accepted() -> None:
    torch = pytest.importorskip("torch")
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"):
        assert namespace(dtype=getattr(torch, name)).dtype == name


def test_a_namespace_is_immutable() -> None:
    extra = {"a": "1"}
    one = namespace(extra=extra)
    extra["a"] = "2"
    assert one == namespace(extra={"a": "1"})
    with pytest.raises(AttributeError):
        one.model = "other"


def test_equal_namespaces_are_one_dict_key() -> None:
    clients = {namespace(extra={"a": "1", "b": "2"}): "a client"}
    assert clients[namespace(extra={"b": "2", "a": "1"})] == "a client"
    assert namespace(extra={"a": "1"}) not in clients


def test_numpy_integers_are_accepted() -> None:
    one = namespace(block_tokens=np.int64(16), block_bytes=np.uint32(4096), rank=np.int8(0))
    assert one == namespace() and one.id == namespace().id and type(one.block_bytes) is int


# ---- of a model ----------------------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {"layers": 28, "kv_heads": 4, "head_size": 128, "dtype": "bfloat16", "block_tokens": 16}


def test_the_size_of_a_block_follows_from_the_model() -> None:
    made = Namespace.for_model("Qwen/Qwen2.5-7B-Instruct", **MODEL)
    assert made == Namespace(
        model="Qwen/Qwen2.5-7B-Instruct", dtype="bfloat16", block_tokens=16, block_bytes=28 * 2 * 16 * 4 * 128 * 2
    )
    assert Namespace.for_model("m", **{**MODEL, "dtype": "fp8_e4m3"}).block_bytes == made.block_bytes // 2
    assert Namespace.for_model("m", **{**MODEL, "layers": np.int64(28)}).block_bytes == made.block_bytes


def test_other_fields_of_a_models_namespace_are_given_by_name() -> None:
    made = Namespace.for_model("m", **MODEL, rank=1, world=2, tenant="t", extra={"lora": "x"})
    assert (made.rank, made.world, made.tenant, made.extra) == (1, 2, "t", {"lora": "x"})


@pytest.mark.parametrize(
    ("changed", "error", "part"),
    [
        ({"dtype": "banana"}, ValueError, "dtype='banana': expected one of float64, float32, float16, bfloat16, "),
        ({"layers": 0}, ValueError, "layers=0: expected at least 1"),
        ({"kv_heads": 4.0}, TypeError, "kv_heads=4.0 is of type float"),
        ({"block_tokens": 1 << 20}, ValueError, "expected at most 67108864; choose fewer block_tokens"),
        ({"block_bytes": 4096}, TypeError, "block_bytes is computed"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
)
def test_an_impossible_model_is_refused(changed: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        Namespace.for_model("m", **{**MODEL, **changed})
    assert part in str(caught.value)


# ---- keys of tokens ------------------------------------------------------------------------------------------------

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize(
    "given",
    [
        TOKENS,
        tuple(TOKENS),
        iter(TOKENS),
        (token for token in TOKENS),
        array.array("i", TOKENS),
        np.array(TOKENS, dtype=np.int32),
        np.array(TOKENS, dtype=np.uint16),
        np.array(TOKENS, dtype=np.uint64),
        np.repeat(np.array(TOKENS), 2)[::2],
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda given: type(given).__name__,
)
def test_tokens_are_any_integers(given: Any) -> None:
    expected = _cext.prefix_keys(np.array(TOKENS, dtype=np.int64), 4)
    assert np.array_equal(namespace(block_tokens=4).keys(given), expected)


def test_prefix_keys_take_lists_and_continue_chains() -> None:
    whole = prefix_keys(TOKENS, 2, b"salt")
    first = prefix_keys(TOKENS[:4], 2, b"salt")
    assert np.array_equal(np.concatenate([first, prefix_keys(TOKENS[4:], 2, parent=first[-1])]), whole)
    assert not np.array_equal(prefix_keys(TOKENS, 2), whole)
    assert prefix_keys([], 2).shape == (0, 16)


@pytest.mark.parametrize(
    ("tokens", "error", "part"),
    [
        ("text", TypeError, "token_ids is of type str: expected an array"),
        (b"text", TypeError, "token_ids is of type bytes"),
        (7, TypeError, "token_ids is of type int"),
        ([1.5, 2], TypeError, "token_ids: an array of float64 of shape (2,): expected one row of integers"),
        ([True, False], TypeError, "token_ids: an array of bool"),
        ([[1, 2], [3, 4]], TypeError, "shape (2, 2)"),
        ([[1, 2], [3]], ValueError, "token_ids: "),
        (["a", "b"], TypeError, "token_ids: an array of <U1"),
        ([1, -1], ValueError, "tokens[1] is -1"),
        ([1 << 32], ValueError, "tokens[0] is 4294967296"),
        ([(1 << 64) - 1], ValueError, "token_ids: 18446744073709551615"),
    ],
)
def test_invalid_tokens_are_refused(tokens: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        prefix_keys(tokens, 1)
    assert part in str(caught.value)


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_bytes", [8, 9, 16, 64])
def test_bytes_and_arrays_pack_alike(key_bytes: int) -> None:
    keys = [bytes([number]) * key_bytes for number in range(5)]
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(5, key_bytes)
    unordered = dict.fromkeys(keys)
    for given in (keys, tuple(keys), [bytearray(key) for key in keys], iter(keys), unordered, unordered.keys(), table):
        packed = pack_keys(given)
        assert packed.shape == (5, key_bytes) and packed.tobytes() == b"".join(keys)


def test_an_array_of_keys_is_not_copied() -> None:
    table = np.zeros((5, 16), dtype=np.uint8)
    assert np.shares_memory(pack_keys(table), table)


def test_keys_from_an_array_with_other_columns_are_packed() -> None:
    table = np.arange(5 * 40, dtype=np.uint8).reshape(5, 40)
    assert pack_keys(table[:, 8:24]).tobytes() == b"".join(row[8:24].tobytes() for row in table)


def test_no_keys_are_accepted() -> None:
    assert len(pack_keys([])) == 0
    assert len(pack_keys(np.empty((0, 16), dtype=np.uint8))) == 0


@pytest.mark.parametrize(
    ("keys", "error", "part"),
    [
        ([b"short"], ValueError, "keys of 5 bytes: expected 8 to 64"),
        ([bytes(65)], ValueError, "keys of 65 bytes: expected 8 to 64"),
        ([bytes(8), bytes(9)], ValueError, "[8, 9]"),
        ([bytes(9), bytes(8), bytes(10)], ValueError, "[8, 9, 10]"),
        (bytes(16), TypeError, "is of type bytes"),
        ("a key as text", TypeError, "is of type str"),
        (["a key as text"], TypeError, "expected bytes"),
        (7, TypeError, "keys is of type int: expected a list, or another iterable, of bytes"),
        (iter([1, 2]), TypeError, "expected bytes"),
        (np.zeros((2, 7), dtype=np.uint8), ValueError, "keys of 7 bytes: expected 8 to 64"),
        (np.zeros((2, 16), dtype=np.int8), ValueError, "int8 of shape (2, 16): expected uint8 of shape (n, key_bytes)"),
        (np.zeros(16, dtype=np.uint8), ValueError, "uint8 of shape (16,): expected uint8 of shape (n, key_bytes)"),
    ],
)
def test_invalid_keys_are_refused(keys: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        pack_keys(keys)
    assert part in str(caught.value)
