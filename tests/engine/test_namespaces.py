"""What two engines must have in common before they share blocks, and which ranks store the same part of a block."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from kvstore_client import Namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    import vllm
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    from kvstore_client.vllm.connector import page_probe as page_probe_module
    from kvstore_client.vllm.connector.page_probe import page_fingerprint
    from kvstore_client.vllm.connector.rank_namespace import replica
    from kvstore_client.vllm.shared.model_identity import (
        config_digest,
        draft_identity,
        has_draft_layers,
        model_identity,
    )
    from tests.engine.engine_config import PLAIN, SLICE_BYTES, Layer, Rank, heads, layers_of

# ---- ranks ---------------------------------------------------------------------------------------------------------


def test_heads_are_divided_over_the_ranks_that_have_any(rank: Rank) -> None:
    assert rank.places(1, heads(4)) == [(0, 1, 0, 1)]
    assert rank.places(2, heads(2)) == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert rank.places(4, heads(1)) == [(part, 4, 0, 1) for part in range(4)]


def test_further_ranks_share_a_head_with_their_neighbour(rank: Rank) -> None:
    """Rank r has head r // replicas, as QKVParallelLinear loads heads."""
    assert rank.places(8, heads(1)) == [(place // 2, 4, place % 2, 2) for place in range(8)]


def test_mla_is_stored_once(rank: Rank) -> None:
    latent = layers_of(MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, max_tp_shards=1))
    assert rank.places(4, latent) == [(0, 1, place, 4) for place in range(4)]


def test_engines_of_any_size_share_what_every_rank_has_fully(rank: Rank) -> None:
    latent = layers_of(MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, max_tp_shards=1))

    def ids(layers: dict[str, Layer]) -> set[str]:
        found = set()
        for tp in (1, 2, 4):
            rank.be(tp - 1, tp)
            found.add(rank.namespace(layers).id)
        return found

    assert len(ids(latent)) == 1
    assert len(ids(heads(1))) == 3, "with heads, the ranks of each size have other ones"
    rank.config.model_config.quantization = "fp8"
    assert len(ids(latent)) == 3, "scales are of a rank's shard"
    rank.config.model_config.hf_config.quantization_config = {"quant_method": "fp8"}
    assert len(ids(latent)) == 1, "scales are the checkpoint's"


class StateLayer(Layer):
    """A layer that has a state."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(None)
        self._shape, self._dtype = shape, dtype

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((3, 8), self._shape)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, self._dtype)


def test_state_shapes_and_dtypes_are_in_the_namespace(rank: Rank) -> None:
    kinds = (StateLayer(2, 4), StateLayer(4, 2), StateLayer(2, 4, dtype=torch.bfloat16))
    assert len({rank.namespace({"0": kind}).id for kind in (*kinds, StateLayer(2, 4))}) == 3


def test_state_pages_are_identified_by_the_engines_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> str:
        caches = {"0": torch.zeros(10, 1, 1, 16, dtype=torch.int8), "1": torch.zeros(10, 4, 32, 16)}
        layer = SimpleNamespace(num_kv_heads=4, head_size=8, head_size_v=8, impl=Kernel())
        return page_fingerprint({"0": StateLayer(2, 4), "1": layer}, caches, 10, 32, torch.float32)

    before = known()
    assert before.startswith("page-") and before != fingerprint(Kernel())
    monkeypatch.setattr(page_probe_module.vllm, "__version__", "0.99.0")
    assert known() != before


def drafting(method: str, config: VllmConfig) -> SimpleNamespace:
    """Return the configuration of a drafting method. vLLM gives the target's configuration to methods without a model
    of their own."""
    return SimpleNamespace(method=method, model=method, draft_model_config=copy.deepcopy(config.model_config))


def alone(tp: int) -> list[tuple[int, int, int, int]]:
    return [(place, tp, 0, 1) for place in range(tp)]


def test_a_rank_whose_part_is_uncertain_shares_it_with_none(rank: Rank) -> None:
    model = rank.config.model_config
    mixed = heads(1) | {"draft": Layer(MLAAttentionSpec(**PLAIN, max_tp_shards=1))}
    assert rank.places(8, mixed) == [(place // 2, 4, place % 2, 2) for place in range(8)]
    assert rank.places(8, heads(4)) == alone(8), "every rank has all heads: not split as the model's number says"
    model.hf_text_config.swa_num_key_value_heads = 8
    assert rank.places(8, heads(1)) == alone(8), "some layers have another number of heads"
    del model.hf_text_config.swa_num_key_value_heads
    rank.config.speculative_config = drafting("eagle", rank.config)  # type: ignore[assignment]
    assert rank.places(8, heads(1)) == alone(8), "a drafting model has heads of its own"


def test_pipeline_stages_store_different_parts(rank: Rank) -> None:
    seen = []
    for pp_rank in range(2):
        for tp_rank in range(2):
            rank.be(tp_rank, 2, pp_rank, 2)
            namespace = rank.namespace(heads(2))
            seen.append((namespace.rank, namespace.world))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_stages_with_other_layers_do_not_share(rank: Rank) -> None:
    rank.be(pp_rank=1, pp=3)
    spec = FullAttentionSpec(**PLAIN)
    cuts = [{f"model.layers.{index}.attn": Layer(spec) for index in span} for span in (range(2, 4), range(3, 5))]
    assert rank.namespace(cuts[0]) != rank.namespace(cuts[1])


def parts_of(rank: Rank, tp: int, layers: dict[str, Layer], head_shards: int) -> tuple[list[list[int]], Namespace]:
    """Return the parts of the heads that each rank stores, and the namespace, which is the same for all ranks."""
    found, namespaces = [], []
    for tp_rank in range(tp):
        rank.be(tp_rank, tp)
        namespaces.append(rank.namespace(layers, head_shards=head_shards))
        assert rank.slices is not None
        found.append([*rank.slices.mine, -rank.slices.of])
    assert len({each.id for each in namespaces}) == 1
    return found, namespaces[0]


def test_engines_of_any_size_share_ranges_of_heads(rank: Rank) -> None:
    """Engines of one, two and four ranks store the four KV heads of the model in one namespace."""
    one, namespace = parts_of(rank, 1, heads(4), 4)
    assert one == [[0, 1, 2, 3, -4]]
    assert (namespace.rank, namespace.world, namespace.block_bytes) == (0, 1, SLICE_BYTES)
    assert parts_of(rank, 2, heads(2), 4) == ([[0, 1, -4], [2, 3, -4]], namespace)
    assert parts_of(rank, 4, heads(1), 4) == ([[0, -4], [1, -4], [2, -4], [3, -4]], namespace)
    fewer, other = parts_of(rank, 1, heads(4), 2)
    assert fewer == [[0, 1, -2]] and other != namespace


def test_ranks_that_share_a_head_have_the_same_range(rank: Rank) -> None:
    eight, namespace = parts_of(rank, 8, heads(1), 8)
    assert eight == [[part, -4] for part in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert replica(rank.config) == (1, 2)
    assert parts_of(rank, 2, heads(2), 8) == ([[0, 1, -4], [2, 3, -4]], namespace)
    assert replica(rank.config) == (0, 1)


def test_mla_is_one_range_for_engines_of_any_size(rank: Rank) -> None:
    latent = layers_of(MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, max_tp_shards=1))
    alone, namespace = parts_of(rank, 1, latent, 8)
    assert alone == [[0, -1]]
    assert parts_of(rank, 4, latent, 8) == ([[0, -1]] * 4, namespace)


def test_ranges_that_do_not_fit_model_or_engine_are_refused(rank: Rank) -> None:
    rank.be(0, 4)
    with pytest.raises(ValueError, match=r"head_shards is 2 and --tensor-parallel-size is 4; expected a multiple"):
        rank.namespace(heads(1), head_shards=2)
    rank.be(0, 1)
    with pytest.raises(ValueError, match=r"head_shards is 6, but this model has 4 KV heads"):
        rank.namespace(heads(4), head_shards=6)
    with pytest.raises(ValueError, match=r"its layers.*may differ in their number of KV heads"):
        rank.namespace(heads(2), head_shards=4)
    rank.config.speculative_config = drafting("eagle", rank.config)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"those of a draft model, may differ"):
        rank.namespace(heads(4), head_shards=4)


# ---- namespaces ----------------------------------------------------------------------------------------------------


def change_hf_config(config: VllmConfig) -> None:
    config.model_config.hf_config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


def change_dtype(config: VllmConfig) -> None:
    config.model_config.dtype = torch.float16


def change_kv_dtype(config: VllmConfig) -> None:
    config.cache_config.cache_dtype = "fp8_e5m2"


def change_quantization(config: VllmConfig) -> None:
    config.model_config.quantization = "fp8"


def change_window(config: VllmConfig) -> None:
    config.model_config.disable_sliding_window = True


def change_load_format(config: VllmConfig) -> None:
    config.load_config.load_format = "dummy"


def change_load_options(config: VllmConfig) -> None:
    config.load_config.model_loader_extra_config = {"tensorizer_uri": "s3://elsewhere"}


def change_block_size(config: VllmConfig) -> None:
    config.cache_config.block_size = 64


def change_hash(config: VllmConfig) -> None:
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"


def change_draft(config: VllmConfig) -> None:
    config.speculative_config = drafting("eagle", config)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change",
    [
        change_hf_config,
        change_dtype,
        change_kv_dtype,
        change_quantization,
        change_window,
        change_load_format,
        change_load_options,
        change_block_size,
        change_hash,
        change_draft,
    ],
)
def test_whatever_changes_bytes_changes_the_namespace(rank: Rank, change: Callable[[VllmConfig], None]) -> None:
    layers = heads(4)
    before = rank.namespace(layers)
    assert rank.namespace(layers) == before
    change(rank.config)
    assert rank.namespace(layers) != before


def test_a_draft_configuration_alone_does_not_mean_draft_layers(config: VllmConfig) -> None:
    """If drafts are looked up in the prompt, vLLM uses the target's configuration as the draft's."""
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    assert config.speculative_config.draft_model_config is config.model_config
    assert not has_draft_layers(config) and draft_identity(config) == ""


def keeps_caches(method: str) -> bool:
    """Return whether a drafting method keeps caches, as vLLM says. vLLM knows nothing of an operator's own class, which
    may keep caches."""
    speculative = object.__new__(SpeculativeConfig)
    speculative.method = "mtp" if method in get_args(MTPModelTypes) else method  # vLLM's name for all of these
    return bool(speculative.uses_draft_kv_cache()) or method == "custom_class"


@pytest.mark.parametrize("method", get_args(SpeculativeMethod))
def test_a_way_to_draft_counts_exactly_if_it_keeps_caches(method: str, rank: Rank) -> None:
    before = rank.namespace(heads(4))
    rank.config.speculative_config = drafting(method, rank.config)  # type: ignore[assignment]
    assert (rank.namespace(heads(4)) != before) == keeps_caches(method)
    if keeps_caches(method):
        with pytest.raises(ValueError, match="those of a draft model, may differ"):
            rank.namespace(heads(4), head_shards=4)
    else:
        assert rank.namespace(heads(4), head_shards=4).extra["parallel"].startswith("heads")
    assert (rank.places(8, heads(1)) == alone(8)) == keeps_caches(method)


def test_tenant_and_layer_dtypes_are_in_the_namespace(rank: Rank) -> None:
    spec = FullAttentionSpec(**PLAIN)
    e4m3, e5m2 = ({"model.layers.0": Layer(spec, dtype)} for dtype in ("fp8_e4m3", "fp8_e5m2"))
    assert len({rank.namespace(e4m3).id, rank.namespace(e5m2).id, rank.namespace(e4m3, tenant="a").id}) == 3


def test_the_operators_weights_name_is_in_the_namespace(rank: Rank) -> None:
    assert len({rank.namespace(heads(4), weights=name).id for name in ("", "2026-11", "2026-12")}) == 3


def test_layers_that_share_a_block_are_in_the_namespace(rank: Rank) -> None:
    assert len({rank.namespace(heads(4), groups=groups).id for groups in ("", "2-a", "2-b")}) == 3


def test_a_vllm_upgrade_keeps_the_namespace_unless_pages_change(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank.namespace(heads(4))
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert rank.namespace(heads(4)) == before
    assert rank.namespace(heads(4), pages="page-1") != before


class Kernel:
    """Writes the data of a page in an order of its own."""

    def __init__(self, order: tuple[int, ...] = (1, 0, 2), scale: float = 1.0) -> None:
        self.order, self.scale = order, scale

    def do_kv_cache_update(
        self, layer: object, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        both = torch.cat([key, value], dim=-1)[slots] * self.scale
        cache.view(-1)[:] = both.permute(self.order).reshape(-1)


def test_a_head_range_is_identified_by_a_smaller_engines_writes(caplog: pytest.LogCaptureFixture) -> None:
    assert len({fingerprint(Kernel(), 4, 4), fingerprint(Kernel(), 2, 2), fingerprint(Kernel(), 1)}) == 1
    assert len({fingerprint(Kernel(), 4, 2), fingerprint(Kernel(), 2)}) == 1
    assert fingerprint(Kernel(), 4, 2) != fingerprint(Kernel(), 4, 4)
    assert fingerprint(Kernel((0, 1, 2)), 4, 2).startswith("vllm-"), "its heads cannot be told apart"


class ValuesOfTheNextHead:
    """Writes the value of each head next to the key of another head."""

    def do_kv_cache_update(
        self, layer: object, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        cache[0] = torch.cat([key, value.roll(1, dims=1)], dim=-1)[slots].permute(1, 0, 2)


def test_head_ranges_that_contain_other_heads_data_are_not_recognised(caplog: pytest.LogCaptureFixture) -> None:
    assert fingerprint(ValuesOfTheNextHead(), 4, 2).startswith("vllm-")
    assert fingerprint(ValuesOfTheNextHead(), 4).startswith("page-")


class NoKernel:
    def do_kv_cache_update(self, *arguments: object) -> None:
        """Writes nothing."""


def fingerprint(kernel: object, heads: int = 4, ranges: int = 1) -> str:
    layer = SimpleNamespace(num_kv_heads=heads, head_size=8, head_size_v=8, impl=kernel)
    caches = {name: torch.zeros(10, heads, 32, 16) for name in "ab"}
    return page_fingerprint({"a": layer, "b": layer}, caches, 10, 32, torch.float32, ranges)


def test_pages_are_identified_by_what_kernels_write(caplog: pytest.LogCaptureFixture) -> None:
    assert fingerprint(Kernel()) == fingerprint(Kernel())
    assert fingerprint(Kernel()).startswith("page-")
    assert len({fingerprint(Kernel()), fingerprint(Kernel((0, 1, 2))), fingerprint(Kernel(scale=0.5))}) == 3


@pytest.mark.parametrize("kernel", [SimpleNamespace(), NoKernel(), Kernel((0, 1))])
def test_if_pages_cannot_be_written_only_equal_versions_share(
    kernel: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_probe_module.logger, "propagate", True)
    assert fingerprint(kernel) == f"vllm-{vllm.__version__}"
    assert "the same vLLM version only" in caplog.text


def test_a_model_is_identified_by_its_weights_in_any_folder(
    config: VllmConfig, model: Path, other_model: Path, tmp_path: Path
) -> None:
    def identity_at(path: Path) -> str:
        config.model_config.model = str(path)
        return model_identity(config.model_config)

    moved = tmp_path / "elsewhere"
    moved.symlink_to(model)
    assert identity_at(model) == identity_at(moved)
    assert identity_at(model) != identity_at(other_model)


def test_a_hub_model_is_identified_by_its_revision(config: VllmConfig) -> None:
    model = config.model_config
    model.model, model.revision = "org/tiny", "main"
    model.hf_config._commit_hash = "c0ffee"
    assert model_identity(model) == "org/tiny@c0ffee"


def test_a_configurations_digest_is_the_same_in_every_process(config: VllmConfig) -> None:
    class Method:
        """An object whose text contains its address, as is the default."""

    model = config.model_config
    model.quantization_config = {"method": Method(), "ignore": {"b", "a"}}
    first = config_digest(model)
    model.quantization_config = {"ignore": {"a", "b"}, "method": Method()}
    assert config_digest(model) == first
