"""The index built from engines' KV events: it is compared with a plain model of the engines' blocks, and stays within
its memory."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client.engine.block_index import INDEXED_BLOCK_BYTES, Index, PromptExtras
from tests.support.properties import examples

SIZE = 2
ENGINES = ("a", "b")
MEDIA = ("GPU", "CPU")
# Fields other than tokens that decide a block's key, and their form in an event.
KEYS: dict[str, PromptExtras] = {
    "": PromptExtras(),
    "salt": PromptExtras(cache_salt="x"),
    "adapter": PromptExtras(lora_name="x"),
    "other adapter": PromptExtras(lora_name="y"),
    "both": PromptExtras(lora_name="x", cache_salt="x"),
    "picture": PromptExtras(media=(("x", 1, 3),)),
    "other picture": PromptExtras(media=(("y", 1, 3),)),
    "moved picture": PromptExtras(media=(("x", 0, 3),)),
}


def hashes_of(tokens: list[int], named: str, model: str = "") -> list[bytes]:
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [hashlib.sha256(repr((tokens[:end], named, model)).encode()).digest() for end in ends]


def stored(
    tokens: list[int], medium: str = "GPU", named: str = "", first: int = 0, group: int = 0, model: str = ""
) -> dict[str, Any]:
    """Return an event in the form in which msgpack decodes it."""
    hashes, keys = hashes_of(tokens, named, model), KEYS[named]
    extras = [keys.of_block(number * SIZE, SIZE) or None for number in range(first, len(hashes))]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * SIZE : len(hashes) * SIZE],
        "block_size": SIZE,
        "lora_name": keys.lora_name or None,
        "medium": medium,
        "group_idx": group,
        "extra_keys": extras if any(extras) else None,
    }
    return dict(msgspec.msgpack.decode(msgspec.msgpack.encode(event)))


def removed(hashes: list[bytes], medium: str = "GPU", group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}


def found(index: Index, tokens: list[int], engine: str, named: str = "") -> dict[str, int]:
    hashes, size = index.chain(tokens, KEYS[named], engine)
    return {tier: run * size for tier, run in index.runs(hashes, engine).get(engine, {}).items()}


def check(index: Index) -> None:
    """Check that every place refers to a block that some tier has, and that every block in a tier has a place."""
    for engine in index._engines.values():
        there = set().union(*engine.sets())
        assert set(engine.places) == there
        assert set(engine.children.values()) <= there
        assert all(engine.places[block_hash] == place for place, block_hash in engine.children.items())
        assert engine.holdings == sum(map(len, engine.sets()))
    assert index.held_bytes == sum(engine.held_bytes for engine in index._engines.values())


prompts = st.lists(st.integers(0, 1), max_size=8)
steps = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear", "forget", "look"]),
    st.sampled_from(ENGINES),
    prompts,
    st.sampled_from(MEDIA),
    st.sampled_from(list(KEYS)),
    st.integers(0, 3),
    st.integers(0, 1),
)


@settings(max_examples=examples(2))
@given(st.lists(steps, max_size=60), st.sampled_from([1 << 30, 12 * INDEXED_BLOCK_BYTES]))
def test_it_agrees_with_a_plain_model_and_never_claims_more(does: list[Any], memory_bytes: int) -> None:
    """With enough memory, the index agrees with the model. With little memory, it reports at most the blocks of the
    model, and stays within its memory."""
    index = Index(memory_bytes)
    model: dict[str, dict[tuple[str, int], set[bytes]]] = {}
    for what, engine, tokens, medium, named, first, group in does:
        hashes = hashes_of(tokens, named)
        if what == "store" and first < len(hashes):
            index.apply(engine, stored(tokens, medium, named, first, group))
            model.setdefault(engine, {}).setdefault((medium, group), set()).update(hashes[first:])
        elif what == "remove":
            index.apply(engine, removed(hashes[first:], medium, group))
            model.setdefault(engine, {}).get((medium, group), set()).difference_update(hashes[first:])
        elif what == "clear":
            index.apply(engine, {"type": "AllBlocksCleared"})
            for tier, each in model.get(engine, {}).items():
                each.clear() if tier[0] == "GPU" else None
        elif what == "forget":
            index.forget(engine)
            model.pop(engine, None)
        for name, tiers in model.items():
            anywhere = set().union(*tiers.values())
            chain: list[bytes] = []
            for each in hashes:
                if each not in anywhere:
                    break
                chain.append(each)
            says = found(index, tokens, name, named)
            for tier in {tier for tier, _ in tiers}:
                groups = [each for (other, _), each in tiers.items() if other == tier]
                run = next((n for n, each in enumerate(chain) if not all(each in g for g in groups)), len(chain))
                if memory_bytes > 1 << 20:
                    assert says[tier] == run * SIZE
                else:
                    assert says.get(tier, 0) <= run * SIZE
        check(index)
        assert index.held_bytes <= memory_bytes


@pytest.mark.parametrize("asked", list(KEYS))
@pytest.mark.parametrize("told", list(KEYS))
def test_blocks_of_other_adapters_salts_and_pictures_are_not_followed(told: str, asked: str) -> None:
    index, tokens = Index(), [1] * 8
    index.apply("a", stored(tokens, named=told))
    expected = 8 if told == asked else 0
    assert found(index, tokens, "a", asked)["GPU"] == expected


def test_engines_of_two_models_are_never_mixed() -> None:
    """The engines' blocks have the same tokens and even the same hashes, but the models differ."""
    index, tokens = Index(), [1] * 8
    index.apply("a", stored(tokens[:4], model="one"))
    index.apply("b", stored(tokens, model="two"))
    index.apply("c", stored(tokens, model="one", first=2))
    assert [found(index, tokens, name)["GPU"] for name in "abc"] == [4, 8, 0]


def test_store_blocks_are_kept_only_for_their_engines_and_within_bounds() -> None:
    silent, asking = Index(1 << 20), Index(1 << 20, storage=True)
    for number in range(20_000):
        event = stored([number, 7], "STORAGE")
        silent.apply("a", event)
        asking.apply("a", event)
    assert (silent.blocks, silent.held_bytes, silent.engines) == (0, 0, [])
    assert 2500 < asking.blocks <= (1 << 20) // INDEXED_BLOCK_BYTES and asking.held_bytes <= 1 << 20
    assert found(asking, [19_999, 7], "a")["STORAGE"] == 2, "the newest are kept"
    assert found(asking, [0, 7], "a")["STORAGE"] == 0


def test_the_engine_with_most_blocks_loses_some_and_requested_blocks_stay() -> None:
    index = Index(100 * INDEXED_BLOCK_BYTES)
    prompt = list(range(1000, 1016))
    index.apply("small", stored(prompt))
    index.apply("large", stored(prompt))
    for number in range(1000):
        index.apply("large", stored([number, 7]))
        assert found(index, prompt, "large")["GPU"] == 16
    assert found(index, prompt, "small")["GPU"] == 16
    assert index.blocks == 100


def test_a_block_takes_no_more_memory_than_is_counted() -> None:
    """The memory is measured at a size at which the index's tables have just grown."""
    events = []
    parent = None
    for number in range(22_000):
        name = hashlib.sha256(b"%d" % number).digest()
        event = {**stored([1, 2]), "block_hashes": [name], "parent_block_hash": parent}
        events.append(msgspec.msgpack.encode(event))
        parent = name
    index = Index()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for each in events:
            index.apply("a", msgspec.msgpack.decode(each))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= index.held_bytes * 1.1 and index.held_bytes == 22_000 * INDEXED_BLOCK_BYTES
