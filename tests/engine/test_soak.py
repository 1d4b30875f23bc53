"""A busy engine and a store that keeps failing, as long as one lets them: right tokens, bounded memory, nothing left.

The engine has too little of everything: cache, CPU tier and store all evict, requests are preempted and given up, and
most rounds the store is killed, frozen, slowed or cut off for a while.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK_BYTES, Expected, StartEngine, namespaces, prompt, until_it_hits
from tests.support.harness import OVERHEAD_BYTES, Server, StartServer, rss_bytes, wait_until
from tests.support.slow_link import SlowLink

MiB = 1 << 20
SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "20"))
SERVER_BYTES = 32 * MiB
CPU_BYTES = 16 * MiB
WARM_UP_S = max(8.0, SOAK_S / 4)
WARM_UP_ROUNDS = 3  # at least: on a busy machine a round takes seconds
GROWTH_BYTES = CPU_BYTES + 16 * MiB  # after the warm-up: rows not used before, and what the allocator keeps
NEW_TOPIC_ROUNDS = 12
TOPICS = 6  # talked about at a time
MOST_TOKENS = 70
ABORTS = ("waiting", "loading", "prefilling", "decoding", 0.0, 0.1)


class Talk:
    """Prompts that share beginnings, with topics that come and go."""

    def __init__(self, chooser: random.Random) -> None:
        self._chooser = chooser

    def ask(self, turn: int) -> Ask:
        choose = self._chooser
        topic = turn // NEW_TOPIC_ROUNDS + choose.randrange(TOPICS)
        leaf = choose.randrange(4)
        tokens = prompt(1000 + topic, 300)[: 100 + 50 * leaf] + prompt(5000 + 10 * topic + leaf, 60 + 70 * leaf)
        abort = choose.choice(ABORTS) if choose.random() < 0.3 else None
        return Ask(tokens, choose.choice((1, 40, MOST_TOKENS)), at=choose.randrange(4), abort=abort)


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


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 300)
def test_a_busy_engine_with_a_failing_store_stays_right_and_small(
    start_server: StartServer, start_engine: StartEngine, expected: Expected
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    server = start_server(memory=f"{SERVER_BYTES}")
    talk = Talk(choose)
    with SlowLink(server.port) as link:
        engine = start_engine(
            link.endpoint,
            options={"cpu_bytes": CPU_BYTES, "timeout_s": 1, "lookup_timeout_s": 0.5},
            max_num_batched_tokens=160,
            num_gpu_blocks_override=26,
            max_model_len=640,
            # What torch prepares for every shape of a step and keeps is more than all else that grows.
            environment={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"},
        )
        turn = requests = preemptions = aborted = 0
        warm_bytes = server_bytes = 0
        busy_s = 0.0
        while busy_s < SOAK_S or turn < 2 * WARM_UP_ROUNDS or (busy_s < 3 * SOAK_S and not (preemptions and aborted)):
            asks = [talk.ask(turn) for _ in range(10)]
            started = time.monotonic()
            engine.order_play(*asks)
            if choose.random() < 0.7:
                harm(server, link, choose)
            answers = engine.result()
            busy_s += time.monotonic() - started
            for ask, answer in zip(asks, answers, strict=True):
                if not answer.aborted:
                    [tokens] = expected(ask.prompt, max_tokens=MOST_TOKENS)
                    assert answer.token_ids == tokens[: ask.max_tokens]
            turn, requests = turn + 1, requests + len(asks)
            preemptions += sum(answer.preemptions for answer in answers)
            aborted += sum(answer.aborted for answer in answers)
            server_bytes = max([server_bytes, *(rss_bytes(shard.pid) for shard in server.shards())])
            engine_bytes = engine.rss_bytes
            if busy_s < WARM_UP_S or turn <= WARM_UP_ROUNDS:
                warm_bytes = engine_bytes
            print(f"{busy_s:6.1f} s: engine {engine_bytes >> 20} MiB, server {server_bytes >> 20} MiB")
            assert engine_bytes <= warm_bytes + GROWTH_BYTES
            assert server_bytes <= SERVER_BYTES + OVERHEAD_BYTES
        until_it_hits(engine, prompt(1, 300))
        engine.settle()
        numbers = engine.metrics()
        print(requests, preemptions, aborted, numbers)
        assert numbers["defects"] == 0
        assert min(numbers["hit_tokens/cpu"], numbers["hit_tokens/store"], preemptions, aborted) > 0
        wait_until(lambda: not sum(each.pinned for each in namespaces(server)), 20, "pins expire")
        assert sum(each.writing for each in namespaces(server)) == 0
