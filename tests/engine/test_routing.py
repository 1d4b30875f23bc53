"""What `Routes` says of engines whose events it hears, through vLLM's own publisher."""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore_client import KVStoreClient
from kvstore_client.engine.routing import Routes
from tests.support.harness import MakeNamespace, Server, blocks_of, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventPublisherFactory,
        KVCacheEvent,
        KVEventBatch,
    )

SIZE = 4
BLOCK_BYTES = 1000
_names = itertools.count()


def hashes_of(tokens: list[int]) -> list[bytes]:
    """Of the whole blocks of these tokens: each names all before it."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in ends]


def stored(tokens: list[int], medium: str = "GPU", first: int = 0, salt: str = "") -> BlockStored:
    hashes = [each + salt.encode() for each in hashes_of(tokens)]
    return BlockStored(
        block_hashes=hashes[first:],
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=tokens[first * SIZE : len(hashes) * SIZE],
        block_size=SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[(salt,)] * (len(hashes) - first) if salt else None,
    )


class Engine:
    """An engine's publisher."""

    def __init__(self, folder: Path, buffer_steps: int = 1000) -> None:
        name = f"e{next(_names)}"
        self.live, self.replay = f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"
        self._config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self.live,
            replay_endpoint=self.replay,
            buffer_steps=buffer_steps,
        )
        self.start()

    def start(self) -> None:
        self._publisher: Any = EventPublisherFactory.create(self._config)

    def say(self, *events: KVCacheEvent) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    @property
    def newest(self) -> int:
        """The number of the newest batch that is kept; -1: none is."""
        buffer = self._publisher._buffer
        return int(buffer[-1][0]) if buffer else -1

    def stop(self) -> None:
        self._publisher.shutdown()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    engines = [Engine(tmp_path), Engine(tmp_path)]
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def routes(engines: list[Engine]) -> Iterator[Routes]:
    with Routes() as routes:
        for name, engine in zip("ab", engines, strict=True):
            routes.add(name, engine.live, engine.replay)
        yield routes


PROMPT = list(range(20))


def until(routes: Routes, expected: dict[str, dict[str, int]], prompt: list[int] = PROMPT) -> None:
    wait_until(lambda: routes.find(prompt).engines == expected, 10, f"{expected}, not {routes.find(prompt)}")


def test_the_engine_with_the_longest_run_in_its_own_tiers_is_the_best(engines: list[Engine], routes: Routes) -> None:
    a, b = engines
    a.say(stored(PROMPT[:8]))
    b.say(stored(PROMPT[:4]), stored(PROMPT[:16], "CPU", first=1), stored(PROMPT, "STORAGE"))
    until(routes, {"a": {"GPU": 8, "any": 8}, "b": {"GPU": 4, "CPU": 0, "STORAGE": 20, "any": 16}})
    found = routes.find([*PROMPT, 99])
    assert (found.tokens, found.best(), found.store) == (20, "b", None)
    assert routes.find([7, *PROMPT]).best() is None and routes.find([]).tokens == 0
    assert routes.find(PROMPT[:9]).engines["b"]["any"] == 8, "whole blocks only"


def test_what_is_removed_or_cleared_is_not_there(engines: list[Engine], routes: Routes) -> None:
    a, b = engines
    a.say(stored(PROMPT), stored(PROMPT, "CPU"))
    b.say(stored(PROMPT[:8]))
    until(routes, {"a": {"GPU": 20, "CPU": 20, "any": 20}, "b": {"GPU": 8, "any": 8}})
    a.say(BlockRemoved(block_hashes=hashes_of(PROMPT)[1:2], medium="CPU"))
    a.say(AllBlocksCleared())
    until(routes, {"a": {"GPU": 0, "CPU": 4, "any": 4}, "b": {"GPU": 8, "any": 8}})
    routes.remove("b")
    until(routes, {"a": {"GPU": 0, "CPU": 4, "any": 4}})
    a.say(BlockRemoved(block_hashes=[*hashes_of(PROMPT), b"never seen"], medium="CPU"))
    wait_until(lambda: routes.index.blocks == 0)


def test_a_salted_prompt_is_another_prompt(engines: list[Engine], routes: Routes) -> None:
    engines[0].say(stored(PROMPT, salt="tenant"))
    wait_until(lambda: routes.index.blocks == 5)
    assert routes.find(PROMPT).tokens == 0


def test_who_listens_late_hears_what_was_said_before(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.say(stored(PROMPT[:8]))
    engine.say(stored(PROMPT, first=2))
    wait_until(lambda: engine.newest == 1)  # it is published, and nobody hears it
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        until(routes, {"a": {"GPU": 20, "any": 20}})
        with pytest.raises(ValueError, match="added before"):
            routes.add("a", engine.live)
    engine.stop()


def test_what_nobody_has_any_more_makes_the_rest_uncertain_so_it_is_forgotten(tmp_path: Path) -> None:
    engine = Engine(tmp_path, buffer_steps=2)
    for step in range(6):  # of which the engine keeps two
        engine.say(stored([step] * 8))
    wait_until(lambda: engine.newest == 5)
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        wait_until(lambda: routes.find([5] * 8).tokens == 8, 10)
        assert routes.find([4] * 8).tokens == 8 and routes.find([3] * 8).tokens == 0
    engine.stop()


def test_an_engine_that_was_restarted_has_nothing_of_before(engines: list[Engine], routes: Routes) -> None:
    engine = engines[0]
    for _ in range(3):
        engine.say(stored(PROMPT))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    engine.stop()
    engine.start()
    other = [50 + token for token in PROMPT]

    def is_heard() -> bool:
        engine.say(stored(other))  # said again until the connection is there anew
        return routes.find(other).tokens == 20

    wait_until(is_heard, 20, "the new process is heard")
    assert routes.find(PROMPT).tokens == 0


def in_group(event: Any, group: int, **described: Any) -> Any:
    return msgspec.structs.replace(event, group_idx=group, **described)


def test_of_a_model_with_sliding_windows_the_groups_that_keep_all_tokens_count(
    engines: list[Engine], routes: Routes
) -> None:
    engine, hashes = engines[0], hashes_of(PROMPT)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * SIZE}
    engine.say(*(in_group(stored(PROMPT), group, kv_cache_spec_kind="full_attention") for group in (0, 1)))
    engine.say(in_group(stored(PROMPT), 2, **window))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    engine.say(in_group(BlockRemoved(hashes[:4], "GPU"), 2))  # the window has moved on
    engine.say(in_group(BlockRemoved(hashes[3:], "GPU"), 1))
    until(routes, {"a": {"GPU": 12, "any": 12}})


def test_the_store_is_asked_for_what_it_has_now(
    engines: list[Engine], server: Server, new_namespace: MakeNamespace
) -> None:
    def tokenize(text: str) -> list[int]:
        return PROMPT if text == "a text" else []

    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client, Routes([client], tokenize) as routes:
        routes.add("a", engines[0].live, engines[0].replay)
        keys = hashes_of(PROMPT)
        client.set(keys, blocks_of(keys, BLOCK_BYTES))
        engines[0].say(stored(PROMPT, "STORAGE"))
        wait_until(lambda: routes.find(PROMPT).store == 20)
        client.delete(keys[2:])
        assert routes.find(PROMPT).store == 8, "the events do not say so"
        assert routes.find("a text").store == 8
    with Routes() as routes, pytest.raises(ValueError, match="expected token ids, or Routes"):
        routes.find("text")
