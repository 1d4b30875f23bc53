"""Reinforcement learning, as engines see it: weights change, caches are reset with any flags, engines sleep, they and
the store are restarted, somebody purges. Whatever the order, every answer is that of the weights that are loaded then.

KVSTORE_RL_LOOPS: how many random sequences, over all kinds of engines (``make rl-loop``: 200). KVSTORE_RL_SEED: of the
first one. A failure names both, with which the same operations come again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.engine.engines import LONGEST, Engine, StartEngine, full_blocks, prompt
from tests.support.harness import Server, StartServer, make_keys, make_namespace, wait_until

LOOPS: Final = int(os.environ.get("KVSTORE_RL_LOOPS", "4"))
SEED: Final = int(os.environ.get("KVSTORE_RL_SEED", str(random.randrange(1 << 30))))
STEPS: Final = 8  # of a sequence
SEEDS: Final = 3  # kinds of weights; 0: those that engines start with
QUESTIONS: Final = [prompt(800 + number, 300) for number in range(3)]
CACHED: Final = full_blocks(300)
FILLING: Final = 1 << 20  # bytes of a block that makes room of others
MEMORY: Final = "64MiB"

KINDS: Final[dict[str, dict[str, Any]]] = {
    "store": {},
    "CPU tier": {"cpu_bytes": "64MiB"},
    "local server": {"local": "near"},
    "CPU tier and local server": {"local": "near", "cpu_bytes": "64MiB"},
}


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[list[int]]]]:
    """By weights and question, what an engine without any cache answers."""
    log = tmp_path_factory.mktemp("alone") / "engine.log"
    engine = Engine(model, log, connector=None, enable_prefix_caching=False, max_model_len=LONGEST)
    answers = []
    for seed in range(SEEDS):
        engine.change_weights(seed)
        answers.append([engine.generate(question)[0].token_ids for question in QUESTIONS])
    engine.stop()
    assert len({str(each) for each in answers}) == SEEDS, "the weights answer differently"
    yield answers


class Loop:
    """Two engines and a store."""

    def __init__(
        self,
        server: Server,
        near: Server | None,
        start: Callable[[], Engine],
        right: list[list[list[int]]],
    ) -> None:
        self.server = server
        self._servers = [server] if near is None else [server, near]
        self._start = start
        self._right = right
        self.engines = [start(), start()]
        self.seeds = [0, 0]  # of the weights that each engine has
        self.said: list[str] = []
        self.answers = self.wrong = 0

    def play(self, random: random.Random) -> None:
        """One sequence."""
        for _ in range(STEPS):
            number = random.randrange(2)
            operations: list[Callable[[], None]] = [
                partial(self.train, number, random.randrange(SEEDS), random),
                partial(self.reset, number, random),
                partial(self.nap, number, random.choice([1, 2])),
                self.purge,
                self.evict,
            ]
            weights = [8, 6, 2, 3, 2]
            if random.random() < 0.04:
                operations, weights = [partial(self.restart, number), self.restart_store], [1, 1]
            random.choices(operations, weights)[0]()
            for engine in random.sample(range(2), random.randint(1, 2)):
                self.ask(engine, random.randrange(len(QUESTIONS)))

    # What may happen.

    def train(self, number: int, seed: int, random: random.Random) -> None:
        """Other weights in place, as trainers do it: the engine's own cache is reset, with any flags, or vLLM would use
        it, with a connector or without. Often the weights get a name, before or after. One kind of weights always
        gets the same name, and those of the start get none."""
        self._say(f"engine {number} has weights {seed}")
        self.engines[number].change_weights(seed)
        self.seeds[number] = seed
        named = seed and random.choice(["before", "after", ""])
        if named == "before":
            self.name(number)
        self.reset(number, random)
        if named == "after":
            self.name(number)

    def name(self, number: int) -> None:
        name = f"step-{self.seeds[number]}"
        self._say(f"the weights of engine {number} are called {name}")
        self.engines[number].name_weights(name)

    def reset(self, number: int, random: random.Random) -> None:
        """vLLM cannot always reset its cache, such as when blocks are being copied, and then it can a little later."""
        running, connector = random.random() < 0.5, random.random() < 0.5
        self._say(f"engine {number} is reset, running {running}, connector {connector}")
        wait_until(lambda: self.engines[number].reset(running, connector), what="vLLM can reset its cache")

    def nap(self, number: int, level: int) -> None:
        self._say(f"engine {number} sleeps at level {level}")
        self.engines[number].nap(level)

    def purge(self) -> None:
        self._say("purge")
        with KVStoreClient(self.server.endpoint, make_namespace(16, "operator"), timeout_s=20.0) as operator:
            operator.purge(all_namespaces=True)

    def evict(self) -> None:
        """Other blocks take the room, in all stores."""
        self._say("eviction")
        keys = make_keys(64)
        for server in self._servers:
            with KVStoreClient(server.endpoint, make_namespace(FILLING, "others"), timeout_s=20.0) as client:
                client.set(keys, np.zeros((len(keys), FILLING), dtype=np.uint8), force=True)

    def restart(self, number: int) -> None:
        self._say(f"engine {number} is restarted")
        self.engines[number].stop()
        self.engines[number] = self._start()
        self.seeds[number] = 0

    def restart_store(self) -> None:
        self._say("the store is restarted")
        self.server.stop()
        self.server.restart()

    # What must hold.

    def ask(self, number: int, question: int) -> int:
        """-> how many tokens were cached."""
        [answer] = self.engines[number].generate(QUESTIONS[question])
        self.answers += 1
        if answer.token_ids != self._right[self.seeds[number]][question]:
            self.wrong += 1
            self._say(f"WRONG: engine {number}, question {question}, {answer.cached_tokens} tokens cached")
        return answer.cached_tokens

    def shares(self) -> None:
        """Engines whose weights have one name share, whatever was before."""
        for number in range(2):
            self.engines[number].change_weights(1)
            self.seeds[number] = 1
            self.name(number)
            self.engines[number].reset(True, True)
        self.purge()

        def shared() -> bool:
            self.ask(0, 0)
            self.engines[0].settle()
            self.engines[1].reset(False, True)
            return self.ask(1, 0) == CACHED

        wait_until(shared, what=f"sharing goes on after {self.said}")

    def _say(self, what: str) -> None:
        self.said.append(what)


@pytest.mark.timeout(300 + 20 * LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_the_weights_that_are_loaded(
    start_server: StartServer, start_engine: StartEngine, right: list[list[list[int]]], kind: str
) -> None:
    options = dict(KINDS[kind])
    server = start_server(memory=MEMORY)
    near = start_server(memory=MEMORY) if "local" in options else None
    if near is not None:
        options["local"] = near.endpoint
    loop = Loop(server, near, lambda: start_engine(server.endpoint, options=options, enable_sleep_mode=False), right)
    began = time.monotonic()
    number = list(KINDS).index(kind)
    for sequence in range(number, LOOPS, len(KINDS)):
        loop.said.clear()
        loop.play(random.Random(SEED + sequence))
        assert not loop.wrong, f"KVSTORE_RL_SEED={SEED} KVSTORE_RL_LOOPS={sequence + 1}: {loop.said}"
        if sequence % (10 * len(KINDS)) == number:
            loop.shares()
            print(
                f"{kind}: {sequence // len(KINDS) + 1} sequences, {loop.answers} answers, 0 wrong, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    loop.restart(0)  # a fresh engine of the weights of the start
    for question in range(len(QUESTIONS)):
        loop.ask(0, question)
    assert not loop.wrong, f"a fresh engine after KVSTORE_RL_SEED={SEED} KVSTORE_RL_LOOPS={LOOPS}: {loop.said}"
