"""The decode loop of the KV pipeline's benchmarks, in small sizes, with a real server over loopback. Its output does
not depend on the place of its KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks.kv_pipeline.blocks import keys_of
from benchmarks.kv_pipeline.decoder import Shape, attend
from benchmarks.kv_pipeline.lending import Fetched, Pushed, lent_layers
from benchmarks.kv_pipeline.rig import Rig

SHAPE = Shape(layers=6, heads=2, head_size=16, batch=3, context=40, steps=3)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(SHAPE, None, stack)


@pytest.mark.parametrize("shared", [False, True], ids=["TCP", "shared memory"])
@pytest.mark.parametrize("depth", [0, 1, 2], ids=["serial", "depth 1", "depth 2"])
def test_a_decoders_output_is_identical_wherever_its_kv_is(rig: Rig, depth: int, shared: bool) -> None:
    client = rig.connect(shared)
    for lent in (1, 3, SHAPE.layers):
        with Fetched(SHAPE, rig.resident, lent_layers(SHAPE, lent), client, depth, None) as fetched:
            np.testing.assert_array_equal(rig.decoder.run(fetched.attend), rig.expected)


def test_some_of_the_sequences_give_identical_output(rig: Rig) -> None:
    smaller = rig.of_batch(2)
    with Fetched(smaller.shape, smaller.resident, [0, 4], rig.client, 1, None) as fetched:
        np.testing.assert_array_equal(smaller.decoder.run(fetched.attend), smaller.expected)


def test_attention_next_to_the_store_merges_to_the_same_output(rig: Rig) -> None:
    beside = rig.beside()
    for one in (rig, rig.of_batch(2)):
        for lent in (1, SHAPE.layers):
            pushed = Pushed(one.shape, one.resident, lent_layers(SHAPE, lent), beside)
            np.testing.assert_allclose(one.decoder.run(pushed.attend), one.expected, rtol=1e-4, atol=1e-4)


def test_parts_of_attention_merge_to_the_whole() -> None:
    random = np.random.default_rng(3)
    query = random.standard_normal((2, 3, 1, 16), dtype=np.float32) * 4  # weights of very different sizes
    kv = random.standard_normal((2, 2, 3, 33, 16), dtype=np.float32)
    scores = query.astype(np.float64) @ kv[:, 0].swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    whole = weights @ kv[:, 1] / weights.sum(axis=-1, keepdims=True)
    for at in range(1, 33):
        merged = attend(query, kv[..., :at, :]).merged(attend(query, kv[..., at:, :]))
        np.testing.assert_allclose(merged.output, whole, rtol=1e-4, atol=1e-5)


def test_kv_changed_by_another_decoder_changes_the_output(rig: Rig) -> None:
    """The decode loop really reads the store: with other bytes in the store, its output differs."""
    layer = 2
    kv = rig.resident.kv[layer]
    blocks = kv.view(np.uint8).reshape(SHAPE.batch, SHAPE.block_bytes)
    changed = (kv + 1).view(np.uint8).reshape(blocks.shape)
    try:
        rig.client.delete(keys_of(SHAPE, layer))
        rig.client.set(keys_of(SHAPE, layer), changed, deferred=False)
        with Fetched(SHAPE, rig.resident, [layer], rig.client, 1, None) as fetched:
            assert not np.array_equal(rig.decoder.run(fetched.attend), rig.expected)
    finally:
        rig.client.delete(keys_of(SHAPE, layer))
        rig.client.set(keys_of(SHAPE, layer), blocks, deferred=False)


def test_kv_lost_by_the_store_is_an_error_with_its_layer(rig: Rig) -> None:
    layer = 3
    blocks = rig.resident.kv[layer].view(np.uint8).reshape(SHAPE.batch, SHAPE.block_bytes)
    try:
        rig.client.delete(keys_of(SHAPE, layer))
        with (
            pytest.raises(RuntimeError, match=f"lacks KV of layer {layer}"),
            Fetched(SHAPE, rig.resident, [layer], rig.client, 1, None) as fetched,
        ):
            rig.decoder.run(fetched.attend)
    finally:
        rig.client.set(keys_of(SHAPE, layer), blocks, deferred=False)
