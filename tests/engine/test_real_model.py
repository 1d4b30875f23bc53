"""A trained model and real text: SmolLM2 answers questions about pages of this documentation. Its caches have the bytes
of a trained model, and its answers can be read. `test_demo` has the simplest way in, one engine after another."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from examples.models import REAL, make_model, make_prompts, reader_of
from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, Engine, StartEngine, full_blocks
from tests.support.harness import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the engine's parts about each other
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from tests.engine.tier_engine import BLOCK_TOKENS, Shape, TieredEngine

PREFILL, DECODE = "do_remote_decode", "do_remote_prefill"
PROMPT_TOKENS, ANSWER_TOKENS = 600, 24
SMALL = {"num_gpu_blocks_override": 96}  # blocks of 1.4 MB


@pytest.fixture(scope="module")
def real_model() -> Path:
    return make_model(REAL)


@pytest.fixture(scope="module")
def questions(real_model: Path) -> list[list[int]]:
    return make_prompts(REAL, real_model, 2, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def right(real_model: Path, questions: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of an engine without a store."""
    engine = Engine(real_model, tmp_path_factory.mktemp("right") / "engine.log", connector=None, **SMALL)
    answers = [answer.token_ids for answer in engine.generate(*questions, max_tokens=ANSWER_TOKENS)]
    engine.stop()
    read = reader_of(REAL, real_model)
    for answer in answers:
        words = re.findall(r"[A-Za-z]{2,}", read(answer))
        assert len({*words}) >= 6, read(answer)
    return answers


def test_a_decode_engine_answers_from_what_a_prefill_engine_read(
    server: Server, start_engine: StartEngine, real_model: Path, questions: list[list[int]], right: list[list[int]]
) -> None:
    prefiller, decoder = (start_engine(server.endpoint, model=real_model, **SMALL) for _ in range(2))
    for question, answer in zip(questions, right, strict=True):
        decoder.order_play(Ask(question, ANSWER_TOKENS, side=DECODE))
        prefiller.play(Ask(question, 1, side=PREFILL))
        [found] = decoder.result()
        assert found.token_ids == answer
        assert found.cached_tokens >= full_blocks(len(question))


def test_engines_that_keep_parts_of_layers_give_the_same_answers(
    server: Server, start_engine: StartEngine, real_model: Path, questions: list[list[int]], right: list[list[int]]
) -> None:
    for cached in (0, full_blocks(PROMPT_TOKENS) - BLOCK):
        engine = start_engine(
            server.endpoint, model=real_model, options={"layer_parts": 5, "cpu_bytes": 64 << 20}, **SMALL
        )
        answers = engine.generate(*questions, max_tokens=ANSWER_TOKENS)
        assert [answer.token_ids for answer in answers] == right
        assert all(answer.cached_tokens >= cached for answer in answers)
        engine.settle()
        engine.stop()


class Transformer:
    """SmolLM2 in transformers, whose cache stands for the GPU's. It computes in float32, because many CPUs are slow in
    bfloat16, and keeps its cache in bfloat16."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self._model.config
        heads = config.num_key_value_heads
        self.shape = Shape(config.num_hidden_layers, heads, config.hidden_size // config.num_attention_heads)

    def read(self, tokens: Sequence[int]) -> list[bytes]:
        """Compute whole blocks of a prompt, and return the bytes of each."""
        import torch

        with torch.inference_mode():
            cache = self._model(torch.tensor([tokens]), use_cache=True).past_key_values
        pairs = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        raw = pairs.bfloat16().view(torch.uint16).numpy()
        return [raw[..., start : start + BLOCK_TOKENS, :].tobytes() for start in range(0, len(tokens), BLOCK_TOKENS)]

    def answer(self, tokens: Sequence[int], blocks: Sequence[bytes]) -> list[int]:
        """Answer a prompt whose first blocks are known."""
        import torch
        from transformers import DynamicCache

        shape, cache = self.shape, DynamicCache(config=self._model.config)
        size = (shape.layers, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_size)
        raw = np.concatenate([np.frombuffer(block, np.uint16).reshape(size) for block in blocks], axis=3)
        for number, (keys, values) in enumerate(torch.from_numpy(raw).view(torch.bfloat16).float()):
            cache.update(keys[None], values[None], number)
        rest, answer = list(tokens[raw.shape[3] :]), []
        with torch.inference_mode():
            for _ in range(ANSWER_TOKENS):
                logits = self._model(torch.tensor([rest]), past_key_values=cache, use_cache=True).logits
                rest = [int(logits[0, -1].argmax())]
                answer += rest
        return answer


def test_vllms_own_offloading_brings_a_real_models_cache_back(
    server: Server, real_model: Path, questions: list[list[int]]
) -> None:
    """vLLM's offloading needs a GPU, so transformers computes here, and vLLM's manager moves the bytes."""
    transformer = Transformer(real_model)
    question = questions[0]
    computed = transformer.read(question[: full_blocks(len(question))])
    right = transformer.answer(question, computed)
    words = re.findall(r"[A-Za-z]{2,}", reader_of(REAL, real_model)(right))
    assert len({*words}) >= 6, words
    init_none_hash(sha256)
    asked = Request(
        "question",
        question,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    first, second = (
        TieredEngine(real_model, server.endpoint, shape=transformer.shape, chunks=128) for _ in range(2)
    )  # a quarter of the chunks may wait to be sent
    keys, _ = first.ask(asked)
    del keys[len(computed) :]
    first.content_of = dict(zip(keys, computed, strict=True)).__getitem__
    first.save(keys)
    first.shutdown()
    assert second.hits(keys) == len(computed) == full_blocks(PROMPT_TOKENS) // BLOCK
    assert transformer.answer(question, second.read(keys)) == right
    second.shutdown()
