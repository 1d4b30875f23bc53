"""A store that dies, freezes, fills up, lies or slows down costs its engine only hits.

Every request is answered with the right tokens, and none takes longer than computing it plus the deadlines. The
engine's metrics show what happened. When the store is back, the engine has hits again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.engine.driver import Answer, Ask
from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Engine,
    Expected,
    Ledger,
    StartEngine,
    full_blocks,
    namespaces,
    prompt,
    stored_blocks,
    until_it_hits,
)
from tests.support.harness import RawClient, Server, StartServer, block_of, set_frames, wait_until
from tests.support.slow_link import SlowLink

MiB = 1 << 20
LOOKUP_TIMEOUT_S = 0.5
TIMEOUT_S = 1.5
SLACK_S = 4.0  # what a busy machine may add
BLOCKS = 500 // BLOCK  # in a prompt
LONG = 1500  # tokens; the KV of these does not fit into the sockets' buffers


class Place(NamedTuple):
    """An engine without a cache of its own, and a store. A test may damage the store if it repairs it."""

    engine: Engine
    server: Server
    link: SlowLink
    compute_s: float  # the time to compute a long prompt


@pytest.fixture(scope="module")
def shared_place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("faults")
    server = Server(folder / "server.log", "--memory", "256MiB", "--segment", "4MiB")
    with SlowLink(server.port) as link:
        options = {
            "endpoint": link.endpoint,
            "timeout_s": TIMEOUT_S,
            "lookup_timeout_s": LOOKUP_TIMEOUT_S,
            "always_load": True,  # a small model could compute faster than it loads
        }
        engine = Engine(model, folder / "engine.log", connector=options, enable_prefix_caching=False)
        engine.generate(prompt(1))  # the first request takes longer
        compute_s = max(engine.generate(prompt(seed, LONG))[0].seconds for seed in (2, 3))
        yield Place(engine, server, link, compute_s)
        engine.stop()
    server.kill()


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """An engine that uses the store. After the test, the fixture checks that the engine is idle and has counted no
    defect."""
    until_it_hits(shared_place.engine, prompt(1))
    yield shared_place
    if not shared_place.server.running:
        shared_place.server.restart()
    shared_place.link.release()
    shared_place.engine.settle()
    assert shared_place.engine.metrics()["defects"] == 0


def check(expected: Expected, prompts: list[list[int]], answers: list[Answer]) -> None:
    assert [answer.token_ids for answer in answers] == expected(*prompts)


def check_time(place: Place, answers: list[Answer], requests: int = 1) -> None:
    """Check that no request took longer than computing all of them at half the earlier speed, plus a lookup and a
    load."""
    longest_s = 2 * requests * place.compute_s + LOOKUP_TIMEOUT_S + TIMEOUT_S + SLACK_S
    assert max(answer.seconds for answer in answers) < longest_s


def load_until(place: Place, passing_bytes: int, questions: list[list[int]]) -> None:
    """Send requests, and stop the link while their blocks are in transit, after this many bytes."""
    place.link.hold(passing_bytes)
    place.engine.order(*questions)
    wait_until(lambda: place.link.held, what="the load is under way")


def test_a_server_killed_during_a_load_costs_only_hits(place: Place, expected: Expected) -> None:
    questions = [prompt(10, LONG), prompt(11, LONG)]
    check(expected, questions, place.engine.generate(*questions))
    ledger = Ledger(place.engine)
    load_until(place, 5 * BLOCK_BYTES, questions)
    place.server.kill()
    place.link.release()
    answers = place.engine.result()
    check(expected, questions, answers)
    check_time(place, answers, 2)
    assert 0 < ledger["failed_loads"] <= 2
    assert ledger["missed_blocks"] > 0
    assert ledger["failed_calls"] > 0
    assert ledger["checksum_errors"] == 0
    # The server stays dead: no request waits for it.
    for question in (questions[0], prompt(12, LONG)):
        answers = place.engine.generate(question)
        check(expected, [question], answers)
        assert answers[0].seconds < place.compute_s + SLACK_S
    assert ledger["failed_loads"] <= 2
    # The server returns empty, and the engine fills and uses it again.
    place.server.restart()
    until_it_hits(place.engine, questions[0])
    check(expected, questions, place.engine.generate(*questions))


def test_an_engine_reports_what_it_is_doing(place: Place) -> None:
    """A test that waits too long prints this report."""
    place.engine.order(prompt(15, LONG), prompt(16, LONG), max_tokens=140)
    told = place.engine.witness()
    place.engine.result()
    for what in (" requests", f"prompt {LONG}", "records: {", "in generate", "test_faults.py"):
        assert what in told, told


def test_a_server_frozen_during_a_load_costs_only_hits(place: Place, expected: Expected) -> None:
    questions = [prompt(20, LONG), prompt(21, LONG)]
    check(expected, questions, place.engine.generate(*questions))
    ledger = Ledger(place.engine)
    load_until(place, 5 * BLOCK_BYTES, questions)
    with place.server.stopped():
        place.link.release()
        answers = place.engine.result()
        check(expected, questions, answers)
        check_time(place, answers, 2)
        # The server is still frozen; now it is frozen before the requests begin.
        answers = place.engine.generate(*questions)
        check(expected, questions, answers)
        check_time(place, answers, 2)
    assert 0 < ledger["failed_loads"] <= 2
    assert ledger["missed_blocks"] > 0
    until_it_hits(place.engine, questions[0])
    check(expected, questions, place.engine.generate(*questions))


def test_a_server_frozen_before_the_lookup_costs_only_hits(place: Place, expected: Expected) -> None:
    questions = [prompt(25), prompt(26)]
    check(expected, questions, place.engine.generate(*questions))
    ledger = Ledger(place.engine)
    with place.server.stopped():
        answers = place.engine.generate(*questions)
        check(expected, questions, answers)
        check_time(place, answers, 2)
        # The requests did not wait for the longest time that lookups may take.
        wait_until(lambda: ledger["failed_calls"] > 0, what="a lookup has failed")
    assert ledger["failed_loads"] == 0
    until_it_hits(place.engine, questions[0])


def test_a_server_restarted_empty_before_the_load_costs_only_hits(place: Place, expected: Expected) -> None:
    """The engine uses the answer to a lookup for a moment, even if the store has lost the blocks since."""
    question = prompt(30)
    check(expected, [question], place.engine.generate(question))
    until_it_hits(place.engine, question)
    ledger = Ledger(place.engine)
    place.server.kill()
    place.server.restart()
    answers = place.engine.generate(question)
    check(expected, [question], answers)
    check_time(place, answers)
    until_it_hits(place.engine, question)
    check(expected, [question], place.engine.generate(question))
    assert ledger["transfer_blocks/out"] >= BLOCKS


def spoil(server: Server, keys: list[bytes], number: int) -> None:
    """Replace block ``number`` in the store by other bytes, with a checksum that does not match them."""
    [described] = [each for each in namespaces(server) if each.blocks]
    namespace = msgspec.json.decode(described.namespace, type=Namespace)
    key = keys[number]
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.delete([key]) == 1
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        wrong = block_of(key, namespace.block_bytes)
        raw.send(*set_frames(1, [key], [wrong], sums=bytes(8)))
        raw.reply()


def test_a_corrupted_block_is_computed_and_replaced(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    """The engine always loads what the store has, however busy the machine is, so the counts do not depend on time."""
    engine = start_engine(server.endpoint, enable_prefix_caching=False)
    for number in (0, 6, BLOCKS - 1):
        question = prompt(40 + number)
        [played] = engine.play(Ask(question))
        engine.settle()
        spoil(server, played.keys, number)
        ledger = Ledger(engine)
        check(expected, [question], engine.generate(question))
        assert (ledger["checksum_errors"], ledger["failed_loads"]) == (1, 1)
        assert ledger["swap_blocks/in"] == number, "what came before it was used"
        assert ledger["transfer_blocks/out"] == 1, "the store has it again"
        answers = engine.generate(question)
        check(expected, [question], answers)
        assert answers[0].cached_tokens == full_blocks(500)
        assert (ledger["checksum_errors"], ledger["failed_loads"]) == (1, 1)


def test_a_slow_store_loses_blocks_but_delays_no_request(
    server: Server, link: SlowLink, start_engine: StartEngine, expected: Expected
) -> None:
    engine = start_engine(
        link.endpoint,
        options={"staging_bytes": 16 * BLOCK_BYTES, "timeout_s": 20, "lookup_timeout_s": LOOKUP_TIMEOUT_S},
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
    )

    def ask(first: int) -> float:
        """Return the seconds that the fastest prompt took. If the store slowed the engine down, it would slow down all
        prompts."""
        seconds = []
        for seed in range(first, first + 4):
            started = time.monotonic()
            answers = engine.generate(prompt(seed))
            seconds.append(time.monotonic() - started)
            check(expected, [prompt(seed)], answers)
        return min(seconds)

    ask(100)
    fast_s = ask(110)
    engine.settle()
    ledger = Ledger(engine)
    link.bytes_per_s = 1e6
    assert ask(120) < 1.5 * fast_s + SLACK_S / 6
    numbers = engine.metrics()
    assert numbers["dropped_blocks"] > 0
    assert numbers["waiting_blocks"] <= 16
    link.bytes_per_s = None
    sent = sum(ledger[name] for name in ("transfer_blocks/out", "present_blocks", "dropped_blocks", "unsaved_blocks"))
    assert sent == 4 * BLOCKS, "each is sent or counted"


def test_a_store_too_small_for_its_engines_costs_only_hits(
    start_server: StartServer, start_engine: StartEngine, expected: Expected
) -> None:
    server = start_server(memory="8MiB")
    room = 8 * MiB // BLOCK_BYTES
    engines = [
        start_engine(server.endpoint, options={"cpu_bytes": cpu_bytes}, enable_prefix_caching=False)
        for cpu_bytes in (0, 16 * BLOCK_BYTES)
    ]
    prompts = [prompt(seed) for seed in range(130, 136)]
    for _ in range(2):
        for engine in engines:
            check(expected, prompts, engine.generate(*prompts))
            for each in prompts:
                check(expected, [each], engine.generate(each))
    assert room // 2 < stored_blocks(server) <= room
    assert sum(each.evicted for each in namespaces(server)) > room
    for engine in engines:
        until_it_hits(engine, prompts[0])
        assert engine.metrics()["defects"] == 0


def test_the_cpu_tier_keeps_nothing_of_a_failed_load(
    place: Place, start_engine: StartEngine, expected: Expected
) -> None:
    questions = [prompt(seed, LONG) for seed in (140, 141)]
    [played, _] = place.engine.play(*[Ask(question) for question in questions])
    for question in questions:
        until_it_hits(place.engine, question)
    engine = start_engine(
        place.link.endpoint,
        options={"cpu_bytes": "64MiB", "timeout_s": 20, "lookup_timeout_s": LOOKUP_TIMEOUT_S},
        enable_prefix_caching=False,
    )
    ledger = Ledger(engine)
    spoil(place.server, played.keys, 40)
    check(expected, questions[:1], engine.generate(questions[0]))
    assert (ledger["checksum_errors"], ledger["failed_loads"], ledger["swap_blocks/in"]) == (1, 1, 40)
    place.link.hold(5 * BLOCK_BYTES)
    engine.order(questions[1])
    wait_until(lambda: place.link.held, what="the load is under way")
    place.server.kill()
    place.link.release()
    check(expected, questions[1:], engine.result())
    assert ledger["failed_loads"] == 2
    # The CPU tier now has all blocks that arrived or were computed, and no others.
    before = ledger["swap_blocks/in"]
    for _ in range(2):
        for question in questions:
            check(expected, [question], engine.generate(question))
    assert ledger["hit_tokens/cpu"] == 4 * full_blocks(LONG)
    assert ledger["swap_blocks/in"] - before == 4 * (LONG // BLOCK)
    assert (ledger["failed_loads"], ledger["defects"]) == (2, 0)
