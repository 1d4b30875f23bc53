"""What decides whether two engines share blocks, on vLLM's real configuration of a real model."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore_client import Namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
    )

    from kvstore_client.vllm.shared import identity
    from kvstore_client.vllm.shared.identity import (
        check_engine,
        check_same_hash,
        config_digest,
        explain_strangers,
        hash_probe,
        model_identity,
        rank_namespace,
        replica,
    )

BLOCK_TOKENS = 32
PLAIN = {"block_size": BLOCK_TOKENS, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def real_config(model: Path) -> VllmConfig:
    """The configuration a CPU engine with this model has, as vLLM itself makes it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        arguments = EngineArgs(str(model), skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK_TOKENS)
        return arguments.create_engine_config()


@pytest.fixture
def config(real_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A copy to change, in an environment without a hash seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return copy.deepcopy(real_config)


def cache(spec: Any = None, *, groups: int = 1, hash_block_size: int | None = BLOCK_TOKENS) -> KVCacheConfig:
    spec = FullAttentionSpec(**PLAIN) if spec is None else spec
    members = [KVCacheGroupSpec([f"model.layers.{group}"], spec) for group in range(groups)]
    return KVCacheConfig(100, [], members, hash_block_size=hash_block_size)


class Layer:
    """An attention layer, as far as its identity goes."""

    def __init__(self, spec: Any, kv_cache_dtype: str = "auto") -> None:
        self.spec = spec
        self.kv_cache_dtype = kv_cache_dtype

    def get_kv_cache_spec(self, _config: VllmConfig) -> Any:
        return self.spec

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "FLASH")


LAYOUT: Any = SimpleNamespace(block_bytes=131072, dtype="bfloat16", description="8xbhnc(4x32x64)")


@dataclasses.dataclass
class Rank:
    """A worker's place, which vLLM keeps in its process groups."""

    config: VllmConfig
    patch: pytest.MonkeyPatch

    def be(self, tp_rank: int = 0, tp: int = 1, pp_rank: int = 0, pp: int = 1) -> None:
        for name, rank, size in (("get_tp_group", tp_rank, tp), ("get_pp_group", pp_rank, pp)):
            group = SimpleNamespace(rank_in_group=rank, world_size=size)
            self.patch.setattr(identity, name, lambda group=group: group)

    def namespace(self, layers: dict[str, Any], tenant: str = "") -> Namespace:
        self.config.compilation_config.static_forward_context = layers
        return rank_namespace(self.config, LAYOUT, list(layers.values()), tenant)

    def places(self, tp: int, layers: dict[str, Any]) -> list[tuple[int, int, int, int]]:
        """(rank, world, replica, replicas) of every worker."""
        found = []
        for tp_rank in range(tp):
            self.be(tp_rank, tp)
            namespace = self.namespace(layers)
            found.append((namespace.rank, namespace.world, *replica(self.config)))
        return found


@pytest.fixture
def rank(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank(config, monkeypatch)
    rank.be()
    return rank


def layers_of(spec: Any, count: int = 2) -> dict[str, Any]:
    return {f"model.layers.{index}.self_attn.attn": Layer(spec) for index in range(count)}


def heads(local: int) -> dict[str, Any]:
    return layers_of(FullAttentionSpec(**{**PLAIN, "num_kv_heads": local}))


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
def test_probes_are_equal_exactly_where_the_engines_own_hashes_are(
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


def test_probing_leaves_the_engines_root_hash_alone(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_worker_that_hashes_otherwise_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = rank.namespace(heads(4))
    check_same_hash(rank.config, [namespace])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(ValueError, match=r"worker of rank 0 hashes blocks otherwise.*same PYTHONHASHSEED"):
        check_same_hash(rank.config, [namespace])


# ---- engines that are refused --------------------------------------------------------------------------------------


def test_a_plain_engine_is_accepted(config: VllmConfig) -> None:
    check_engine(config, cache())
    check_engine(config, cache(MLAAttentionSpec(**PLAIN)))


def with_images(*, prefix_caching: bool, processor_cache_gb: float) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)  # type: ignore
        config.cache_config.enable_prefix_caching = prefix_caching

    return change


def context_parallel(config: VllmConfig) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def diffusion(config: VllmConfig) -> None:
    config.model_config.__dict__.pop("is_diffusion", None)  # kept since it was first asked
    config.model_config.hf_config.canvas_length = 32


REFUSED = {
    "window": (SlidingWindowSpec(**PLAIN, sliding_window=64), {}, None, "SlidingWindowSpec"),
    "decode window": (RSWASpec(**PLAIN, rswa_window=64), {}, None, "RSWASpec"),
    "sink": (SinkFullAttentionSpec(**PLAIN, sink_len=32), {}, None, "SinkFullAttentionSpec"),
    "state": (MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,)), {}, None, "MambaSpec"),
    "compressed": (MLAAttentionSpec(**PLAIN, tokens_per_state=4), {}, None, "one state for 4 tokens"),
    "non-causal": (FullAttentionSpec(**PLAIN, non_causal=True), {}, None, "attend to later tokens"),
    "groups": (None, {"groups": 2}, None, "2 KV cache groups"),
    "finer hashes": (None, {"hash_block_size": 16}, None, "hashed every 16"),
    "other block size": (FullAttentionSpec(**{**PLAIN, "block_size": 64}), {}, None, "a block has 64 tokens"),
    "context parallel": (None, {}, context_parallel, "decode_context_parallel_size is 2"),
    "diffusion": (None, {}, diffusion, "diffusion model"),
    "nameless images": (None, {}, with_images(prefix_caching=False, processor_cache_gb=0), "names images by a counter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_whose_blocks_cannot_be_shared_is_refused(config: VllmConfig, case: str) -> None:
    spec, options, change, said = REFUSED[case]
    if change is not None:
        change(config)
    with pytest.raises(ValueError, match=f"^kvstore: .*{said}"):
        check_engine(config, cache(spec, **options))


@pytest.mark.parametrize(("prefix_caching", "processor_cache_gb"), [(True, 0.0), (False, 4.0)])
def test_images_named_by_content_are_accepted(
    config: VllmConfig, prefix_caching: bool, processor_cache_gb: float
) -> None:
    with_images(prefix_caching=prefix_caching, processor_cache_gb=processor_cache_gb)(config)
    check_engine(config, cache())


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_flag_a_message_names_is_one_of_vllm() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+[a-z]", Path(identity.__file__).read_text()))
    named |= {"--decode-context-parallel-size", "--prefill-context-parallel-size"}  # made from the fields' names
    assert len(named) > 12
    assert named <= flags_of(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))


# ---- ranks ---------------------------------------------------------------------------------------------------------


def test_heads_are_split_over_the_ranks_there_are_heads_for(rank: Rank) -> None:
    assert rank.places(1, heads(4)) == [(0, 1, 0, 1)]
    assert rank.places(2, heads(2)) == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert rank.places(4, heads(1)) == [(part, 4, 0, 1) for part in range(4)]


def test_further_ranks_share_a_head_with_their_neighbour(rank: Rank) -> None:
    """As QKVParallelLinear loads them: rank r has head r // replicas."""
    assert rank.places(8, heads(1)) == [(place // 2, 4, place % 2, 2) for place in range(8)]


def test_mla_is_stored_once(rank: Rank) -> None:
    latent = layers_of(MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, max_tp_shards=1))
    assert rank.places(4, latent) == [(0, 1, place, 4) for place in range(4)]


def alone(tp: int) -> list[tuple[int, int, int, int]]:
    return [(place, tp, 0, 1) for place in range(tp)]


def test_a_rank_is_alone_with_its_part_when_in_doubt(rank: Rank) -> None:
    model = rank.config.model_config
    mixed = heads(1) | {"draft": Layer(MLAAttentionSpec(**PLAIN, max_tp_shards=1))}
    assert rank.places(8, mixed) == [(place // 2, 4, place % 2, 2) for place in range(8)]
    assert rank.places(8, heads(4)) == alone(8), "every rank has all heads: not split as the model's number says"
    model.hf_text_config.swa_num_key_value_heads = 8
    assert rank.places(8, heads(1)) == alone(8), "some layers have another number of heads"
    del model.hf_text_config.swa_num_key_value_heads
    rank.config.speculative_config = SimpleNamespace(draft_model_config=None)  # type: ignore[assignment]
    assert rank.places(8, heads(1)) == alone(8), "a drafting model has heads of its own"


def test_stages_of_a_pipeline_store_different_parts(rank: Rank) -> None:
    seen = []
    for pp_rank in range(2):
        for tp_rank in range(2):
            rank.be(tp_rank, 2, pp_rank, 2)
            namespace = rank.namespace(heads(2))
            seen.append((namespace.rank, namespace.world))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_stages_cut_elsewhere_do_not_share(rank: Rank) -> None:
    rank.be(pp_rank=1, pp=3)
    spec = FullAttentionSpec(**PLAIN)
    cuts = [{f"model.layers.{index}.attn": Layer(spec) for index in span} for span in (range(2, 4), range(3, 5))]
    assert rank.namespace(cuts[0]) != rank.namespace(cuts[1])


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
    draft = SimpleNamespace(method="eagle", draft_model_config=copy.deepcopy(config.model_config))
    config.speculative_config = draft  # type: ignore[assignment]


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
def test_what_changes_bytes_changes_the_namespace(rank: Rank, change: Callable[[VllmConfig], None]) -> None:
    layers = heads(4)
    before = rank.namespace(layers)
    assert rank.namespace(layers) == before
    change(rank.config)
    assert rank.namespace(layers) != before


def test_tenant_and_the_dtype_of_layers_are_in_the_namespace(rank: Rank) -> None:
    spec = FullAttentionSpec(**PLAIN)
    e4m3, e5m2 = ({"model.layers.0": Layer(spec, dtype)} for dtype in ("fp8_e4m3", "fp8_e5m2"))
    assert len({rank.namespace(e4m3).id, rank.namespace(e5m2).id, rank.namespace(e4m3, tenant="a").id}) == 3


def test_a_model_is_its_weights_wherever_they_lie(
    config: VllmConfig, model: Path, other_model: Path, tmp_path: Path
) -> None:
    def identity_at(path: Path) -> str:
        config.model_config.model = str(path)
        return model_identity(config.model_config)

    moved = tmp_path / "elsewhere"
    moved.symlink_to(model)
    assert identity_at(model) == identity_at(moved)
    assert identity_at(model) != identity_at(other_model)


def test_a_hub_model_is_its_revision(config: VllmConfig) -> None:
    model = config.model_config
    model.model, model.revision = "org/tiny", "main"
    model.hf_config._commit_hash = "c0ffee"
    assert model_identity(model) == "org/tiny@c0ffee"


def test_the_digest_of_a_configuration_is_the_same_in_every_process(config: VllmConfig) -> None:
    class Method:
        """Printed with its address, as objects are."""

    model = config.model_config
    model.quantization_config = {"method": Method(), "ignore": {"b", "a"}}
    first = config_digest(model)
    model.quantization_config = {"ignore": {"a", "b"}, "method": Method()}
    assert config_digest(model) == first


# ---- strangers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(rank: Rank) -> Namespace:
    return rank.namespace(heads(4))


def other(namespace: Namespace, **changes: Any) -> str:
    """The canonical JSON of a namespace that differs; ``extra_…`` changes what is extra."""
    extra = {name.removeprefix("extra_"): value for name, value in changes.items() if name.startswith("extra_")}
    fields = {name: value for name, value in changes.items() if not name.startswith("extra_")}
    changed = msgspec.structs.replace(namespace, extra={**namespace.extra, **extra}, **fields)
    return changed.canonical().decode()


def test_another_hash_seed_is_explained_even_beside_a_namespace_of_ours(mine: Namespace) -> None:
    text = explain_strangers(mine, [other(mine), other(mine, extra_hash="sha256-00")])
    assert text is not None
    assert "hash=sha256-00, this one uses sha256-" in text
    assert "same PYTHONHASHSEED" in text and "--prefix-caching-hash-algo" in text


def test_another_block_size_is_explained_without_what_follows_from_it(mine: Namespace) -> None:
    theirs = other(mine, block_tokens=16, block_bytes=mine.block_bytes // 2, layout="elsewise")
    text = explain_strangers(mine, [theirs])
    assert text == (
        "another engine stores the same model with block_tokens=16, this one uses 32: they will not share blocks. "
        "If they should, set the same --block-size"
    )


def test_the_nearest_stranger_is_the_one_explained(mine: Namespace) -> None:
    far = other(mine, extra_engine="vllm-0.31.0", dtype="float16", extra_config="0")
    text = explain_strangers(mine, [far, other(mine, layout="elsewise"), far])
    assert text is not None and "layout=elsewise" in text and "dtype" not in text


def test_another_revision_of_a_hub_model_is_explained(mine: Namespace) -> None:
    mine = msgspec.structs.replace(mine, model="org/tiny@new")
    text = explain_strangers(mine, [other(mine, model="org/tiny@old"), other(mine, model="org/other@new")])
    assert text is not None and "model=org/tiny@old, this one uses org/tiny@new" in text and "--revision" in text


def strangers_on_purpose(mine: Namespace) -> Iterator[str]:
    yield other(mine, tenant="another", dtype="float16")
    yield other(mine, model="qwen2@0123", dtype="float16")
    yield other(mine, rank=1, world=2)
    yield Namespace(model=mine.model, dtype="float16", block_tokens=32, block_bytes=8).canonical().decode()
    yield other(mine, extra_another="kind of cache", dtype="float16")
    yield from ("", "[]", "{", '{"extra": 1}')


def test_others_are_not_explained(mine: Namespace) -> None:
    assert explain_strangers(mine, strangers_on_purpose(mine)) is None
    assert explain_strangers(mine, []) is None


def test_nothing_is_said_while_the_store_has_blocks_of_ours(mine: Namespace) -> None:
    assert explain_strangers(mine, [other(mine), other(mine, block_tokens=16)]) is None
