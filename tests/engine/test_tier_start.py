"""The reasons that stop an engine with a store tier during its start, and the error for each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the engine's parts about each other
    pytest.importorskip("vllm")
    from kvstore_client.vllm.tier.chunk_namespace import engine_configs
    from kvstore_client.vllm.tier.options import TierOptions
    from tests.engine.tier_engine import TieredEngine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"end_point": "tcp://127.0.0.1:1"}, "did you mean 'endpoint'"),
        ({"lookup_timout_s": 1}, f"Valid options: {', '.join(TierOptions.__struct_fields__)}"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"waiting_chunks": -1}, "waiting_chunks is -1"),
        ({"locality": "NEAR"}, "locality"),
    ],
)
def test_a_wrong_option_stops_the_engine_with_the_expected_value(
    model: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="secondary_tiers, KVStoreTier") as error:
        TieredEngine(model, "tcp://127.0.0.1:1", options=options)
    assert said in str(error.value)


def test_hashes_unknown_to_other_processes_stop_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        TieredEngine(model, "tcp://127.0.0.1:1", hash_algorithm="xxhash")


def test_adapters_stop_the_engine(model: Path) -> None:
    with pytest.raises(ValueError, match="use KVStoreConnector"):
        TieredEngine(model, "tcp://127.0.0.1:1", lora=True)


def test_chunks_too_large_for_the_store_stop_the_engine(model: Path) -> None:
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        TieredEngine(model, "tcp://127.0.0.1:1", blocks_per_chunk=1024, chunks=1)


def test_outside_an_engine_there_is_no_identity() -> None:
    with pytest.raises(ValueError, match="OffloadingConnector"):
        engine_configs()
