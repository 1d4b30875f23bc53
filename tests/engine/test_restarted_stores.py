"""What decides a block's content besides its tokens, from end to end: LoRA adapters, cache salts, prompt embeddings and
sessions, and engines with several data-parallel ranks. One engine fills a store with a disk and ends. The store
restarts, and another engine reads. Every answer must be that of an engine without a store."""

from __future__ import annotations

import base64
import io
import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import save_adapter
from tests.engine.engines import BLOCK, full_blocks, prompt, stored_blocks
from tests.engine.served import ServedEngine, post, save_served_model
from tests.engine.streamed_session import Session
from tests.support.harness import Server, wait_until

QUESTION = prompt(1, 300)
HIDDEN = 256  # the width of the model
WHOLE = full_blocks(len(QUESTION))
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def store(start_server: Callable[..., Server], tmp_path: Path) -> Server:
    return start_server("--disk", str(tmp_path / "disk"), "--disk-size", "512MiB", memory="256MiB")


def restart(store: Server) -> None:
    """End the store, and start it again on its disk."""
    assert store.stop() == 0
    store.restart()


def ask(engine: ServedEngine, model: str = "tiny", rank: int | None = None, **more: Any) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt came from a cache."""
    body = {"model": model, "prompt": QUESTION, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
    where = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    status, answer = post(engine.url, "/v1/completions", body, **where)
    assert status == 200, answer
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["token_ids"], cached


def load_adapter(engine: ServedEngine, name: str, folder: Path) -> None:
    """Load an adapter while the engine runs."""
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    request = urllib.request.Request(f"{engine.url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def arrived(store: Server, blocks: int) -> None:
    wait_until(lambda: stored_blocks(store) == blocks, what=f"{blocks} blocks are in the store")


def test_adapters_added_while_engines_run_are_shared_by_content(
    store: Server, served_model: Path, tmp_path: Path
) -> None:
    cook, baker = save_adapter(tmp_path / "one" / "cook", 1), save_adapter(tmp_path / "one" / "baker", 2)
    with ServedEngine(served_model, tmp_path / "first.log", store.endpoint, *LORA, environment=RUNTIME) as first:
        for name, folder in (("cook", cook), ("baker", baker)):
            load_adapter(first, name, folder)
        right = {name: ask(first, name)[0] for name in ("tiny", "cook", "baker")}
        assert len({*map(tuple, right.values())}) == 3
        arrived(store, 3 * WHOLE // BLOCK)
    restart(store)
    moved = tmp_path / "two"
    shutil.copytree(tmp_path / "one", moved)
    with ServedEngine(served_model, tmp_path / "second.log", store.endpoint, *LORA, environment=RUNTIME) as second:
        # The same files at another path and under another name, and other files under a known name.
        load_adapter(second, "chef", moved / "cook")
        load_adapter(second, "cook", moved / "baker")
        assert ask(second, "chef") == (right["cook"], WHOLE)
        assert ask(second, "cook") == (right["baker"], WHOLE)
        assert ask(second) == (right["tiny"], WHOLE)
        third = save_adapter(tmp_path / "new" / "cook", 3)
        load_adapter(second, "new", third)
        answer, cached = ask(second, "new")
        assert cached == 0 and answer not in right.values()


def embeddings(user: int) -> dict[str, Any]:
    """Return the fields of a request whose prompt is one user's embeddings."""
    import torch

    rows = torch.randn(len(QUESTION), HIDDEN, generator=torch.Generator().manual_seed(user))
    file = io.BytesIO()
    torch.save(rows, file)
    return {"prompt": None, "prompt_embeds": base64.b64encode(file.getvalue()).decode()}


def test_requests_with_other_salts_or_embeddings_share_nothing(
    store: Server, served_model: Path, tmp_path: Path
) -> None:
    kinds = [{}, {"cache_salt": "alice"}, {"cache_salt": "bob"}, embeddings(1), embeddings(2)]
    with ServedEngine(served_model, tmp_path / "first.log", store.endpoint, "--enable-prompt-embeds") as first:
        right = [ask(first, **kind) for kind in kinds[:2] + kinds[3:4]]
        assert [cached for _, cached in right] == [0, 0, 0]
        arrived(store, 3 * WHOLE // BLOCK)
    restart(store)
    with ServedEngine(served_model, tmp_path / "second.log", store.endpoint, "--enable-prompt-embeds") as second:
        plain, alice, bob, mine, other = (ask(second, **kind) for kind in kinds)
    assert [plain, alice, mine] == [(answer, WHOLE) for answer, _ in right]
    assert bob == (right[0][0], 0), "the same tokens under another salt are computed"
    assert other[1] == 0 and other[0] != mine[0]


def test_data_parallel_ranks_share_with_each_other_and_with_other_engines(
    store: Server, served_model: Path, tmp_path: Path
) -> None:
    options = ("--data-parallel-size", "2")
    with ServedEngine(served_model, tmp_path / "first.log", store.endpoint, *options) as first:
        answer, cached = ask(first, rank=0)
        assert cached == 0
        arrived(store, WHOLE // BLOCK)
        assert ask(first, rank=1) == (answer, WHOLE), "the other rank has a cache of its own, and reads the store"
    restart(store)
    with ServedEngine(served_model, tmp_path / "second.log", store.endpoint, *options) as second:
        assert ask(second, rank=1) == (answer, WHOLE)
    with ServedEngine(served_model, tmp_path / "alone.log", store.endpoint) as alone:
        assert ask(alone) == (answer, WHOLE)


def test_a_streaming_session_loads_and_saves_what_it_says(
    store: Server, served_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def begin(name: str, endpoint: str | None) -> Session:
        session = Session(served_model, tmp_path / f"{name}.log", endpoint)
        request.addfinalizer(session.kill)
        return session

    inputs = [prompt(seed, 150) for seed in (1, 2, 3)]
    right = begin("right", None)
    answers = [right.say(each).token_ids for each in inputs]
    assert len({*map(tuple, answers)}) == 3
    right.stop()
    first = begin("first", store.endpoint)
    assert [first.say(each).token_ids for each in inputs] == answers
    # The session continues with all tokens of an answer but the last.
    conversation = [token for each, answer in zip(inputs, answers, strict=True) for token in each + answer[:-1]]
    arrived(store, full_blocks(len(conversation)) // BLOCK)
    first.stop()
    restart(store)
    second = begin("second", store.endpoint)
    said = second.say(inputs[0])
    assert (said.token_ids, said.cached_tokens) == (answers[0], full_blocks(150))
    restart(store)  # between two inputs of a session
    assert [second.say(each).token_ids for each in inputs[1:]] == answers[1:]
    second.stop()
    with ServedEngine(served_model, tmp_path / "alone.log", store.endpoint) as alone:
        _, cached = ask(alone, prompt=conversation)
    assert cached == full_blocks(len(conversation)), "a request without a session finds what the session said"
