"""Measurements decide the number of tokens from which a prompt is split."""

from __future__ import annotations

import math
import random

import pytest

from kvstore_serving.proxy.engine_load import running_and_waiting
from kvstore_serving.proxy.pace import LEAST, MAX_SAMPLE_AGE_S, UNMEASURED, EngineLoad, LinearFit, TokenPace, Ways

FAST, SLOW = LinearFit(0.02, 1e-4), LinearFit(0.02, 5e-4)
IDLE = EngineLoad(FAST, 0)


def measured(line: LinearFit, noise: float = 0.0, *, seed: int = 1, samples: int = 40) -> LinearFit:
    chooser, pace = random.Random(seed), TokenPace()
    for _ in range(samples):
        tokens = chooser.uniform(10, 8000)
        pace.add(tokens, line.seconds(tokens) * chooser.uniform(1 - noise, 1 + noise))
    assert pace.line is not None
    return pace.line


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_pace_is_found_despite_noise(noise: float) -> None:
    for seed in range(20):
        found = measured(FAST, noise, seed=seed)
        for tokens in (1000, 8000):
            assert found.seconds(tokens) == pytest.approx(FAST.seconds(tokens), rel=0.001 + noise / 2)


def test_a_pace_follows_a_change() -> None:
    pace, chooser = TokenPace(), random.Random(2)
    for line in (FAST, SLOW):
        for _ in range(60):
            tokens = chooser.uniform(10, 8000)
            pace.add(tokens, line.seconds(tokens))
    assert pace.line is not None
    assert pace.line.seconds(4000) == pytest.approx(SLOW.seconds(4000), rel=0.1)


def test_prompts_of_one_size_give_a_pace_too() -> None:
    pace = TokenPace()
    for _ in range(10):
        pace.add(1000, 0.5)
    assert pace.line == LinearFit(0.0, pytest.approx(0.0005))


def test_one_late_answer_changes_little() -> None:
    before = TokenPace()
    for tokens in range(100, 4100, 100):
        before.add(tokens, FAST.seconds(tokens))
    before.add(200, 60.0)
    assert before.line is not None
    assert before.line.seconds(2000) == pytest.approx(FAST.seconds(2000), rel=0.3)


def test_too_few_or_too_old_samples_give_no_pace() -> None:
    now = 1000.0
    pace = TokenPace(lambda: now)
    for number in range(4):
        pace.add(100 * number, 0.1)
        assert pace.line is None
    pace.add(1000, 0.1)
    pace.add(1100, 0.1)
    assert pace.line is not None
    now += MAX_SAMPLE_AGE_S + 1
    assert pace.line is None


def least(prefill: EngineLoad, decode: EngineLoad, hand_over: LinearFit | None, answers: int) -> float:
    return Ways(prefill, decode, hand_over, answers).least


def test_unmeasured_engines_split_from_a_fixed_number() -> None:
    for ways in (Ways(EngineLoad(None, 0), EngineLoad(None, 0), FAST, 0), Ways(IDLE, IDLE, None, 3)):
        assert ways.least == UNMEASURED
        assert ways.splits(UNMEASURED, 0) and not ways.splits(UNMEASURED - 1, 0)


def test_a_prompt_is_split_if_all_requests_wait_less() -> None:
    chooser = random.Random(3)
    for _ in range(500):
        p, d, link = (LinearFit(chooser.uniform(0, 0.5), chooser.uniform(1e-6, 1e-3)) for _ in range(3))
        ahead_p, ahead_d, answers = chooser.randrange(5000), chooser.randrange(5000), chooser.randrange(6)
        ways = Ways(EngineLoad(p, ahead_p), EngineLoad(d, ahead_d), link, answers)
        for tokens in (LEAST - 1, LEAST, 200, 1000, 5000, 50_000):
            for at_prefill in (tokens, 0):
                alone = d.seconds(ahead_d + tokens) + answers * d.each * tokens
                split = p.seconds(ahead_p + at_prefill) + link.seconds(tokens)
                assert ways.splits(tokens, at_prefill) == (split < alone and tokens >= LEAST)
            if tokens < ways.least:
                assert not ways.splits(tokens, tokens), "what is shown as the least is"


def test_a_busy_decode_engine_splits_sooner_a_busy_prefill_engine_later() -> None:
    link = LinearFit(0.05, 2e-5)
    idle = least(IDLE, IDLE, link, 1)
    assert least(IDLE, IDLE, link, 8) < idle
    assert least(IDLE, EngineLoad(FAST, 400), link, 1) < idle
    assert least(EngineLoad(FAST, 4000), IDLE, link, 1) > idle
    assert least(IDLE, IDLE, LinearFit(2.0, 0), 1) > 10 * idle, "a slow store"
    assert least(IDLE, IDLE, LinearFit(0.0, 1e-3), 1) == math.inf, "a link that is slower than computing"


def test_the_load_of_an_engine_is_read_from_its_metrics() -> None:
    text = b"""# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m"} 70.0
vllm:prompt_tokens_total{engine="0"} 9.0
"""
    assert running_and_waiting(text) == (5, 7)
    assert running_and_waiting(b'sglang:num_running_reqs{a="b"} 4\nsglang:num_queue_reqs 1\n') == (4, 1)
    for odd in (b"", b"vllm:num_requests_running NaN\n", b"vllm:num_requests_running{ 1e999\n", b"\xff" * 100):
        assert running_and_waiting(odd) == (0, 0)
