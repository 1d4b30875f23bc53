"""A busy engine and a store that keeps failing, as long as one lets them: right tokens, bounded memory, nothing left.

The engine has too little of everything: cache, CPU tier and store all evict, requests are preempted and given up, and
most rounds the store is killed, frozen, slowed or cut off for a while.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Engine,
    Expected,
    StartEngine,
    namespaces,
    prompt,
    save_windowed_model,
    until_it_hits,
)
from tests.support.harness import OVERHEAD_BYTES, Server, StartServer, rss_bytes, wait_until
from tests.support.slow_link import SlowLink

MiB = 1 << 20
SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "12"))
SERVER_BYTES = 32 * MiB
CPU_BYTES = 16 * MiB
WARM_UP_S = max(8.0, SOAK_S / 4)
WARM_UP_ROUNDS = 3  # at least: on a busy machine a round takes seconds
GROWTH_BYTES = CPU_BYTES + 16 * MiB  # after the warm-up: rows not used before, and what the allocator keeps
NEW_TOPIC_ROUNDS = 12
TOPICS = 6  # talked about at a time
MOST_TOKENS = 70
WINDOW = 3 * BLOCK  # of the model that has sliding windows
TIMES = (0.0, 0.1)
ABORTS = ("waiting", "loading", "prefilling", "decoding", *TIMES)


class Talk:
    """Prompts that share beginnings, with topics that come and go."""

    def __init__(self, chooser: random.Random) -> None:
        self._chooser = chooser

    def ask(self, turn: int, phases: bool) -> Ask:
        """phases: whether some are given up in a certain phase, for which the engine's core must be at hand."""
        choose = self._chooser
        topic = turn // NEW_TOPIC_ROUNDS + choose.randrange(TOPICS)
        leaf = choose.randrange(4)
        tokens = prompt(1000 + topic, 300)[: 100 + 50 * leaf] + prompt(5000 + 10 * topic + leaf, 60 + 70 * leaf)
        abort = choose.choice(ABORTS if phases else TIMES) if choose.random() < 0.3 else None
        return Ask(tokens, choose.choice((1, 40, MOST_TOKENS)), at=choose.randrange(4), abort=abort)


def answers_of(
    engine: Engine, known: dict[tuple[int, ...], list[int]], *prompts: list[int], max_tokens: int
) -> list[list[int]]:
    """The tokens of an engine without any cache, of which those in `known` are not computed again."""
    for each in prompts:
        if tuple(each) not in known:
            known[tuple(each)] = engine.generate(each, max_tokens=max_tokens)[0].token_ids
    return [known[tuple(each)] for each in prompts]


def harm(server: Server, link: SlowLink, choose: random.Random) -> None:
    """Something that happens to stores, for a moment."""

    def kill() -> None:
        server.kill()
        time.sleep(choose.uniform(0, 0.5))
        server.restart()

    def freeze() -> None:
        with server.stopped():
            time.sleep(choose.uniform(0.1, 1.5))

    def cut_off() -> None:
        link.hold(choose.choice((0, 3 * BLOCK_BYTES)))
        time.sleep(choose.uniform(0.1, 1.5))
        link.release()

    def slow_down() -> None:
        link.bytes_per_s = 5e6
        time.sleep(choose.uniform(0.5, 1.5))
        link.bytes_per_s = None

    harms: list[Callable[[], None]] = [kill, freeze, cut_off, slow_down]
    time.sleep(choose.uniform(0, 0.3))
    choose.choice(harms)()


ALONE: dict[str, Any] = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 26, "max_model_len": 640}


def start_engines(kind: str, link: SlowLink, start_engine: StartEngine, windowed: Path) -> list[Engine]:
    """plain: one engine. windows: one whose model has sliding windows. sizes: two of one and two ranks on one store."""
    options = {"cpu_bytes": CPU_BYTES, "timeout_s": 1, "lookup_timeout_s": 0.5}
    # What torch prepares for every shape of a step and keeps is more than all else that grows.
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
    if kind == "windows":
        shape = {**ALONE, "num_gpu_blocks_override": 52, "model": windowed}  # of half the size
        return [start_engine(link.endpoint, options=options, environment=environment, **shape)]
    if kind == "plain":
        return [start_engine(link.endpoint, options=options, environment=environment, **ALONE)]
    options["head_shards"] = 2
    ranks = {"fork": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    separate = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return [
        start_engine(link.endpoint, options=options, environment=environment, **ALONE),
        start_engine(link.endpoint, options=options, environment=separate, **ALONE, **ranks),
    ]


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 400)
@pytest.mark.parametrize("kind", ["plain", "windows", "sizes"] if "KVSTORE_SOAK_S" in os.environ else ["plain"])
def test_busy_engines_with_a_failing_store_stay_right_and_small(
    start_server: StartServer, start_engine: StartEngine, expected: Expected, tmp_path: Path, kind: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    server = start_server(memory=f"{SERVER_BYTES}")
    talk = Talk(choose)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(SlowLink(server.port))
        windowed = tmp_path / "windowed"
        if kind == "windows":
            plain = Engine(
                save_windowed_model(windowed, WINDOW),
                tmp_path / "plain.log",
                connector=None,
                enable_prefix_caching=False,
            )
            stack.callback(plain.stop)
            expected = functools.partial(answers_of, plain, {})
        engines = start_engines(kind, link, start_engine, windowed)
        turn = requests = preemptions = aborted = 0
        warm_bytes = server_bytes = 0
        busy_s = 0.0
        while busy_s < SOAK_S or turn < 2 * WARM_UP_ROUNDS or (busy_s < 3 * SOAK_S and not (preemptions and aborted)):
            asked = [[talk.ask(turn, engine is engines[0]) for _ in range(10 // len(engines))] for engine in engines]
            started = time.monotonic()
            for engine, asks in zip(engines, asked, strict=True):
                engine.order_play(*asks)
            if choose.random() < 0.7:
                harm(server, link, choose)
            answers = [engine.result() for engine in engines]
            busy_s += time.monotonic() - started
            for ask, answer in zip(itertools.chain(*asked), itertools.chain(*answers), strict=True):
                if not answer.aborted:
                    [tokens] = expected(ask.prompt, max_tokens=MOST_TOKENS)
                    assert answer.token_ids == tokens[: ask.max_tokens]
                preemptions += answer.preemptions
                aborted += answer.aborted
                requests += 1
            turn += 1
            server_bytes = max([server_bytes, *(rss_bytes(shard.pid) for shard in server.shards())])
            engine_bytes = sum(engine.rss_bytes for engine in engines)
            if busy_s < WARM_UP_S or turn <= WARM_UP_ROUNDS:
                warm_bytes = engine_bytes
            print(f"{busy_s:6.1f} s: engines {engine_bytes >> 20} MiB, server {server_bytes >> 20} MiB")
            assert engine_bytes <= warm_bytes + len(engines) * GROWTH_BYTES
            assert server_bytes <= SERVER_BYTES + OVERHEAD_BYTES
        until_it_hits(engines[0], prompt(1, 300))
        engines[0].settle()
        for engine in engines:
            engine.generate([0], max_tokens=1)  # tells what has happened since the last step
            numbers = engine.metrics()
            print(requests, preemptions, aborted, numbers)
            assert numbers["defects"] == 0
            assert min(numbers["hit_tokens/cpu"], numbers["hit_tokens/store"], preemptions, aborted) > 0
        wait_until(lambda: not sum(each.pinned for each in namespaces(server)), 20, "pins expire")
        assert sum(each.writing for each in namespaces(server)) == 0
