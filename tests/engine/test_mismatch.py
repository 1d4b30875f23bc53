"""An engine that finds no blocks logs the reason if another engine stores blocks of the same model in another
namespace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvstore_client import Namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.vllm.connector.mismatch import explain_mismatch
    from tests.engine.engine_config import Rank, heads


@pytest.fixture
def mine(rank: Rank) -> Namespace:
    return rank.namespace(heads(4))


def other(namespace: Namespace, **changes: Any) -> str:
    """Return the canonical JSON of a namespace with these changes; names with ``extra_`` change the extra fields."""
    extra = {name.removeprefix("extra_"): value for name, value in changes.items() if name.startswith("extra_")}
    fields = {name: value for name, value in changes.items() if not name.startswith("extra_")}
    changed = msgspec.structs.replace(namespace, extra={**namespace.extra, **extra}, **fields)
    return changed.canonical().decode()


def test_another_hash_seed_is_explained_even_next_to_our_namespace(mine: Namespace) -> None:
    text = explain_mismatch(mine, [other(mine), other(mine, extra_hash="sha256-00")])
    assert text is not None
    assert "hash=sha256-00, this one uses sha256-" in text
    assert "same PYTHONHASHSEED" in text and "--prefix-caching-hash-algo" in text


def test_another_block_size_is_explained_without_its_consequences(mine: Namespace) -> None:
    theirs = other(mine, block_tokens=16, block_bytes=mine.block_bytes // 2, layout="elsewise")
    text = explain_mismatch(mine, [theirs])
    assert text == (
        "another engine stores the same model with block_tokens=16, this one uses 32: the two do not share blocks. "
        "If they should, set the same --block-size"
    )


def test_other_layer_slices_are_explained(mine: Namespace) -> None:
    text = explain_mismatch(mine, [other(mine, block_bytes=mine.block_bytes // 4, extra_layer_parts="4")])
    assert text is not None and text.endswith(
        "with layer_parts=4, this one uses 1: the two do not share blocks. If they should, give the same layer_parts"
    )


def test_the_most_similar_namespace_is_explained(mine: Namespace) -> None:
    far = other(mine, extra_pages="page-1", dtype="float16", extra_config="0")
    text = explain_mismatch(mine, [far, other(mine, layout="elsewise"), far])
    assert text is not None and "layout=elsewise" in text and "dtype" not in text


def test_another_revision_of_a_hub_model_is_explained(mine: Namespace) -> None:
    mine = msgspec.structs.replace(mine, model="org/tiny@new")
    text = explain_mismatch(mine, [other(mine, model="org/tiny@old"), other(mine, model="org/other@new")])
    assert text is not None and "model=org/tiny@old, this one uses org/tiny@new" in text and "--revision" in text


def strangers_on_purpose(mine: Namespace) -> Iterator[str]:
    yield other(mine, tenant="another", dtype="float16")
    yield other(mine, model="qwen2@0123", dtype="float16")
    yield other(mine, rank=1, world=2)
    yield Namespace(model=mine.model, dtype="float16", block_tokens=32, block_bytes=8).canonical().decode()
    yield other(mine, extra_another="kind of cache", dtype="float16")
    yield from ("", "[]", "{", '{"extra": 1}')


def test_namespaces_of_other_models_are_not_explained(mine: Namespace) -> None:
    assert explain_mismatch(mine, strangers_on_purpose(mine)) is None
    assert explain_mismatch(mine, []) is None


def test_nothing_is_logged_while_the_store_has_our_blocks(mine: Namespace) -> None:
    assert explain_mismatch(mine, [other(mine), other(mine, block_tokens=16)]) is None
