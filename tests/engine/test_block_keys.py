"""The keys of blocks, which must cover everything that decides their bytes, also where the engine's hashes do not."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.config import LoRAConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvstore_client.vllm.connector.block_keys import BlockKeys
    from kvstore_client.vllm.shared import media_contents
    from kvstore_client.vllm.shared.model_identity import adapter_settings
    from tests.engine.made_requests import picture

BLOCK_TOKENS = 16


@pytest.fixture(autouse=True)
def root_hash() -> None:
    init_none_hash(sha256)


def request(
    lora: LoRARequest | None = None,
    tokens: int | list[int] = 100,
    *,
    ids: bool = True,
    pooling: Any = None,
    **more: Any,
) -> Request:
    """Return a request of vLLM's own class, hashed by vLLM's own hasher. ids: whether it has token ids."""
    prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Request(
        "request",
        prompt if ids else None,
        None if pooling else SamplingParams(),
        pooling,
        lora_request=lora,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        **more,
    )


def adapter(folder: Path, weights: bytes = b"w", config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return folder


def sql(folder: Path, *, int_id: int = 1, path: str = "", **more: Any) -> LoRARequest:
    return LoRARequest("sql", int_id, path or str(folder), **more)


def keys_of(keys: BlockKeys, lora: LoRARequest | None = None) -> list[bytes]:
    return list(keys.of(request(lora)))


def test_a_request_without_adapter_has_the_engines_own_hashes() -> None:
    plain = request()
    assert BlockKeys(BLOCK_TOKENS).of(plain) is plain.block_hashes
    assert len(plain.block_hashes) == 6


def test_an_adapters_content_is_in_the_key_in_every_engine(tmp_path: Path) -> None:
    lora = sql(adapter(tmp_path / "sql"))
    here, elsewhere = keys_of(BlockKeys(BLOCK_TOKENS), lora), keys_of(BlockKeys(BLOCK_TOKENS), lora)
    assert here == elsewhere
    assert set(here).isdisjoint(request(lora).block_hashes)
    assert {len(key) for key in here} == {len(request(lora).block_hashes[0])} == {32}


@pytest.mark.parametrize("change", [{"weights": b"v"}, {"config": '{"r": 8}'}])
def test_other_content_at_the_same_path_gives_another_key(tmp_path: Path, change: dict[str, Any]) -> None:
    lora = sql(adapter(tmp_path / "sql"))
    before = keys_of(BlockKeys(BLOCK_TOKENS), lora)
    adapter(tmp_path / "sql", **change)
    assert set(before).isdisjoint(keys_of(BlockKeys(BLOCK_TOKENS), lora))


def test_an_adapter_reloaded_in_place_is_keyed_by_its_new_content(tmp_path: Path) -> None:
    keys, lora = BlockKeys(BLOCK_TOKENS), sql(adapter(tmp_path / "sql"), load_inplace=True)
    before = keys_of(keys, lora)
    adapter(tmp_path / "sql", weights=b"new weights")
    after = keys_of(keys, lora)
    assert set(before).isdisjoint(after)
    assert after == keys_of(BlockKeys(BLOCK_TOKENS), lora)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Collects the messages of our logger, which vLLM separates from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def test_files_changed_behind_the_engine_are_shared_with_no_other(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    keys, lora = BlockKeys(BLOCK_TOKENS), sql(adapter(tmp_path / "sql"))
    before = keys_of(keys, lora)
    adapter(tmp_path / "sql", weights=b"new weights")
    after = keys_of(keys, lora)
    assert set(after).isdisjoint(before) and set(after).isdisjoint(keys_of(BlockKeys(BLOCK_TOKENS), lora))
    assert after == keys_of(keys, lora), "within the engine blocks are still found"
    assert len(said.messages) == 1 and "changed after it was loaded" in said.messages[0]


def test_an_adapter_without_readable_files_is_not_shared(tmp_path: Path) -> None:
    """The adapter's path is a name on a hub, an empty folder, or a missing folder."""
    (tmp_path / "empty").mkdir()
    for path in ("org/sql-adapter", str(tmp_path / "empty"), str(tmp_path / "gone")):
        lora = sql(tmp_path, path=path)
        keys = BlockKeys(BLOCK_TOKENS)
        assert keys_of(keys, lora) == keys_of(keys, lora)
        assert set(keys_of(keys, lora)).isdisjoint(keys_of(BlockKeys(BLOCK_TOKENS), lora))


def test_equal_adapters_share_under_any_name_and_at_any_path(tmp_path: Path) -> None:
    """vLLM's hashes cover the name and the path, which each engine chooses itself."""
    first = adapter(tmp_path / "sql")
    second = Path(shutil.copytree(first, tmp_path / "copy"))
    other = adapter(tmp_path / "other", b"v")
    one, same, different = sql(first), LoRARequest("copy", 2, str(second)), LoRARequest("sql", 1, str(other))
    hashes = [request(lora).block_hashes for lora in (one, same)]
    assert {*hashes[0]}.isdisjoint(hashes[1])
    keys = [keys_of(BlockKeys(BLOCK_TOKENS), lora) for lora in (one, same, different)]
    assert keys[0] == keys[1] and len({*keys[0]}) == 6
    assert {*keys[0]}.isdisjoint(keys[2])
    engine = BlockKeys(BLOCK_TOKENS)
    assert [keys_of(engine, lora) for lora in (one, same)] == keys[:2], "in one engine, too"
    salted = [list(BlockKeys(BLOCK_TOKENS).of(request(lora, cache_salt="a"))) for lora in (one, same)]
    assert salted[0] == salted[1] and {*salted[0]}.isdisjoint(keys[0])


@pytest.mark.parametrize("with_adapter", [False, True])
def test_keys_grow_with_the_request_and_shrink_with_it(tmp_path: Path, with_adapter: bool) -> None:
    keys = BlockKeys(BLOCK_TOKENS)
    grown = request(sql(adapter(tmp_path / "sql")) if with_adapter else None, tokens=60)
    first = list(keys.of(grown))
    assert len(first) == 3
    grown.append_output_token_ids(list(range(60, 100)))
    second = list(keys.of(grown))
    assert second[:3] == first and len(second) == 6
    del grown.block_hashes[2:]
    assert list(keys.of(grown)) == first[:2]
    del grown._all_token_ids[2 * BLOCK_TOKENS :]  # as the next input of a session does
    grown.append_output_token_ids(list(range(200, 220)))
    assert list(keys.of(grown))[:2] == first[:2] and keys.of(grown)[2] != first[2]
    assert list(keys.of(grown)) == list(BlockKeys(BLOCK_TOKENS).of(grown))


# ---- pictures and other media ----------------------------------------------------------------------------------------


def seen(*features: MultiModalFeatureSpec, tokens: int = 100, **more: Any) -> Request:
    return request(tokens=tokens, mm_features=list(features), **more)


def all_keys(keys: BlockKeys, of: Request) -> list[bytes]:
    tail = keys.tail(of)
    return [*keys.of(of), *([tail] if tail is not None else [])]


def test_another_picture_with_the_same_id_has_other_keys() -> None:
    one, other = seen(picture(1)), seen(picture(2))
    assert one.block_hashes == other.block_hashes, "vLLM trusts ids"
    here, elsewhere = all_keys(BlockKeys(BLOCK_TOKENS), one), all_keys(BlockKeys(BLOCK_TOKENS), other)
    assert len(here) == len(elsewhere) == 7
    assert here[:1] == elsewhere[:1] == [one.block_hashes[0]], "the picture begins in the second block"
    assert set(here[1:]).isdisjoint(elsewhere[1:])
    assert here == all_keys(BlockKeys(BLOCK_TOKENS), seen(picture(1)))


def test_trusted_ids_stand_for_contents() -> None:
    one, other = (all_keys(BlockKeys(BLOCK_TOKENS, trust_media_ids=True), seen(picture(seed))) for seed in (1, 2))
    assert one == other and len(one) == 7
    named = all_keys(BlockKeys(BLOCK_TOKENS, trust_media_ids=True), seen(picture(1, "img-2")))
    assert set(one[1:]).isdisjoint(named[1:])
    assert set(one[1:]).isdisjoint(all_keys(BlockKeys(BLOCK_TOKENS), seen(picture(1)))[1:])


def test_an_id_used_for_two_pictures_is_no_longer_shared(said: pytest.LogCaptureFixture) -> None:
    """vLLM's caches find results by id, so they may return results of the other picture."""
    keys, one, other = BlockKeys(BLOCK_TOKENS), seen(picture(1)), seen(picture(2))
    assert len(all_keys(keys, one)) == 7
    assert all_keys(keys, other) == [other.block_hashes[0]]
    assert all_keys(keys, one) == [one.block_hashes[0]], "also what is computed of the first from now on"
    assert all_keys(keys, seen(picture(1))) == [one.block_hashes[0]]
    assert len(all_keys(keys, seen(picture(1, "img-2")))) == 7, "other ids are shared"
    assert [message for message in said.messages if "img-1" in message] == said.messages and len(said.messages) == 1


def test_two_pictures_with_one_id_in_one_request_are_not_shared() -> None:
    twice = seen(picture(1), picture(2, offset=60))
    assert all_keys(BlockKeys(BLOCK_TOKENS), twice) == [twice.block_hashes[0]]
    same = seen(picture(1), picture(1, offset=60))
    assert len(all_keys(BlockKeys(BLOCK_TOKENS), same)) == 7


def test_pictures_seen_before_the_connector_was_ready_count() -> None:
    keys = BlockKeys(BLOCK_TOKENS)
    keys.note(seen(picture(1)))
    assert len(all_keys(keys, seen(picture(2)))) == 1


@pytest.mark.parametrize(
    "hidden",
    [
        None,  # the content is in the sender's cache
        MultiModalKwargsItem(
            {
                name: MultiModalFieldElem(7, MultiModalBatchedField())
                for name in ("address", "monotonic_id", "signature")
            }
        ),  # the content is in shared memory
        MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(object(), MultiModalBatchedField())}),
        MultiModalKwargsItem({}),
    ],
    ids=["none", "shared memory", "unreadable", "empty"],
)
def test_unreadable_content_is_not_shared_nor_is_its_id_later(hidden: Any) -> None:
    keys, blind = BlockKeys(BLOCK_TOKENS), seen(picture(1, data=hidden))
    assert all_keys(keys, blind) == [blind.block_hashes[0]]
    assert len(all_keys(keys, seen(picture(1)))) == 1, "the engine may compute with what it had before"
    assert len(all_keys(BlockKeys(BLOCK_TOKENS, trust_media_ids=True), blind)) == 7


def test_overlapping_media_are_all_covered() -> None:
    """A film and its sound have the same positions. For a block inside both media, vLLM's hash covers only the
    first."""
    film = picture(1, "film", modality="video")
    quiet, loud = (seen(film, picture(seed, f"sound-{seed}", modality="audio")) for seed in (3, 4))
    assert quiet.block_hashes[1] == loud.block_hashes[1]
    one, other = all_keys(BlockKeys(BLOCK_TOKENS), quiet), all_keys(BlockKeys(BLOCK_TOKENS), loud)
    assert one[:1] == other[:1] and set(one[1:]).isdisjoint(other[1:])


def test_a_pictures_positions_are_covered() -> None:
    def masked(place: int) -> Request:
        mask = torch.ones(30, dtype=torch.bool)
        mask[place] = False
        return seen(picture(1, mm_position=PlaceholderRange(20, 30, mask)))

    one, other = (all_keys(BlockKeys(BLOCK_TOKENS), masked(place)) for place in (3, 4))
    assert set(one[1:]).isdisjoint(other[1:])


def test_a_picture_at_a_prompts_end_affects_only_the_tail() -> None:
    one, other = (seen(picture(seed, offset=97, length=2)) for seed in (1, 2))
    here, there = all_keys(BlockKeys(BLOCK_TOKENS), one), all_keys(BlockKeys(BLOCK_TOKENS), other)
    assert here[:6] == there[:6] == one.block_hashes and here[6] != there[6]
    keys = BlockKeys(BLOCK_TOKENS)
    assert keys.tail(one) is not None and keys.tail(other) is None and keys.tail(one) is None
    assert list(keys.of(other)) == other.block_hashes


def test_a_session_that_adds_pictures_is_covered_from_that_step_on() -> None:
    keys, session = BlockKeys(BLOCK_TOKENS), seen(tokens=60, resumable=True)
    keys.note(session)
    other = seen(picture(2))
    assert len(all_keys(keys, other)) == 7
    session.mm_features.append(picture(1, offset=50))
    session.append_output_token_ids(list(range(60, 100)))
    keys.note_sessions()
    assert len(all_keys(keys, other)) == 1 and list(keys.of(session)) == session.block_hashes[:3]


def test_the_ids_of_many_pictures_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_contents, "MOST_IDS", 100)
    keys = BlockKeys(BLOCK_TOKENS)
    for number in range(1000):
        keys.note(seen(picture(1, f"img-{number}")))
    assert len(keys._media._of_id) == 100
    assert len(all_keys(keys, seen(picture(2, "img-999")))) == 1
    assert not keys._media._of_item or len(keys._media._of_item) < 100, "what vLLM has forgotten is forgotten"


# ---- prompt embeddings -----------------------------------------------------------------------------------------------


def embedded(seed: int = 0, mask: list[bool] | None = None, ids: bool = True, **more: Any) -> Request:
    """Return a prompt of 100 positions with an embedding each. mask: which positions are tokens instead."""
    rows = torch.arange(100 * 4, dtype=torch.float32).reshape(100, 4) + seed
    return request(prompt_embeds=rows, prompt_is_token_ids=mask, ids=ids, **more)


MIXED = [*[True] * 50, *[False] * 50]


def test_other_embeddings_with_equal_tokens_give_another_tail() -> None:
    one, other = embedded(0, MIXED), embedded(0, MIXED)
    other.prompt_embeds[98] += 1.0
    keys = BlockKeys(BLOCK_TOKENS)
    assert list(keys.of(one)) == list(keys.of(other)) and len(keys.of(one)) == 6
    assert None is not keys.tail(one) != keys.tail(other) is not None
    assert keys.tail(one) == BlockKeys(BLOCK_TOKENS).tail(embedded(0, MIXED))


@pytest.mark.parametrize("mask", [None, MIXED], ids=["all", "mixed"])
def test_other_embeddings_give_other_blocks(mask: list[bool] | None) -> None:
    ids = mask is not None
    one, other = (all_keys(BlockKeys(BLOCK_TOKENS), embedded(seed, mask, ids)) for seed in (0, 1))
    assert len(one) == 7 and set(one).isdisjoint(other)
    tokens = all_keys(BlockKeys(BLOCK_TOKENS), request())
    assert set(one).isdisjoint(tokens)


def test_the_positions_of_embeddings_are_covered() -> None:
    """At position 70, one prompt has token 0 and the other one has an embedding. vLLM hashes token 0 and the embedding
    for both."""
    tokens = [*range(70), 0, *range(71, 100)]
    mixed = [embedded(0, [*MIXED[:70], here, *MIXED[71:]], tokens=tokens) for here in (True, False)]
    assert mixed[0].block_hashes == mixed[1].block_hashes
    one, other = (all_keys(BlockKeys(BLOCK_TOKENS), each) for each in mixed)
    assert len(one) == 7 and one[:4] == other[:4] and set(one[4:]).isdisjoint(other[4:])


def test_equal_bytes_of_another_type_are_other_embeddings() -> None:
    floats = embedded(0, MIXED)
    integers = request(prompt_embeds=floats.prompt_embeds.view(torch.int32), prompt_is_token_ids=MIXED)
    assert floats.block_hashes == integers.block_hashes
    assert set(all_keys(BlockKeys(BLOCK_TOKENS), floats)).isdisjoint(all_keys(BlockKeys(BLOCK_TOKENS), integers))


# ---- tails and weights -----------------------------------------------------------------------------------------------


def test_a_tails_key_covers_everything_before_it_and_in_it(tmp_path: Path) -> None:
    lora = sql(adapter(tmp_path / "sql"))
    prompts = [request(), request(cache_salt="a"), request(lora), request(tokens=101), seen(picture(1)), embedded(0)]
    tails = [BlockKeys(BLOCK_TOKENS).tail(each) for each in prompts]
    assert None not in tails and len({*tails}) == len(prompts)
    assert [BlockKeys(BLOCK_TOKENS).tail(request(tokens=count)) for count in (15, 16, 96)] == [None] * 3


def test_named_weights_are_part_of_every_key() -> None:
    keys, plain = BlockKeys(BLOCK_TOKENS), request()
    keys.name_weights("step-1")
    first = all_keys(keys, plain)
    assert set(first).isdisjoint(all_keys(BlockKeys(BLOCK_TOKENS), plain)) and len(first) == 7
    other = BlockKeys(BLOCK_TOKENS)
    other.name_weights("step-1")
    assert all_keys(other, request()) == first
    keys.name_weights("step-2")
    assert set(all_keys(keys, plain)).isdisjoint(first)
    keys.name_weights("")
    assert all_keys(keys, plain) == all_keys(BlockKeys(BLOCK_TOKENS), plain)


def test_the_layout_of_an_adapters_weights_is_covered(tmp_path: Path) -> None:
    flat, fused = (sql(adapter(tmp_path / "sql"), is_3d_lora_weight=fused) for fused in (False, True))
    assert set(keys_of(BlockKeys(BLOCK_TOKENS), flat)).isdisjoint(keys_of(BlockKeys(BLOCK_TOKENS), fused))


@pytest.mark.parametrize(
    "change",
    [{"target_modules": ["o_proj"]}, {"lora_dtype": torch.float16}, {"enable_tower_connector_lora": True}],
    ids=lambda change: next(iter(change)),
)
def test_engine_options_for_all_adapters_are_covered(tmp_path: Path, change: Any, config: VllmConfig) -> None:
    lora, found = sql(adapter(tmp_path / "sql")), []
    config.lora_config = LoRAConfig(lora_dtype=torch.bfloat16)
    for changes in ({}, {}, change):
        for name, value in changes.items():
            setattr(config.lora_config, name, value)
        keys = BlockKeys(BLOCK_TOKENS, adapter_settings=adapter_settings(config))
        assert list(keys.of(request())) == request().block_hashes, "requests without an adapter share with all"
        found.append(keys_of(keys, lora))
    assert found[0] == found[1] and set(found[0]).isdisjoint(found[2])


def test_another_adapter_under_a_loaded_id_is_distinguished(tmp_path: Path) -> None:
    """The files of both adapters have equal names, sizes and times. Files in container images often have equal
    times."""
    one, other = adapter(tmp_path / "one", b"1"), adapter(tmp_path / "other", b"2")
    for file in (*one.iterdir(), *other.iterdir()):
        os.utime(file, ns=(0, 0))
    keys = BlockKeys(BLOCK_TOKENS)
    keys_of(keys, sql(one))
    assert set(keys_of(keys, sql(other))).isdisjoint(keys_of(BlockKeys(BLOCK_TOKENS), sql(one, path=str(other))))


def test_a_pooling_requests_model_arguments_are_covered() -> None:
    def scored(**arguments: Any) -> Request:
        return request(pooling=PoolingParams(task="classify", extra_kwargs=arguments))

    one, other = (all_keys(BlockKeys(BLOCK_TOKENS), scored(compressed_token_type_ids=start)) for start in (40, 60))
    assert len(one) == len(other) == 7 and set(one).isdisjoint(other)
    assert all_keys(BlockKeys(BLOCK_TOKENS), scored()) == all_keys(BlockKeys(BLOCK_TOKENS), request())
    assert all_keys(BlockKeys(BLOCK_TOKENS), scored(own=object())) == [], "nobody knows what that means"
