"""Pictures in prompts, in real engines that share a store. Some requests choose the ids of their pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, Engine, Ledger, StartEngine, prompt
from tests.support.harness import Server

PREFILL, DECODE = "do_remote_decode", "do_remote_prefill"
WORDS = 5 * BLOCK
TOKENS = 16 + WORDS  # the words and the positions of the picture
Start: TypeAlias = "Callable[..., Engine]"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.models import save_picture_model  # imports torch, so only when a test needs it

    return save_picture_model(tmp_path_factory.mktemp("seeing") / "tiny")


@pytest.fixture
def start_seeing(server: Server, start_engine: StartEngine, seeing: Path) -> Start:
    def start(endpoint: str = "", options: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        needed = {"model": seeing, "skip_tokenizer_init": False, "max_model_len": 1024}
        return start_engine(endpoint or server.endpoint, options=options, **needed, **arguments)

    return start


def about(colour: str, name: str | None = None, *, side: str = "", max_tokens: int = 8) -> Ask:
    """Return a request about a picture of this colour; the text is always the same. name: the id of the picture."""
    from PIL import Image

    more: dict[str, Any] = {"multi_modal_data": {"image": Image.new("RGB", (32, 32), colour)}}
    if name is not None:
        more["multi_modal_uuids"] = {"image": [name]}
    return Ask([token % 4000 for token in prompt(7, WORDS)], max_tokens, side=side, more=more)


def answer(engine: Engine, ask: Ask) -> tuple[list[int], int]:
    """Return the answer, and the number of cached tokens."""
    [found] = engine.play(ask)
    engine.settle()
    return found.token_ids, found.cached_tokens


@pytest.fixture
def right(start_seeing: Start) -> dict[str, list[int]]:
    """The answer for each colour, from an engine without a store."""
    alone = start_seeing("tcp://127.0.0.1:1")
    found = {colour: alone.play(about(colour))[0].token_ids for colour in ("red", "blue", "green")}
    assert len(set(map(tuple, found.values()))) == 3
    return found


def test_no_user_gets_the_answer_about_another_picture_with_that_id(
    start_seeing: Start, right: dict[str, list[int]]
) -> None:
    first, other, third = (start_seeing() for _ in range(3))
    for engine in (first, other, third):
        engine.generate(prompt(99, 40))
    assert answer(first, about("red", "img-1")) == (right["red"], 0)
    assert answer(other, about("blue", "img-1")) == (right["blue"], 0)
    assert answer(third, about("red", "img-1")) == (right["red"], WORDS), "five whole blocks, with the picture's"
    # Within one engine, vLLM mistakes one picture for another with the same id; the results of that are not shared.
    assert answer(first, about("green", "img-1"))[0] == right["red"]
    first.reset_prefix_cache()
    answer(first, about("green", "img-1"))
    third.reset_prefix_cache()
    fourth = start_seeing()
    fourth.generate(prompt(99, 40))
    assert answer(fourth, about("green", "img-1")) == (right["green"], 0)
    # A prompt with a picture is also handed over up to its last token.
    books = Ledger(other)
    other.order_play(about("green", side=DECODE))
    first.play(about("green", side=PREFILL, max_tokens=1))
    [handed] = other.result()
    assert (handed.token_ids, handed.cached_tokens) == (right["green"], TOKENS)
    assert books["hand_overs/decode"] == 1 and books["unpromised_requests"] == 0


def test_trusted_ids_share_what_was_computed_under_them(start_seeing: Start, right: dict[str, list[int]]) -> None:
    first, other = (start_seeing(options={"trust_media_ids": True}) for _ in range(2))
    for engine in (first, other):
        engine.generate(prompt(99, 40))
    assert answer(first, about("red", "img-1")) == (right["red"], 0)
    assert answer(other, about("blue", "img-1")) == (right["red"], WORDS)
    assert answer(other, about("blue", "img-2")) == (right["blue"], 0)


def test_contents_mixed_up_within_one_engine_reach_no_other(start_seeing: Start, right: dict[str, list[int]]) -> None:
    """Without its processor's cache, an engine gets the data of the second picture, but still computes with the
    features of the first picture with that id."""
    mixing, other = start_seeing(mm_processor_cache_gb=0), start_seeing()
    for engine in (mixing, other):
        engine.generate(prompt(99, 40))
    assert answer(mixing, about("red", "img-1")) == (right["red"], 0)
    mixing.reset_prefix_cache()
    assert answer(mixing, about("blue", "img-1")) == (right["red"], 0), "vLLM's encoder cache"
    assert answer(other, about("blue", "img-1")) == (right["blue"], 0)
    assert "img-1" in mixing.log_text()
