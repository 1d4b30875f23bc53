"""Busy engines with a store that fails again and again: tokens are right, memory is bounded, nothing is left behind,
and no request is delayed longer than promised.

The engines have too little of everything: the cache, the CPU tier and the store evict blocks, and requests are
preempted and aborted. In most rounds the store has a fault. `soak_scenes.py` has the kinds of engines and faults, and
`soak_watch.py` has the checks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from pathlib import Path

import pytest

from tests.engine.engines import Expected, StartEngine, prompt, until_it_hits
from tests.engine.soak_scenes import CPU_BYTES, KINDS, MOST_TOKENS, SERVER_BYTES, Stage, Talk
from tests.engine.soak_watch import Watch, explained
from tests.support.harness import StartServer

MiB = 1 << 20
AT_LENGTH = "KVSTORE_SOAK_S" in os.environ
SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "8"))
WARM_UP_S = max(SOAK_S / 4, 4.0)
WARM_UP_ROUNDS = 3  # the fewest rounds of the warm-up: on a busy machine a round takes seconds
MOST_ROUNDS = 30  # the most rounds to wait until requests were preempted and aborted
PREPARED_SHAPES = 32  # vLLM keeps prepared multiplications for this many lengths of a step, for every layer
GROWTH_BYTES = CPU_BYTES + 16 * MiB  # after the warm-up: rows used for the first time, and memory kept by the allocator


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S * 4 + 400)
@pytest.mark.parametrize("kind", KINDS if AT_LENGTH else KINDS[:1])
def test_busy_engines_with_a_failing_store_stay_right_quick_and_small(
    start_server: StartServer, start_engine: StartEngine, expected: Expected, tmp_path: Path, kind: str
) -> None:
    seed = int(os.environ.get("KVSTORE_SOAK_SEED") or random.randrange(1 << 32))
    print(f"{kind}, KVSTORE_SOAK_SEED={seed}, logs in {tmp_path}", flush=True)
    choose = random.Random(seed)
    talk = Talk(choose)
    with contextlib.ExitStack() as stack:
        scene = Stage(tmp_path, choose, start_server, start_engine, expected, stack).scene(kind)
        engines = scene.engines
        stack.enter_context(explained(engines))
        for engine in engines:  # measures how fast the engine is
            engine.generate(prompt(2, 300))
            for tokens in range(1, PREPARED_SHAPES + 1):  # otherwise memory would grow by 30 MiB later
                engine.generate(prompt(2, tokens), max_tokens=1)
        watch = Watch(engines, scene.servers, SERVER_BYTES, GROWTH_BYTES)
        turn = requests = preemptions = aborted = 0
        busy_s = 0.0
        while (
            busy_s < SOAK_S
            or turn < 2 * WARM_UP_ROUNDS
            or ((busy_s < 3 * SOAK_S or turn < MOST_ROUNDS) and not (preemptions and aborted))
        ):
            asked = scene.asks(turn, talk)
            started = time.monotonic()
            for engine, its_own in zip(engines, asked, strict=True):
                engine.order_play(*its_own)
            if choose.random() < 0.7:
                scene.harm(choose)
            answers = [engine.result() for engine in engines]
            busy_s += time.monotonic() - started
            asks = [*itertools.chain(*asked)]
            right = scene.expected(*[ask.prompt for ask in asks], max_tokens=MOST_TOKENS)
            for ask, tokens, answer in zip(asks, right, itertools.chain(*answers), strict=True):
                if not answer.aborted:
                    assert answer.token_ids == tokens[: ask.max_tokens], ask
                preemptions += answer.preemptions
                aborted += answer.aborted
                requests += 1
            turn += 1
            for promise in scene.promises:
                promise.check(max(answer.step_s for answer in itertools.chain(*answers)))
            told = watch.look(warming_up=busy_s < WARM_UP_S or turn <= WARM_UP_ROUNDS)
            print(f"{busy_s:6.1f} s, round {turn}: {told}", flush=True)
        if scene.always_load and not scene.handed_over:
            until_it_hits(engines[0], prompt(1, 300))
        watch.at_rest()
        hits = 0.0
        for engine, promise in zip(engines, scene.promises, strict=True):
            numbers = engine.metrics()
            print(f"{requests} requests, {preemptions} preemptions, {aborted} aborted, {numbers}")
            print(f"{promise.requests} requests timed, held back longest: {promise.longest}", flush=True)
            assert numbers["defects"] == 0
            assert numbers["hit_tokens/store"] > 0 or scene.handed_over
            hits += numbers["hit_tokens/cpu"]
        assert min(hits, preemptions, aborted) > 0
