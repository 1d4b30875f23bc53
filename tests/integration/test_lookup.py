"""Prefix lookups. A question to the store is asked once, shared by requests, and bounded in time. Its answer never
counts blocks that a rank lacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.engine import lookup as lookup_module
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.lookup import PrefixLookup, PrefixLookups
from kvstore_client.engine.slices import GroupSlices, slice_keys
from tests.support.harness import (
    MakeNamespace,
    Server,
    StartServer,
    make_keys,
    namespace_info,
    put_into,
    stays,
    wait_until,
)

TIMEOUT_S = 1.0
SLACK_S = 1.0  # what a busy machine may add to a deadline
BLOCK_BYTES = 4096

StartLookups: TypeAlias = Callable[..., PrefixLookups]


class CountingGuard(StoreGuard):
    """Counts its requests to the store."""

    calls = 0

    def call(self, operation: Callable[[KVStoreClient], Any], miss: Any) -> Any:
        self.calls += 1
        return super().call(operation, miss)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def start_lookups(counters: Counters) -> Iterator[StartLookups]:
    """``start_lookups(endpoint, namespace, ...)`` makes lookups with one rank for each namespace."""
    started: list[PrefixLookups] = []

    def start(
        endpoint: str, *namespaces: Namespace, timeout_s: float = TIMEOUT_S, groups: GroupSlices | None = None
    ) -> PrefixLookups:
        guards = [CountingGuard(endpoint, one, timeout_s=timeout_s, counters=counters) for one in namespaces]
        started.append(PrefixLookups(guards, timeout_s=timeout_s, counters=counters, groups=groups))
        return started[-1]

    yield start
    for lookups in started:
        lookups.close()
        for guard in lookups._guards:
            guard.close()


def calls(lookups: PrefixLookups) -> int:
    return sum(guard.calls for guard in lookups._guards if isinstance(guard, CountingGuard))


def answer(lookups: PrefixLookups, lookup: PrefixLookup) -> int:
    wait_until(lambda: lookups.poll(lookup) is not None)
    assert lookup.stored is not None
    return lookup.stored


def test_keys_may_be_an_array_and_others_are_named(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    array = namespace.keys(range(5 * namespace.block_tokens))
    keys = [row.tobytes() for row in array]
    put_into(server, namespace, keys[:3])
    lookups = start_lookups(server.endpoint, namespace)
    lookup = lookups.ask(array)
    assert answer(lookups, lookup) == 3 and lookup.keys == keys
    wrong: list[Any] = [list(array), array[0], "key"]
    for each in wrong:
        with pytest.raises(TypeError, match="expected a list of bytes"):
            lookups.ask(each)
    assert lookups.pending == 0 and lookups.ask([]).stored == 0


@pytest.mark.exclusive
def test_an_answer_is_pending_and_then_available(
    start_server: StartServer, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(5)
    put_into(server, namespace, keys[:3])
    lookups = start_lookups(server.endpoint, namespace)
    with server.stopped():
        started = time.monotonic()
        lookup = lookups.ask(keys)
        assert lookup.stored is None and lookups.poll(lookup) is None and lookups.pending == 1
        assert time.monotonic() - started < 0.1
    assert answer(lookups, lookup) == 3 and lookup.certain
    assert lookups.pending == 0 and calls(lookups) == 1


@pytest.mark.parametrize("stored", [0, 1, 4])
def test_a_chain_is_found_up_to_its_first_gap(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups, stored: int
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(5)
    put_into(server, namespace, [*keys[:stored], *keys[stored + 1 :]])
    lookups = start_lookups(server.endpoint, namespace)
    assert answer(lookups, lookups.ask(keys)) == stored


def test_the_first_of_many_requests_with_one_prefix_asks_for_all(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    shared = make_keys(8)
    put_into(server, namespace, shared)
    lookups = start_lookups(server.endpoint, namespace)
    asked = [lookups.ask(shared) for _ in range(20)]
    assert [answer(lookups, lookup) for lookup in asked] == [8] * 20
    later = lookups.ask(shared[:5])
    assert later.stored == 5, "known from the others at once"
    assert calls(lookups) == 1


def test_each_request_asks_only_for_unknown_blocks(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    """Two prompts share a beginning. The second lookup asks only for the rest of its prompt, after the beginning is
    known."""
    namespace = new_namespace(BLOCK_BYTES)
    shared, first_end, second_end = make_keys(4), make_keys(2, first=10), make_keys(3, first=20)
    put_into(server, namespace, [*shared, *first_end, *second_end[:1]])
    lookups = start_lookups(server.endpoint, namespace)
    first, second = lookups.ask([*shared, *first_end]), lookups.ask([*shared, *second_end])
    assert lookups.pending == 1
    assert answer(lookups, first) == 6 and answer(lookups, second) == 5
    assert calls(lookups) == 2


def test_a_hit_is_what_every_rank_has(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    ranks = [new_namespace(BLOCK_BYTES, rank=rank, world=3) for rank in range(3)]
    keys = make_keys(6)
    for namespace, stored in zip(ranks, (6, 2, 4), strict=True):
        put_into(server, namespace, keys[:stored])
    lookups = start_lookups(server.endpoint, *ranks)
    lookup = lookups.ask(keys)
    assert answer(lookups, lookup) == 2 and lookup.certain
    assert calls(lookups) == 3


def test_a_rank_that_never_saved_anything_means_no_hit(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    ranks = [new_namespace(BLOCK_BYTES, rank=rank, world=2) for rank in range(2)]
    keys = make_keys(3)
    put_into(server, ranks[0], keys)
    lookups = start_lookups(server.endpoint, *ranks)
    assert answer(lookups, lookups.ask(keys)) == 0


def test_found_blocks_are_pinned_until_they_can_be_read(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(3)
    put_into(server, namespace, [*keys, *make_keys(10, first=10)])
    lookups = start_lookups(server.endpoint, namespace)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert answer(lookups, lookups.ask([*keys, *make_keys(1, first=100)])) == 3
        assert namespace_info(client).pinned == 3


@pytest.mark.exclusive
def test_a_frozen_store_is_a_miss_at_the_deadline(
    start_server: StartServer, new_namespace: MakeNamespace, start_lookups: StartLookups, counters: Counters
) -> None:
    server = start_server()
    namespaces = [new_namespace(BLOCK_BYTES, rank=rank, world=2) for rank in range(2)]
    lookups = start_lookups(server.endpoint, *namespaces)
    with server.stopped():
        started = time.monotonic()
        asked = [lookups.ask(make_keys(3, first=10 * number)) for number in range(50)]
        assert time.monotonic() - started < 0.2
        for lookup in asked:
            assert answer(lookups, lookup) == 0 and not lookup.certain
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
        assert counters.take()["lookups"] == 50
    wait_until(lambda: answer(lookups, lookups.ask(make_keys(1, first=1000))) == 0 and not lookups.pending)


def test_blocks_known_by_the_deadline_count(
    start_server: StartServer, new_namespace: MakeNamespace, start_lookups: StartLookups, counters: Counters
) -> None:
    """Another lookup has found the prompt's beginning before the store freezes."""
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(6)
    put_into(server, namespace, keys)
    lookups = start_lookups(server.endpoint, namespace, timeout_s=0.5)
    assert answer(lookups, lookups.ask(keys[:4])) == 4
    with server.stopped():
        lookup = lookups.ask(keys)
        assert answer(lookups, lookup) == 4 and not lookup.certain


def test_a_missing_store_is_a_miss_at_once(
    start_server: StartServer, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    server = start_server()
    lookups = start_lookups(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=30)
    server.kill()
    started = time.monotonic()
    lookup = lookups.ask(make_keys(3))
    assert answer(lookups, lookup) == 0 and not lookup.certain
    assert time.monotonic() - started < 10


def test_missing_blocks_are_looked_up_again_sooner_than_found_ones(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(4)
    put_into(server, namespace, keys[:2])
    lookups = start_lookups(server.endpoint, namespace)
    assert answer(lookups, lookups.ask(keys)) == 2
    put_into(server, namespace, keys)
    wait_until(lambda: answer(lookups, lookups.ask(keys)) == 4)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.delete(keys)
    assert lookups.ask(keys).stored == 4, "believed for a moment"
    wait_until(lambda: answer(lookups, lookups.ask(keys)) == 0)


def test_blocks_stored_by_this_engine_are_no_longer_missing(
    server: Server,
    new_namespace: MakeNamespace,
    start_lookups: StartLookups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_module, "MISSING_VALID_S", 60.0)
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(4)
    lookups = start_lookups(server.endpoint, namespace)
    assert answer(lookups, lookups.ask(keys)) == 0
    put_into(server, namespace, keys)
    assert lookups.ask(keys).stored == 0, "believed for a moment"
    for key in (keys[3], keys[0], b"never asked for."):
        lookups.came(key)
    assert answer(lookups, lookups.ask(keys)) == 4
    lookups.came(keys[0])
    assert lookups.ask(keys).stored == 4, "what was found is believed as before"


def test_after_a_failed_read_nothing_known_is_used(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(4)
    put_into(server, namespace, keys)
    lookups = start_lookups(server.endpoint, namespace)
    assert answer(lookups, lookups.ask(keys)) == 4
    with KVStoreClient(server.endpoint, namespace) as client:
        client.delete(keys)
    lookups.forget()
    assert answer(lookups, lookups.ask(keys)) == 0


def test_lookups_beyond_the_limit_queue_and_are_all_answered(
    start_server: StartServer,
    new_namespace: MakeNamespace,
    start_lookups: StartLookups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any poll advances all lookups, because a request far back in the engine's queue is not polled for a long time."""
    monkeypatch.setattr(lookup_module, "MOST_QUESTIONS", 5)
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    shared = make_keys(2)
    prompts = [[*shared, *make_keys(3, first=10 * number)] for number in range(1, 41)]
    others = [make_keys(2, first=1000 + 10 * number) for number in range(40)]
    for number, keys in enumerate([*prompts, *others]):
        put_into(server, namespace, keys[: number % 3 + 2])
    lookups = start_lookups(server.endpoint, namespace, timeout_s=30)
    with server.stopped():
        asked = [lookups.ask(keys) for keys in [*prompts, *others]]
        assert lookups.pending == 5 and all(lookups.poll(each) is None for each in asked)
    most = set()

    def move_on() -> None:
        """Advance all lookups, as an unrelated request does."""
        lookups.ask(make_keys(1, first=9999))
        most.add(lookups.pending)

    wait_until(lambda: move_on() or all(each.stored is not None for each in asked))
    assert max(most) <= 5
    assert [each.stored for each in asked] == [*(number % 3 + 2 for number in range(40)), *[2] * 40]
    assert all(each.certain for each in asked)


def test_an_answer_stays_with_its_lookup_however_late_it_is_polled(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup is polled long after its question was answered."""
    monkeypatch.setattr(lookup_module, "FOUND_VALID_S", 0.01)
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(4)
    put_into(server, namespace, keys[:3])
    lookups = start_lookups(server.endpoint, namespace, timeout_s=0.5)
    late = lookups.ask(keys)
    deadline = time.monotonic() + 0.5
    wait_until(lambda: lookups.ask(make_keys(1, first=20)) and not late.question)
    lookups.forget()
    wait_until(lambda: time.monotonic() > deadline)
    assert (lookups.poll(late), late.certain) == (3, True)


def test_queued_lookups_wait_no_longer_than_the_oldest_question(
    start_lookups: StartLookups, new_namespace: MakeNamespace, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "MOST_QUESTIONS", 5)
    lookups = start_lookups("tcp://127.0.0.1:1", new_namespace(BLOCK_BYTES), timeout_s=0.5)
    answering = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(CountingGuard, "call", lambda self, operation, miss: answering.wait(30) and miss)
        asked = [lookups.ask(make_keys(1, first=number)) for number in range(8)]
        started = time.monotonic()
        assert [answer(lookups, each) for each in reversed(asked)] == [0] * 8
        assert time.monotonic() - started < 0.5 + SLACK_S and not any(each.certain for each in asked)
        answering.set()
    counted = counters.take()
    assert (counted["lookup_timeouts"], counted["skipped_lookups"]) == (5, 3)


def test_a_lookup_that_joins_a_question_waits_its_own_timeout(
    start_lookups: StartLookups, new_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = start_lookups("tcp://127.0.0.1:1", new_namespace(BLOCK_BYTES), timeout_s=1.0)
    answering = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(CountingGuard, "call", lambda self, operation, miss: answering.wait(30) and miss)
        early = lookups.ask(make_keys(2))
        assert answer(lookups, early) == 0
        late = lookups.ask(make_keys(2))
        assert late.question is not None and lookups.poll(late) is None
        assert answer(lookups, late) == 0 and time.monotonic() >= late.asked_at + 1.0
        answering.set()


def test_an_answer_not_taken_for_long_is_not_used(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    """A request may begin without the answer to its lookup. If the next lookup comes much later, it must not use that
    old answer."""
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(3)
    lookups = start_lookups(server.endpoint, namespace)
    lookups.ask(keys)
    wait_until(lambda: lookups._answers)
    put_into(server, namespace, keys)
    stays(lambda: lookups._answers, 2 * lookup_module.MISSING_VALID_S)
    assert answer(lookups, lookups.ask(keys)) == 3


def test_a_lookup_takes_its_own_answer_however_late(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    """An engine's step may take longer than an answer is valid for other lookups."""
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(3)
    put_into(server, namespace, keys[:2])
    lookups = start_lookups(server.endpoint, namespace)
    asked = [lookups.ask(keys), lookups.ask(keys)]
    wait_until(lambda: lookups._answers)
    stays(lambda: lookups._answers, 1.5 * lookup_module.FOUND_VALID_S)
    assert [lookups.poll(each) for each in asked] == [2, 2]
    assert calls(lookups) == 1


def test_an_abandoned_question_is_not_asked(
    start_server: StartServer,
    new_namespace: MakeNamespace,
    start_lookups: StartLookups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_module, "MOST_QUESTIONS", 1)
    server = start_server()
    lookups = start_lookups(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=30)
    with server.stopped():
        asked = [lookups.ask(make_keys(1, first=number)) for number in range(10)]
        for lookup in asked[1:]:
            lookups.give_up(lookup)
    assert answer(lookups, asked[0]) == 0 and asked[0].certain and not any(each.certain for each in asked[1:])
    assert not lookups.pending and calls(lookups) == 1


def test_answers_are_forgotten_in_the_end(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "FOUND_VALID_S", 0.05)
    monkeypatch.setattr(lookup_module, "MISSING_VALID_S", 0.01)
    namespace = new_namespace(BLOCK_BYTES)
    put_into(server, namespace, make_keys(1000))
    lookups = start_lookups(server.endpoint, namespace)
    for first in range(0, 1000, 50):
        answer(lookups, lookups.ask([*make_keys(50, first), *make_keys(1, first=5000 + first)]))
    last = make_keys(1, first=9999)
    latest = max(fact.valid_until for fact in lookups._facts.values())
    wait_until(lambda: time.monotonic() > latest)
    answer(lookups, lookups.ask(last))
    assert set(lookups._facts) <= set(last) and len(lookups._expiring) <= 1 and not lookups._questions


def test_after_close_a_lookup_is_a_miss_at_its_deadline(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    lookups = start_lookups(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=0.2)
    lookups.close()
    lookups.close()
    assert answer(lookups, lookups.ask(make_keys(2))) == 0


def test_states_are_looked_up_separately(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    """There are two ranks and a model of three groups: tokens, states, tokens. Only some of the states are stored."""
    namespaces = [new_namespace(BLOCK_BYTES) for _ in range(2)]
    keys = make_keys(6)
    for namespace, states in zip(namespaces, ((0, 2, 3, 5), (1, 2, 3)), strict=True):
        put_into(server, namespace, slice_keys(keys[:4], [0, 2]) + slice_keys([keys[at] for at in states], [1]))
    lookups = start_lookups(server.endpoint, *namespaces, groups=GroupSlices([0, 2], [1]))
    lookup = lookups.ask(keys)
    assert (answer(lookups, lookup), lookup.states, lookup.certain) == (4, [3, 4], True)
    shorter = lookups.ask(keys[:3])
    assert (lookups.poll(shorter), shorter.states) == (3, [3]), "known from the answer before"
    for namespace in namespaces:
        put_into(server, namespace, slice_keys(keys[1:2], [1]))
    lookups.came(keys[1])
    again = lookups.ask(keys[:3])
    assert (answer(lookups, again), again.states) == (3, [2, 3])


def test_a_model_with_only_states_can_use_any_single_one(
    server: Server, new_namespace: MakeNamespace, start_lookups: StartLookups
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(6)
    put_into(server, namespace, keys[3:4])
    lookups = start_lookups(server.endpoint, namespace, groups=GroupSlices([], [0]))
    lookup = lookups.ask(keys)
    assert (answer(lookups, lookup), lookup.states) == (6, [4])
