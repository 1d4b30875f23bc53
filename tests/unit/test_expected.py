"""Promises and waiters, compared with a model: which blocks are promised, which clients own the promises, and which
waiters are woken."""

from __future__ import annotations

import weakref
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.store.expected import SPARE, STEP, Promises, Waiters, split
from kvstore.wire import PromiseOutcome
from tests.support.properties import examples

KEYS = [bytes([number]) * 8 for number in range(12)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=8)
owners = st.sampled_from(["anna", "bert", "cleo"])
consumers = st.sampled_from(["dora", "emil"])


class Wait:
    """The keys that a request waits for, according to the model, and how often the request was woken."""

    def __init__(self, consumer: str, keys: list[bytes], until: float) -> None:
        self.consumer, self.keys, self.until = consumer, set(keys), until
        self.woken = self.news = 0
        self.over = False

    def wake(self) -> None:
        assert not self.over, "who is gone was woken"
        self.woken += 1


class Machine(RuleBasedStateMachine):
    """Clients promise, set, withdraw and disconnect. Others wait until their time is over, or disconnect. The test sets
    the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters = Waiters()
        self.promises = Promises(self.waiters)
        self.now = 0.0
        self.present: set[bytes] = set()
        self.promised: dict[bytes, tuple[str, float]] = {}  # key -> owner, and when the promise ends
        self.held: Counter[str] = Counter()
        self.waits: list[Wait] = []

    def _news(self, keys: set[bytes]) -> None:
        """Note in the model that every waiter for one of these keys is woken, once for each key."""
        for wait in self.waits:
            wait.news += len(wait.keys & keys)
            wait.keys -= keys

    def _end(self, waits: list[Wait]) -> None:
        """End these waits, so that they are not woken any more."""
        for wait in waits:
            wait.over = True
            for key in wait.keys:
                self.waiters.discard(key, wait.wake)
            self.waits.remove(wait)

    @rule(keys=some_keys, owner=owners, ttl=st.integers(1, 5))
    def promise(self, keys: list[bytes], owner: str, ttl: int) -> None:
        there = bytes(key in self.present for key in keys)

        def changed(count: int) -> None:
            self.held[owner] += count

        answers = self.promises.make(keys, there, owner, self.now + ttl, changed)
        for key, answer in zip(keys, answers, strict=True):
            if key in self.present:
                assert answer == PromiseOutcome.PRESENT
            elif key in self.promised and self.promised[key][0] != owner:
                assert answer == PromiseOutcome.OTHERS
            else:
                assert answer == PromiseOutcome.MINE
                self.promised[key] = owner, self.now + ttl

    @rule(keys=some_keys)
    def set(self, keys: list[bytes]) -> None:
        self.promises.fulfil(keys)
        self.present.update(keys)
        for key in keys:
            self.promised.pop(key, None)
        self.waiters.tell(keys)
        self._news(set(keys))

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        self.present.difference_update(keys)

    @rule(keys=some_keys, owner=owners)
    def withdraw(self, keys: list[bytes], owner: str) -> None:
        mine = {key for key in keys if self.promised.get(key, ("", 0))[0] == owner}
        assert self.promises.withdraw(keys, owner) == len(mine)
        for key in mine:
            del self.promised[key]
        self._news(mine)

    @rule(owner=owners)
    def vanish(self, owner: str) -> None:
        mine = {key for key, (whose, _) in self.promised.items() if whose == owner}
        self.promises.withdraw_all(owner)
        for key in mine:
            del self.promised[key]
        self._news(mine)

    @rule(passed=st.integers(1, 4), consumers_first=st.booleans())
    def time_passes(self, passed: int, consumers_first: bool) -> None:
        self.now += passed
        if consumers_first:
            self._end([wait for wait in self.waits if wait.until <= self.now])
        over = {key for key, (_, end) in self.promised.items() if end <= self.now}
        self.promises.expire(self.now)
        for key in over:
            del self.promised[key]
        self._news(over)
        self._end([wait for wait in self.waits if wait.until <= self.now])

    @rule(keys=some_keys, consumer=consumers, seconds=st.integers(1, 6))
    def wait(self, keys: list[bytes], consumer: str, seconds: int) -> None:
        wait = Wait(consumer, keys, self.now + seconds)
        for key in keys:
            self.waiters.add(key, wait.wake)
        self.waits.append(wait)

    @rule(consumer=consumers)
    def die(self, consumer: str) -> None:
        self._end([wait for wait in self.waits if wait.consumer == consumer])

    @rule()
    def there_may_be_news_of_any_key(self) -> None:
        self.waiters.tell_all()
        for wait in self.waits:
            wait.news += bool(wait.keys)
            wait.keys.clear()

    @invariant()
    def what_is_promised_is_known(self) -> None:
        assert len(self.promises) == len(self.promised)
        assert all((key in self.promises) == (key in self.promised) for key in KEYS)
        held = Counter(owner for owner, _ in self.promised.values())
        assert +self.held == held, "the account of a client is wrong"
        for owner in ("anna", "bert", "cleo"):
            mine = [key for key, (whose, _) in self.promised.items() if whose == owner]
            assert self.promises.held_by(owner) == bool(mine)
            assert self.promises.new_to(owner, KEYS) == len(KEYS) - len(mine)

    @invariant()
    def everybody_with_news_was_woken_and_the_others_still_wait(self) -> None:
        assert all(wait.woken == wait.news for wait in self.waits)
        assert len(self.waiters) == len({key for wait in self.waits for key in wait.keys})

    def teardown(self) -> None:
        self.promises.expire(float("inf"))
        assert not self.promises and not +self.held
        assert not self.promises._by_owner and not self.promises._expiring
        self._end(self.waits[:])
        assert not self.waiters, "a wait is left of who is gone"


def test_promises_and_waiters_behave_as_the_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples(1), stateful_step_count=40))


def test_frequent_renewals_leave_nothing_behind() -> None:
    promises = Promises(Waiters())
    for number in range(10_000):
        promises.make(KEYS, bytes(len(KEYS)), "anna", 600.0 + number, lambda _: None)
    assert len(promises) == len(KEYS)
    assert len(promises._expiring) <= 2 + SPARE + 1


class Owner:
    """A client; the test observes when it is garbage-collected."""


def test_an_ended_promise_releases_its_owner() -> None:
    """The promise is remembered for as long as it would have lasted, but its owner is released at once."""
    promises = Promises(Waiters())
    promises.make(KEYS, bytes(len(KEYS)), "anna", 600.0, lambda _: None)
    gone = []
    for number in range(SPARE // 2):
        owner = Owner()
        promises.make([b"key %4d" % number], bytes(1), owner, 600.0, lambda _, owner=owner: None)
        promises.withdraw_all(owner)
        gone.append(weakref.ref(owner))
        del owner
    assert len(promises._expiring) > SPARE // 2
    assert not any(each() for each in gone)


def test_promises_expire_on_time_while_many_others_end() -> None:
    promises = Promises(Waiters())
    promises.make([b"of bert."], bytes(1), "bert", 1.0, lambda _: None)
    many = [number.to_bytes(8, "big") for number in range(3 * STEP)]
    for first in range(0, len(many), 8192):
        promises.make(many[first : first + 8192], bytes(8192), "anna", 600.0, lambda _: None)
    promises.withdraw_all("anna")
    assert len(promises) > STEP
    promises.expire(1.0)
    assert b"of bert." not in promises


def test_a_waiter_for_many_keys_is_woken_once_for_all() -> None:
    waiters = Waiters()
    woken: list[int] = []

    def wake() -> None:
        woken.append(1)

    for key in KEYS:
        waiters.add(key, wake)
    waiters.discard(KEYS[0], wake)
    waiters.discard(KEYS[0], wake)
    assert len(waiters) == len(KEYS) - 1
    waiters.tell_all()
    assert woken == [1] and not waiters


def test_keys_are_split_by_length() -> None:
    assert list(split(b"".join(KEYS), 8)) == KEYS


def test_very_many_promises_end_in_several_steps() -> None:
    waiters = Waiters()
    promises = Promises(waiters)
    keys = [number.to_bytes(8, "big") for number in range(3 * STEP)]
    for first in range(0, len(keys), 8192):
        promises.make(keys[first : first + 8192], bytes(8192), "anna", 600.0, lambda _: None)
    promises.withdraw_all("anna")
    left = [len(promises)]
    while promises:
        promises.expire(0.0)
        left.append(len(promises))
    assert left == [2 * STEP, STEP, 0]
    promises.make(keys[:100], bytes(100), "anna", 1.0, lambda _: None)
    for first in range(0, len(keys), 8192):
        promises.make(keys[first : first + 8192], bytes(8192), "bert", 1.0, lambda _: None)
    for _ in range(3):
        assert promises
        promises.expire(1.0)
    assert not promises
    promises.expire(1.0)
    assert not promises._expiring and not promises._by_owner
