"""What blocks are called when the engine's hash does not say all that decides their bytes."""

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
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvstore_client.vllm.connector.block_keys import BlockKeys

BLOCK_TOKENS = 16


@pytest.fixture(autouse=True)
def root_hash() -> None:
    init_none_hash(sha256)


def request(lora: LoRARequest | None = None, tokens: int = 100) -> Request:
    """vLLM's own request, hashed by its own hasher."""
    return Request(
        "request",
        list(range(tokens)),
        SamplingParams(),
        None,
        lora_request=lora,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
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
    assert BlockKeys().of(plain) is plain.block_hashes
    assert len(plain.block_hashes) == 6


def test_an_adapters_content_is_part_of_the_name_in_every_engine(tmp_path: Path) -> None:
    lora = sql(adapter(tmp_path / "sql"))
    here, elsewhere = keys_of(BlockKeys(), lora), keys_of(BlockKeys(), lora)
    assert here == elsewhere
    assert set(here).isdisjoint(request(lora).block_hashes)
    assert {len(key) for key in here} == {len(request(lora).block_hashes[0])} == {32}


@pytest.mark.parametrize("change", [{"weights": b"v"}, {"config": '{"r": 8}'}])
def test_other_content_at_the_same_path_is_another_name(tmp_path: Path, change: dict[str, Any]) -> None:
    lora = sql(adapter(tmp_path / "sql"))
    before = keys_of(BlockKeys(), lora)
    adapter(tmp_path / "sql", **change)
    assert set(before).isdisjoint(keys_of(BlockKeys(), lora))


def test_an_adapter_reloaded_in_place_is_called_by_its_new_content(tmp_path: Path) -> None:
    keys, lora = BlockKeys(), sql(adapter(tmp_path / "sql"), load_inplace=True)
    before = keys_of(keys, lora)
    adapter(tmp_path / "sql", weights=b"new weights")
    after = keys_of(keys, lora)
    assert set(before).isdisjoint(after)
    assert after == keys_of(BlockKeys(), lora)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What our logger says, which vLLM keeps from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def test_files_that_changed_behind_the_engine_are_nobody_elses(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    keys, lora = BlockKeys(), sql(adapter(tmp_path / "sql"))
    before = keys_of(keys, lora)
    adapter(tmp_path / "sql", weights=b"new weights")
    after = keys_of(keys, lora)
    assert set(after).isdisjoint(before) and set(after).isdisjoint(keys_of(BlockKeys(), lora))
    assert after == keys_of(keys, lora), "within the engine blocks are still found"
    assert len(said.messages) == 1 and "changed after it was loaded" in said.messages[0]


def test_an_adapter_without_readable_files_is_this_engines_alone(tmp_path: Path) -> None:
    """A hub's name, an empty folder, a folder that is gone."""
    (tmp_path / "empty").mkdir()
    for path in ("org/sql-adapter", str(tmp_path / "empty"), str(tmp_path / "gone")):
        lora = sql(tmp_path, path=path)
        keys = BlockKeys()
        assert keys_of(keys, lora) == keys_of(keys, lora)
        assert set(keys_of(keys, lora)).isdisjoint(keys_of(BlockKeys(), lora))


def test_adapters_with_equal_content_share_nothing_under_different_names(tmp_path: Path) -> None:
    """Their hashes differ, which costs hits only."""
    first = adapter(tmp_path / "sql")
    second = Path(shutil.copytree(first, tmp_path / "copy"))
    assert set(keys_of(BlockKeys(), sql(first))).isdisjoint(keys_of(BlockKeys(), sql(second)))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_keys_grow_with_the_request_and_go_back_with_it(tmp_path: Path, with_adapter: bool) -> None:
    keys = BlockKeys()
    grown = request(sql(adapter(tmp_path / "sql")) if with_adapter else None, tokens=60)
    first = list(keys.of(grown))
    assert len(first) == 3
    grown.append_output_token_ids(list(range(60, 100)))
    second = list(keys.of(grown))
    assert second[:3] == first and len(second) == 6
    del grown.block_hashes[2:]
    assert list(keys.of(grown)) == first[:2]
    grown.block_hashes += [os.urandom(32)]
    assert list(keys.of(grown))[:2] == first[:2] and keys.of(grown)[2] != first[2]


def test_after_forgetting_nothing_older_is_found_by_anybody(tmp_path: Path) -> None:
    keys, running = BlockKeys(), request()
    lora = sql(adapter(tmp_path / "sql"))
    before = {*keys.of(running), *keys_of(keys, lora)}
    keys.forget()
    after = {*keys.of(running), *keys_of(keys, lora)}
    assert len(after) == 12 and after.isdisjoint(before)
    assert set(keys.of(running)) <= after, "within the engine blocks are still found"
    other = BlockKeys()
    other.forget()
    assert after.isdisjoint({*other.of(running), *keys_of(other, lora)})
