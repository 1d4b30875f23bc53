"""Prompts that contain embeddings, alone or with tokens, in real engines that share a store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.driver import Answer, Ask
from tests.engine.engines import BLOCK, Engine, StartEngine, prompt
from tests.support.harness import Server, wait_until

PREFILL, DECODE = "do_remote_decode", "do_remote_prefill"
HIDDEN = 256  # the width of the model of `save_model`
TOKENS = 5 * BLOCK + 12
Rows = npt.NDArray[np.float32]


def rows(user: int, first: int, last: int = TOKENS) -> Rows:
    """Return a prompt's embeddings: those of one user at these positions, and zeros elsewhere."""
    found = np.zeros((TOKENS, HIDDEN), dtype=np.float32)
    found[first:last] = np.random.default_rng(user).normal(0.0, 1.0, (last - first, HIDDEN))
    return found


def ask(user: int, first: int, side: str = "", max_tokens: int = 8) -> Ask:
    """Return a request whose tokens before `first` are the same for all users, and which continues with the user's
    embeddings."""
    mask = [place < first for place in range(TOKENS)]
    more = {"prompt_embeds": rows(user, first), "prompt_is_token_ids": mask}
    return Ask(prompt(7, TOKENS), max_tokens, side=side, more=more)


@pytest.mark.parametrize("first", [5 * BLOCK, 4 * BLOCK - 8], ids=["behind the last whole block", "over several"])
def test_no_user_gets_the_answer_to_another_users_embeddings(
    first: int, server: Server, start_engine: StartEngine
) -> None:
    """The prompts of both users have the same token ids, and are handed over in quick succession."""
    options = {"enable_prompt_embeds": True}
    prefiller, decoder = (start_engine(server.endpoint, **options) for _ in range(2))
    alone: Engine = start_engine("tcp://127.0.0.1:1", **options)
    right = [alone.play(ask(user, first))[0].token_ids for user in (1, 2)]
    assert right[0] != right[1]
    for engine in (prefiller, decoder):
        engine.generate(prompt(99, 40))
    cached: list[int] = []
    for user in (1, 2):
        decoder.reset_prefix_cache()  # so that it starts empty, like another decode engine
        decoder.order_play(ask(user, first, DECODE))
        prefiller.play(ask(user, first, PREFILL, max_tokens=1))
        [answer] = decoder.result()
        assert answer.token_ids == right[user - 1]
        cached.append(answer.cached_tokens)
    # On a busy machine, the promise of a prompt's end may come later than the rest; then the decode side does not wait
    # for that end.
    assert min(cached) >= TOKENS // BLOCK * BLOCK and max(cached) == TOKENS, "everything is handed over, by content"

    def again() -> Answer:
        decoder.reset_prefix_cache()
        [answer] = decoder.play(ask(1, first))
        assert answer.token_ids == right[0]
        return answer

    # For a tenth of a second, the engine remembers that the store lacked these blocks.
    wait_until(lambda: again().cached_tokens == 5 * BLOCK, what="they are found by content")
