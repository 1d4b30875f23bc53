"""What `Routes` concludes from the events of engines, which vLLM's own publisher sends."""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore_client import KVStoreClient
from kvstore_client.engine.block_index import PromptExtras
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
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

SIZE = 4
BLOCK_BYTES = 1000
_names = itertools.count()


def hashes_of(tokens: list[int]) -> list[bytes]:
    """Return the hashes of the whole blocks of these tokens. Each hash covers all tokens up to its block's end."""
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
    """An engine's publisher of events."""

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
        """The number of the newest batch that the publisher keeps; -1 without any."""
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
    wait_until(lambda: routes.find(prompt).engines == expected, what=f"{expected}, not {routes.find(prompt)}")


def test_the_engine_with_the_longest_run_in_its_tiers_is_best(engines: list[Engine], routes: Routes) -> None:
    a, b = engines
    a.say(stored(PROMPT[:8]))
    b.say(stored(PROMPT[:4]), stored(PROMPT[:16], "CPU", first=1), stored(PROMPT, "STORAGE"))
    until(routes, {"a": {"GPU": 8, "any": 8}, "b": {"GPU": 4, "CPU": 0, "any": 16}})
    found = routes.find([*PROMPT, 99])
    assert (found.tokens, found.best(), found.store) == (16, "b", None)
    assert routes.find([7, *PROMPT]).best() is None and routes.find([]).tokens == 0
    assert routes.find(PROMPT[:9]).engines["b"]["any"] == 8, "whole blocks only"


def test_removed_or_cleared_blocks_are_not_found(engines: list[Engine], routes: Routes) -> None:
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


def test_another_salt_adapter_or_picture_makes_another_prompt(engines: list[Engine], routes: Routes) -> None:
    """vLLM publishes a salt with the first block only, an adapter with all blocks, and a picture with the blocks that
    contain it."""
    salted = stored(PROMPT, salt="tenant")
    adapted = msgspec.structs.replace(stored(PROMPT, salt="adapter"), lora_name="adapter")
    pictured = stored(PROMPT, salt="picture")
    salted.extra_keys = [("tenant",), *[None] * 4]
    pictured.extra_keys = [None, (("picture", 1),), (("picture", -3),), None, None]
    ways: dict[str, dict[str, Any]] = {
        "salt": {"cache_salt": "tenant"},
        "adapter": {"lora_name": "adapter"},
        "picture": {"media": [("picture", 5, 5)]},
    }
    others: list[dict[str, Any]] = [
        {"cache_salt": "adapter"},
        {"lora_name": "tenant"},
        {"lora_name": "adapter", "cache_salt": "tenant"},
    ]
    for told, event in zip(ways, (salted, adapted, pictured), strict=True):
        engines[0].say(event)
        wait_until(lambda told=told: routes.find(PROMPT, **ways[told]).tokens == 20)
        assert [routes.find(PROMPT, **each).tokens for each in others] == [0, 0, 0]
        assert routes.find(PROMPT).tokens in (0, 4), "before the picture all are alike"
    assert routes.find(PROMPT, media=[("picture", 6, 5)]).tokens == 4
    assert routes.find(PROMPT, media=[("another", 5, 5)]).tokens == 4
    engines[1].say(stored(PROMPT[:8]))
    wait_until(lambda: routes.find(PROMPT).tokens == 8)
    assert [routes.find(PROMPT, **each).engines["b"]["GPU"] for each in (*ways.values(), *others)] == [0, 0, 4, 0, 0, 0]


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("lora_name", ["", "adapter"])
@pytest.mark.parametrize(
    "media", [[], [("one", 3, 2)], [("one", 0, 9), ("two", 9, 3)], [("one", 4, 4), ("one", 11, 9)]]
)
def test_blocks_are_identified_beyond_tokens_as_in_vllm(
    salt: str, lora_name: str, media: list[tuple[str, int, int]]
) -> None:
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=first, length=size))
        for name, first, size in media
    ]
    adapter = SimpleNamespace(lora_name=lora_name, lora_path="/adapter") if lora_name else None
    request: Any = SimpleNamespace(
        mm_features=features, lora_request=adapter, cache_salt=salt or None, prompt_embeds=None
    )
    keys, at = PromptExtras(lora_name, salt, media), 0
    for start in range(0, 24, SIZE):
        extra, at = generate_block_hash_extra_keys(request, start, start + SIZE, at)
        told = to_event_extra_keys([extra])
        assert told is not None and (told[0] or ()) == keys.of_block(start, SIZE)


def test_engines_of_another_model_are_not_considered(engines: list[Engine]) -> None:
    a, b = engines
    with Routes() as routes:
        routes.add("a", a.live, a.replay, model="one")
        routes.add("b", b.live, b.replay, model="two")
        a.say(stored(PROMPT[:8]))
        b.say(stored(PROMPT))
        until(routes, {"a": {"GPU": 8, "any": 8}, "b": {"GPU": 20, "any": 20}})
        found = routes.find(PROMPT, model="one")
        assert (found.tokens, found.engines, found.best()) == (8, {"a": {"GPU": 8, "any": 8}}, "a")
        assert routes.find(PROMPT, model="three").engines == {}


def test_store_blocks_take_no_room_unless_the_store_is_queried(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        for first in range(0, 300_000, 1000):
            hashes = [number.to_bytes(32, "big") for number in range(first, first + 1000)]
            event = stored(PROMPT[:SIZE], "STORAGE")
            tokens = [token for number in range(first, first + 1000) for token in (number, 0, 0, 0)]
            engine.say(msgspec.structs.replace(event, block_hashes=hashes, token_ids=tokens))
        engine.say(stored(PROMPT))
        until(routes, {"a": {"GPU": 20, "any": 20}})
        assert routes.index.blocks == 5
    engine.stop()


def test_a_late_listener_receives_earlier_events(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.say(stored(PROMPT[:8]))
    engine.say(stored(PROMPT, first=2))
    wait_until(lambda: engine.newest == 1)  # everything is published before a listener exists
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        until(routes, {"a": {"GPU": 20, "any": 20}})
        with pytest.raises(ValueError, match="added before"):
            routes.add("a", engine.live)
    engine.stop()


def test_events_that_are_lost_for_good_make_older_ones_forgotten(tmp_path: Path) -> None:
    engine = Engine(tmp_path, buffer_steps=2)
    for step in range(6):  # the engine keeps the last two
        engine.say(stored([step] * 8))
    wait_until(lambda: engine.newest == 5)
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        wait_until(lambda: routes.find([5] * 8).tokens == 8)
        assert routes.find([4] * 8).tokens == 8 and routes.find([3] * 8).tokens == 0
    engine.stop()


def test_a_restarted_engine_has_nothing_from_before(engines: list[Engine], routes: Routes) -> None:
    engine = engines[0]
    for _ in range(3):
        engine.say(stored(PROMPT))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    engine.stop()
    engine.start()
    other = [50 + token for token in PROMPT]

    def is_heard() -> bool:
        engine.say(stored(other))  # repeated until the new connection exists
        return routes.find(other).tokens == 20

    wait_until(is_heard, what="the new process is heard")
    assert routes.find(PROMPT).tokens == 0


def test_an_unobserved_restart_also_empties_an_engine(engines: list[Engine], routes: Routes) -> None:
    """The restart is noticed even if the new process has published more batches than the old one, because their first
    events differ."""
    engine, other = engines[0], [50 + token for token in PROMPT]
    engine.say(stored(PROMPT))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    live = routes._engines["a"].live
    with routes._lock:  # the listener cannot run meanwhile
        live.unsubscribe(b"")
        engine.stop()
        engine.start()
        for _ in range(5):
            engine.say(stored(other))
        wait_until(lambda: engine.newest == 4)
        live.subscribe(b"")

    def is_heard() -> bool:
        engine.say(stored(other))
        return routes.find(other).tokens == 20

    wait_until(is_heard, what="the new process is heard")
    assert routes.find(PROMPT).tokens == 0


def test_batches_repeated_after_a_gap_are_not_mistaken_for_a_restart(tmp_path: Path) -> None:
    """The engine keeps only three batches for replays. A listener that took the gap for a restart would forget the
    earlier batches."""
    engine = Engine(tmp_path, buffer_steps=3)
    with Routes() as routes:
        routes.add("a", engine.live, engine.replay)
        engine.say(stored(PROMPT))
        until(routes, {"a": {"GPU": 20, "any": 20}})
        live = routes._engines["a"].live
        with routes._lock:  # the listener cannot run meanwhile
            engine.say(stored([7] * SIZE))
            assert live.poll(5000)
            live.recv_multipart()  # this batch is lost in transit
            for token in (8, 9):  # these arrive twice: live, and in the replay of the lost batch
                engine.say(stored([token] * SIZE))
            wait_until(lambda: engine.newest == 3)
            assert live.poll(5000)
        wait_until(lambda: routes.find([7] * SIZE).tokens == SIZE, what="it has asked")
        engine.say(stored([10] * SIZE))
        wait_until(lambda: routes.find([10] * SIZE).tokens == SIZE, what="it has heard all")
        assert routes.find(PROMPT).tokens == 20
    engine.stop()


def test_a_known_restart_can_be_reported(engines: list[Engine], routes: Routes) -> None:
    engines[0].say(stored(PROMPT))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    engines[0]._publisher._buffer.clear()  # as in a new process
    routes.restarted("a")
    wait_until(lambda: not routes.find(PROMPT).engines.get("a"), what="it has nothing")
    routes.restarted("unknown")


def in_group(event: Any, group: int, **described: Any) -> Any:
    return msgspec.structs.replace(event, group_idx=group, **described)


def test_with_sliding_windows_only_groups_that_keep_all_tokens_count(engines: list[Engine], routes: Routes) -> None:
    engine, hashes = engines[0], hashes_of(PROMPT)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * SIZE}
    engine.say(*(in_group(stored(PROMPT), group, kv_cache_spec_kind="full_attention") for group in (0, 1)))
    engine.say(in_group(stored(PROMPT), 2, **window))
    until(routes, {"a": {"GPU": 20, "any": 20}})
    engine.say(in_group(BlockRemoved(hashes[:4], "GPU"), 2))  # the window has moved past these blocks
    engine.say(in_group(BlockRemoved(hashes[3:], "GPU"), 1))
    until(routes, {"a": {"GPU": 12, "any": 12}})


def test_the_store_is_asked_for_its_current_blocks(
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
