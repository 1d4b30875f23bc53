"""Both halves of the connector with vLLM's second model runner, its asynchronous scheduler and a real store.

`Pages` fails a test if a request attends to KV that was not computed from its own tokens.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Server, wait_until
from tests.support.slow_link import SlowLink

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch

    from tests.engine.scheduled_ranks import BLOCK_TOKENS
    from tests.engine.second_runner import VOCABULARY, SecondRunnerEngine, answer

StartRunner = Callable[..., SecondRunnerEngine]


@pytest.fixture
def start_runner(model: Path, rank: object, device: str) -> Iterator[StartRunner]:
    """``start_runner(endpoint, blocks=...)`` starts the only engine of this process; the next call ends it first."""
    engines: list[SecondRunnerEngine] = []

    def end() -> None:
        while engines:
            engines.pop().close()

    def start(endpoint: str, **arguments: Any) -> SecondRunnerEngine:
        end()
        engines.append(SecondRunnerEngine(model, endpoint, device=device, **arguments))
        return engines[-1]

    yield start
    end()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    device: str = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    return device


def prompt(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(tokens)]


def test_one_engine_loads_and_continues_what_another_saved(server: Server, start_runner: StartRunner) -> None:
    first = start_runner(server.endpoint, budget=96)  # prompts are computed in chunks
    prompts = [prompt(seed, 300 + seed) for seed in range(4)]
    expected = [answer(each, 20) for each in prompts]
    assert first.finish(*[first.add(each, 20) for each in prompts]) == expected
    first.settle()
    second = start_runner(server.endpoint, budget=96)
    longer = [each + said for each, said in zip(prompts, expected, strict=True)]
    asked = [second.add(each) for each in longer]
    assert second.finish(*asked) == [answer(each, 8) for each in longer]
    for request, each in zip(asked, longer, strict=True):
        # The KV of the first answer's last token was not computed.
        assert second.loaded[request.request_id] == (len(each) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    second.settle()


def test_requests_preempted_during_copies_are_right(server: Server, start_runner: StartRunner) -> None:
    prompts = [prompt(seed, 190) for seed in range(4)]
    expected = [answer(each, 40) for each in prompts]
    engine = start_runner(server.endpoint, blocks=27)  # too few blocks for all answers
    assert engine.finish(*[engine.add(each, 40) for each in prompts]) == expected
    assert engine.preemptions
    engine.settle()
    again = start_runner(server.endpoint, blocks=27)
    assert again.finish(*[again.add(each, 40) for each in prompts]) == expected
    assert again.loaded
    again.settle()


def test_aborted_loads_leave_nothing_behind(
    server: Server, link: SlowLink, start_runner: StartRunner, device: str
) -> None:
    asked = prompt(1, 400)
    first = start_runner(server.endpoint)
    first.finish(first.add(asked))
    first.settle()
    engine = start_runner(link.endpoint, options={"timeout_s": 2.0})
    request = engine.add(asked)
    half = engine.scheduler.connector._scheduler
    link.hold(after_bytes=20_000)
    wait_until(lambda: engine.step() or half.under_way["loading"])
    engine.abort(request)
    other = engine.add(prompt(2, 200))
    assert engine.finish(other) == [answer(prompt(2, 200), 8)]
    link.release()
    engine.settle()
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_a_failed_load_is_computed(server: Server, start_runner: StartRunner) -> None:
    asked = prompt(3, 400)
    first = start_runner(server.endpoint)
    first.finish(first.add(asked))
    first.settle()
    engine = start_runner(server.endpoint, options={"timeout_s": 1.0, "lookup_timeout_s": 1.0})
    request = engine.add(asked)
    half = engine.scheduler.connector._scheduler
    wait_until(lambda: half.loads._waiting[request.request_id].lookup.stored or half.state.lookups._answers)
    with server.stopped():
        assert engine.finish(request) == [answer(asked, 8)]
    engine.settle()


def test_a_warm_up_run_does_not_call_the_connector(server: Server, start_runner: StartRunner) -> None:
    engine = start_runner(server.endpoint)
    engine.runner.set_disabled(True)
    calls: list[str] = []
    for name in ("start_load_kv", "wait_for_save", "get_transfer_results", "handle_preemptions"):
        setattr(engine.worker, name, lambda *_, name=name, **__: calls.append(name))
    engine.step()
    assert not calls
    engine.runner.set_disabled(False)
