"""The toy transformer of the GPU benchmark: the paged cache and the chunks change only its rounding, and its answer
depends on the whole prompt. Otherwise, equal answers would prove nothing about loaded blocks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator

import pytest

from benchmarks.gpu.names import COMPUTED, HOST, IN_CACHE, SAVED, SHARED, TCP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    torch = pytest.importorskip("torch")
    from benchmarks.gpu.toy_model import BLOCK_TOKENS, SMALL, Shape, ToyModel
    from benchmarks.gpu.toy_prompt import Prompt, Rig, make_rig

BLOCKS = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: torch's threads would take a busy machine's time while they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(chunk: int) -> ToyModel:
    shape = Shape("test", 3, 64, 4, 2, 96, 128, chunk=chunk)
    return ToyModel(shape, BLOCKS, "cpu", torch.float32)


def tokens(seed: int, count: int = 150) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(128) for _ in range(count)]


def plain_forward(of: ToyModel, prompt: list[int]) -> torch.Tensor:
    """Compute with the same weights, with textbook attention, in one pass and without a cache."""
    shape, x = of.shape, of._embedding[torch.tensor(prompt)]
    count, half = len(prompt), shape.head_size // 2
    angles = torch.arange(count, dtype=torch.float64)[:, None] * of._frequencies
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        made = torch.complex(heads[..., :half].contiguous(), heads[..., half:].contiguous()) * turns
        return torch.cat([made.real, made.imag], dim=2)

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    for qkv, out, gate_up, down in of._layers:
        q, k, v = (norm(x) @ qkv.T).split(
            [shape.hidden, shape.kv_heads * shape.head_size, shape.kv_heads * shape.head_size], 1
        )
        q, k = (turned(each.view(count, -1, shape.head_size)) for each in (q, k))
        k, v = (each.view(count, shape.kv_heads, -1).repeat_interleave(2, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_size**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1) @ out.T
        gate, up = (norm(x) @ gate_up.T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ down.T
    return of._head @ norm(x[-1])


@pytest.mark.parametrize("chunk", [1000, 48, 37, 1])
def test_chunks_over_a_paged_cache_equal_one_pass_of_plain_attention(chunk: int) -> None:
    of = model(chunk)
    ids = random.Random(1).sample(range(BLOCKS), 10)
    assert torch.allclose(of.compute(tokens(0), ids), plain_forward(of, tokens(0)), atol=1e-4)


def test_only_bytes_of_a_prompts_own_blocks_matter() -> None:
    of = model(48)
    ids = list(range(10))
    whole = of.compute(tokens(0), ids)
    right = of.compute(tokens(0), ids, 144)
    assert torch.allclose(right, whole, atol=1e-4)
    of.cache[:, 10:] = 7.0
    assert torch.equal(of.compute(tokens(0), ids, 144), right)
    of.cache[:, 3] = of.cache[:, 3].flip(3)
    assert (of.compute(tokens(0), ids, 144) - right).abs().max() > 0.1


def test_each_full_block_is_reported_once() -> None:
    told: list[tuple[int, int]] = []
    model(37).compute(tokens(0), list(range(10)), computed=lambda first, end: told.append((first, end)))
    assert told == [(0, 2), (2, 4), (4, 6), (6, 9), (9, 9)]
    assert BLOCK_TOKENS == 16


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[Rig, Prompt]]:
    """A prompt that was computed and saved."""
    with make_rig(ToyModel(SMALL, 1, "cpu"), 200) as rig:
        prompt = Prompt(rig, 200)
        run(prompt, SAVED)
        yield rig, prompt


def run(prompt: Prompt, name: str) -> None:
    [operation] = [each for each in prompt.operations() if each.name == name]
    operation.before()
    operation.run()
    operation.after()


@pytest.mark.parametrize("name", [HOST, SHARED, TCP, IN_CACHE, COMPUTED])
def test_every_way_to_the_first_token_has_the_same_bytes_and_logits(asked: tuple[Rig, Prompt], name: str) -> None:
    _, prompt = asked
    before = prompt.found()["checked_loads"]
    run(prompt, name)
    found = prompt.found()
    assert found["checked_loads"] == before + (name != COMPUTED)
    assert found["bytes_equal"] and found["tokens_equal"] and found["computes_to_the_same_bytes"]
    assert found["loaded_differs"] == 0.0


def test_one_wrong_byte_or_swapped_blocks_are_noticed(asked: tuple[Rig, Prompt]) -> None:
    rig, prompt = asked
    run(prompt, TCP)
    words = rig.model.cache.view(torch.int16)
    place = (2, prompt._to[5], 1, 3, 4)
    words[place] += 1
    with pytest.raises(AssertionError, match="the bytes loaded are not"):
        prompt._check_loaded()
    words[place] -= 1
    prompt._check_loaded()
    one, other = prompt._to[3], prompt._to[4]
    rig.model.cache[:, [one, other]] = rig.model.cache[:, [other, one]]
    with pytest.raises(AssertionError, match="the bytes loaded are not"):
        prompt._check_loaded()


def test_other_logits_with_the_right_bytes_are_noticed(asked: tuple[Rig, Prompt]) -> None:
    _, prompt = asked
    run(prompt, HOST)
    prompt._logits = prompt._logits + 0.1
    with pytest.raises(AssertionError, match="the logits after loaded blocks differ"):
        prompt._check_loaded()
    prompt._logits = prompt._logits * float("nan")
    with pytest.raises(AssertionError, match="the logits after loaded blocks differ"):
        prompt._check_loaded()


def test_a_load_without_any_block_is_noticed(asked: tuple[Rig, Prompt]) -> None:
    rig, prompt = asked
    rig.client.delete(prompt.keys)
    with pytest.raises(RuntimeError, match="12 blocks could not be loaded"):
        run(prompt, TCP)
    run(prompt, SAVED)


def test_blocks_of_another_prompt_change_the_logits(asked: tuple[Rig, Prompt]) -> None:
    _, prompt = asked
    prompt.check_control()
    found = prompt.found()
    assert found["control_tokens"] == 192 and found["control_differs"] > 1
    prompt._chooser = SameTokens(prompt._prompt)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="blocks of another prompt were not loaded"):
        prompt.check_control()
    run(prompt, SAVED)


class SameTokens:
    """Replaces the random generator that chooses another prompt, and chooses the same prompt."""

    def __init__(self, prompt: object) -> None:
        self._prompt = prompt

    def integers(self, low: int, high: int, count: int) -> object:
        return self._prompt[:count]  # type: ignore[index]
