"""The connector refuses engines whose blocks no other engine could use. The tests use vLLM's real configuration for a
real model."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        MambaSpec,
        MLAAttentionSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
    )

    from kvstore_client.vllm.connector import ending, mismatch
    from kvstore_client.vllm.connector.kv_connector import KVStoreConnector
    from kvstore_client.vllm.connector.options import ConnectorOptions
    from kvstore_client.vllm.shared import block_hashes, engine_checks
    from kvstore_client.vllm.shared.block_hashes import check_same_hash, hash_probe
    from kvstore_client.vllm.shared.engine_checks import check_engine, check_layer_parts, check_single_flight
    from tests.engine.engine_config import PLAIN, Rank, cache, heads

# ---- hashes --------------------------------------------------------------------------------------------------------


def test_the_probe_follows_algorithm_and_seed(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    default = hash_probe(config)
    assert hash_probe(config) == default
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    seeded = hash_probe(config)
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    assert len({default, seeded, hash_probe(config)}) == 3


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", ["0", "1234"])
def test_probes_are_equal_exactly_when_the_engines_hashes_are(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str
) -> None:
    def own_hash() -> bytes:
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        return kv_cache_utils.hash_block_tokens(function, None, [1, 2, 3])

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    config.cache_config.prefix_caching_hash_algo = algorithm  # type: ignore[assignment]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    probe, block = hash_probe(config), own_hash()
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert (hash_probe(config) == probe) == (own_hash() == block) == (seed == "0")


def test_probing_leaves_the_engines_root_hash_unchanged(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"root", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "seed")
    hash_probe(config)
    assert (kv_cache_utils.NONE_HASH, kv_cache_utils._NONE_HASH_SEED) == (b"root", "seed")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_seed_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, algorithm: Any) -> None:
    config.cache_config.prefix_caching_hash_algo = algorithm
    with pytest.raises(ValueError, match="PYTHONHASHSEED to the same value"):
        check_engine(config, cache())
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_engine(config, cache())


def test_a_worker_with_other_hashes_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = rank.namespace(heads(4))
    check_same_hash(rank.config, [namespace])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(ValueError, match=r"rank 0 and the scheduler hash blocks differently.*same PYTHONHASHSEED"):
        check_same_hash(rank.config, [namespace])


# ---- engines that are refused --------------------------------------------------------------------------------------


def test_a_plain_engine_is_accepted(config: VllmConfig) -> None:
    check_engine(config, cache())
    check_engine(config, cache(MLAAttentionSpec(**PLAIN)))
    check_engine(config, cache(SlidingWindowSpec(**PLAIN, sliding_window=64), groups=2))
    check_engine(config, cache(MambaSpec(**STATE, mamba_cache_mode="align"), groups=2))


def with_images(*, prefix_caching: bool, processor_cache_gb: float) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)  # type: ignore
        config.cache_config.enable_prefix_caching = prefix_caching

    return change


def context_parallel(config: VllmConfig) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def diffusion(config: VllmConfig) -> None:
    config.model_config.__dict__.pop("is_diffusion", None)  # its result is cached at the first use
    config.model_config.hf_config.canvas_length = 32


STATE: dict[str, Any] = {"block_size": 32, "shapes": ((1,),), "dtypes": (torch.float32,)}
REFUSED = {
    "decode window": (RSWASpec(**PLAIN, rswa_window=64), {}, None, "RSWASpec"),
    "sink": (SinkFullAttentionSpec(**PLAIN, sink_len=32), {}, None, "SinkFullAttentionSpec"),
    "state": (
        MambaSpec(**STATE),
        {},
        None,
        r"does not keep these states at the ends of blocks.*--enable-prefix-caching",
    ),
    "compressed": (MLAAttentionSpec(**PLAIN, tokens_per_state=4), {}, None, "one state for 4 tokens"),
    "non-causal": (FullAttentionSpec(**PLAIN, non_causal=True), {}, None, "attend to later tokens"),
    "finer hashes": (None, {"hash_block_size": 16}, None, "one hash covers 16"),
    "other block size": (
        FullAttentionSpec(**{**PLAIN, "block_size": 64}),
        {},
        None,
        "the KV cache has 64 tokens",
    ),
    "context parallel": (None, {}, context_parallel, "--decode-context-parallel-size is 2"),
    "diffusion": (None, {}, diffusion, "diffusion model"),
    "nameless images": (None, {}, with_images(prefix_caching=False, processor_cache_gb=0), "names images by a counter"),
}


def test_waiting_for_others_is_refused_with_states_at_some_positions_only() -> None:
    states = cache(MambaSpec(**STATE, mamba_cache_mode="align"))
    check_single_flight(states, 0.0)
    check_single_flight(cache(), 2.0)
    with pytest.raises(ValueError, match=r"single_flight_s is 2\.0; expected 0.*layers with states"):
        check_single_flight(states, 2.0)


def test_layer_slices_with_microbatches_are_refused(config: VllmConfig) -> None:
    check_layer_parts(config, 4)
    config.parallel_config.enable_dbo = True
    check_layer_parts(config, 0)
    check_layer_parts(config, 1)
    with pytest.raises(ValueError, match=r"layer_parts is 4.*--enable-dbo"):
        check_layer_parts(config, 4)


@pytest.mark.parametrize("layer_parts", [0, 1, 4])
def test_whole_step_graphs_are_disabled_where_layers_must_report(layer_parts: int) -> None:
    options = {"endpoint": "tcp://127.0.0.1:7070", "layer_parts": layer_parts}
    assert KVStoreConnector.requires_piecewise_for_cudagraph(options) == (layer_parts > 1)


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_with_unshareable_blocks_is_refused(config: VllmConfig, case: str) -> None:
    spec, options, change, said = REFUSED[case]
    if change is not None:
        change(config)
    with pytest.raises(ValueError, match=f"^kvstore: .*{said}"):
        check_engine(config, cache(spec, **options))


def test_page_sizes_may_differ_if_blocks_have_equal_token_counts(config: VllmConfig) -> None:
    """By default, vLLM gives the smaller pages more tokens. Without its hybrid cache manager, it makes one group of all
    layers. In layouts with blocks outermost, it packs pages of both sizes into each block."""

    def of_vllm() -> KVCacheConfig:
        specs = {
            "model.layers.0": FullAttentionSpec(**PLAIN),
            "model.layers.1": SlidingWindowSpec(**{**PLAIN, "num_kv_heads": 2}, sliding_window=64),
        }
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        hashed = kv_cache_utils.resolve_kv_cache_block_sizes(KVCacheConfig(100, [], groups), config)[1]
        return KVCacheConfig(100, [], groups, hash_block_size=hashed)

    config.cache_config.enable_prefix_caching = True
    config.cache_config.kv_cache_layout = "LBHNC"
    two = of_vllm()
    assert sorted(group.kv_cache_spec.block_size for group in two.kv_cache_groups) == [32, 64]
    with pytest.raises(ValueError, match=r"has 64 tokens.*--disable-hybrid-kv-cache-manager"):
        check_engine(config, two)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    one = of_vllm()
    assert len(one.kv_cache_groups) == 1
    check_engine(config, one)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = "BLHNC"
    packed = of_vllm()
    assert [group.kv_cache_spec.block_size for group in packed.kv_cache_groups] == [32, 32]
    check_engine(config, packed)


@pytest.mark.parametrize(("prefix_caching", "processor_cache_gb"), [(True, 0.0), (False, 4.0)])
def test_images_named_by_content_are_accepted(
    config: VllmConfig, prefix_caching: bool, processor_cache_gb: float
) -> None:
    with_images(prefix_caching=prefix_caching, processor_cache_gb=processor_cache_gb)(config)
    check_engine(config, cache())


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_flag_named_in_a_message_exists_in_vllm() -> None:
    sources = [Path(module.__file__).read_text() for module in (block_hashes, engine_checks, mismatch)]
    named = set(re.findall(r"--[a-z][a-z-]+[a-z]", "".join(sources)))
    named |= {"--decode-context-parallel-size", "--prefill-context-parallel-size"}  # made from names of fields
    assert len(named) > 12
    assert named <= flags_of(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_wrong_option_stops_the_engine_with_the_valid_ones(config: VllmConfig, role: KVConnectorRole) -> None:
    """An engine makes these calls during its start, in the scheduler's process and in each worker's process."""
    config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as vLLM does for connectors without SupportsHMA
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore_client.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"endpoint": "tcp://127.0.0.1:7070", "time_out_s": 1},
    )
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        KVConnectorFactory.create_connector(config, role, cache())
    said = str(error.value)
    assert "unknown option 'time_out_s'; did you mean 'timeout_s'?" in said
    assert f"Valid options: {', '.join(ConnectorOptions.__struct_fields__)}" in said
    assert "timeout_s, lookup_timeout_s, tenant, weights_version, replicas, connections, transport, nixl" in said


# ---- time to end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "api_servers", "connector", "is_warned"),
    [
        (0, 1, "KVStoreConnector", False),
        (0, 2, "KVStoreConnector", True),
        (0, 1, "MultiConnector", True),
        (3, 1, "KVStoreConnector", True),
        (5, 2, "MultiConnector", False),
    ],
)
def test_an_engine_warns_if_vllm_would_kill_it_before_all_is_sent(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    given: int,
    api_servers: int,
    connector: str,
    is_warned: bool,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(ending.logger, "warning", lambda text, *values: said.append(text % values))
    config.shutdown_timeout = given
    config.parallel_config._api_process_count = api_servers
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    ending.check_time(config, transfer, config, 5.0)
    assert len(said) == is_warned
    assert all("Start it with --shutdown-timeout 15 or more" in each for each in said)


def test_a_front_end_waits_for_its_engine_unless_given_a_timeout(config: VllmConfig) -> None:
    ending.allow_time(config, 5.0)
    assert config.shutdown_timeout == 15
    config.shutdown_timeout = 3
    ending.allow_time(config, 5.0)
    assert config.shutdown_timeout == 3
