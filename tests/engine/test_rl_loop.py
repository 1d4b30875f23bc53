"""The events of reinforcement learning, in any order: weights change, caches are reset with any flags, engines sleep,
engines and the store restart, and an operator purges. Every answer is that of the current weights.

KVSTORE_RL_LOOPS: the number of random sequences, for all kinds of engines together (``make rl-loop``: 200).
KVSTORE_RL_SEED: the seed of the first sequence. A failure names the values of both that repeat its operations.
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
STEPS: Final = 8  # operations in a sequence
SEEDS: Final = 3  # kinds of weights; 0: the initial ones
QUESTIONS: Final = [prompt(800 + number, 300) for number in range(3)]
CACHED: Final = full_blocks(300)
FILLING: Final = 1 << 20  # the size of the blocks that displace others, in bytes
MEMORY: Final = "64MiB"

KINDS: Final[dict[str, dict[str, Any]]] = {
    "store": {},
    "CPU tier": {"cpu_bytes": "64MiB"},
    "local server": {"local": "near"},
    "CPU tier and local server": {"local": "near", "cpu_bytes": "64MiB"},
}


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[list[int]]]]:
    """The answers of an engine without any cache, for each kind of weights and each question."""
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
    """Two engines with a store, and the operations on them."""

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
        self.seeds = [0, 0]  # the weights that each engine has
        self.said: list[str] = []
        self.answers = self.wrong = 0

    def play(self, random: random.Random) -> None:
        """Run one sequence."""
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

    # Operations.

    def train(self, number: int, seed: int, random: random.Random) -> None:
        """Change the weights in place, as trainers do. Then reset the engine's own cache, with any flags: otherwise
        vLLM would use it, also without a connector. Often the weights get a name, before the reset or after it. The
        same weights always get the same name; the initial ones get none."""
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
        """Reset the engine's own cache. vLLM cannot always do that at once, for example while blocks are being
        copied."""
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
        """Fill all stores with other blocks."""
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

    # Invariants.

    def ask(self, number: int, question: int) -> int:
        """Send a question. Returns the number of cached tokens."""
        [answer] = self.engines[number].generate(QUESTIONS[question])
        self.answers += 1
        if answer.token_ids != self._right[self.seeds[number]][question]:
            self.wrong += 1
            self._say(f"WRONG: engine {number}, question {question}, {answer.cached_tokens} tokens cached")
        return answer.cached_tokens

    def shares(self) -> None:
        """Check that two engines share blocks if their weights have the same name, whatever happened before."""
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
def test_every_answer_is_that_of_the_current_weights(
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
    loop.restart(0)  # a new engine with the initial weights
    for question in range(len(QUESTIONS)):
        loop.ask(0, question)
    assert not loop.wrong, f"a fresh engine after KVSTORE_RL_SEED={SEED} KVSTORE_RL_LOOPS={LOOPS}: {loop.said}"
