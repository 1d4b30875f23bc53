"""Invariants of the connector's scheduling half, however slow, unsynchronised or faulty its ranks and the store are.

The connector is safe if three statements are true. No slot is reused while it may still be read or written. No block is
read before every rank has completely written it. No request attends to another prefix's bytes. `Rank` checks them
whenever memory is used. In addition, nothing remains in progress at the end.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.properties import examples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.v1.request import Request, RequestStatus

    from tests.engine.scheduled_engine import ScheduledEngine
    from tests.engine.scheduled_ranks import BLOCK_TOKENS, STATE

RANKS = 2
MOST_BLOCKS = 7  # of a prompt

rank_numbers = st.integers(0, RANKS - 1)
families = st.sampled_from([0, 0, 1])


class Machine(RuleBasedStateMachine):
    """Makes requests that share prefixes, in an engine with too little memory of every kind."""

    model: Path
    asynchronous: bool

    @initialize(
        slots=st.integers(3, 14),
        keep=st.booleans(),
        blocks=st.integers(MOST_BLOCKS + 5, 24),
        budget=st.sampled_from([48, 96, 512]),
        min_hit_blocks=st.sampled_from([0, 0, 2]),
        save_decode=st.booleans(),
        prefix_cache=st.booleans(),
        stored=st.integers(0, MOST_BLOCKS),
        windows=st.sampled_from(
            [(0,), (0,), (0, 40), (0, 96, 96), (96, 0), (64,), (0, STATE), (STATE, 0, STATE), (STATE,), (0, 64, STATE)]
        ),
        single_flight=st.booleans(),
        gathers=st.booleans(),
        checks=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        slots: int,
        keep: bool,
        blocks: int,
        budget: int,
        min_hit_blocks: int,
        save_decode: bool,
        prefix_cache: bool,
        stored: int,
        windows: tuple[int, ...],
        single_flight: bool,
        gathers: bool,
        checks: bool,
    ) -> None:
        self.engine = ScheduledEngine(
            self.model,
            ranks=RANKS,
            slots=slots,
            keep=keep,
            blocks=blocks * len(windows),
            budget=budget,
            min_hit_tokens=min_hit_blocks * BLOCK_TOKENS,
            save_decode=save_decode,
            asynchronous=self.asynchronous,
            prefix_cache=prefix_cache or STATE in windows,
            windows=windows,
            single_flight=single_flight and STATE not in windows,
            gather_s=math.inf if gathers else 0.0,
            checks=checks,
        )
        self.others_save(list(range(RANKS)), 0, stored)
        self.add(0, MOST_BLOCKS, 0, 1, 2, "")

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.engine.requests.values() if not request.is_finished()]

    # Users.

    @precondition(lambda self: len(self.unfinished) < 6)
    @rule(
        family=families,
        common=st.sampled_from([MOST_BLOCKS, *range(MOST_BLOCKS)]),
        own=st.integers(0, 2),
        rest=st.integers(0, BLOCK_TOKENS - 1),
        max_tokens=st.sampled_from([1, 2, 40]),
        side=st.sampled_from(["", "", "do_remote_decode", "do_remote_prefill"]),
    )
    def add(self, family: int, common: int, own: int, rest: int, max_tokens: int, side: str) -> None:
        """Add a request whose prompt shares a beginning of some length with all others of its family."""
        own = min(own, MOST_BLOCKS - common)
        number = len(self.engine.requests)
        prompt = [family] * (common * BLOCK_TOKENS) + [100 + number] * (own * BLOCK_TOKENS) + [50] * rest
        self.engine.add(prompt or [family], max_tokens=max_tokens, side=side)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.unfinished)))

    # The engine.

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def complete(self) -> None:
        self.engine.complete()

    @rule(times=st.integers(1, 4))
    def run_on(self, times: int) -> None:
        for _ in range(times):
            if len(self.engine.in_flight) < self.engine.depth:
                self.engine.schedule()
            self.engine.complete()

    @precondition(lambda self: not self.engine.in_flight)
    @rule(running=st.booleans())
    def forget_own_cache(self, running: bool) -> None:
        """Reset the engine's own cache. With ``running``, vLLM raises an error if it cannot free all blocks, because
        some are being loaded or held."""
        requests = self.engine.scheduler.requests.items()
        parked = [name for name, request in requests if request.status != RequestStatus.RUNNING]
        running = running and not any(self.engine.block_ids(name) for name in parked)
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=running)

    @precondition(lambda self: not self.engine.in_flight)
    @rule(
        named=st.booleans(),
        reset=st.booleans(),
        ranks=st.sampled_from([None, None, [0], [1]]),
    )
    def change_weights(self, named: bool, reset: bool, ranks: list[int] | None) -> None:
        """Change the weights. They need no name if the ranks can check them. If the ranks cannot, and weights once got
        a name, all later weights must get one."""
        checks, has_named = self.engine.half.state.sharing.checks, len(self.engine.weights) > 1
        if checks or (named and ranks is None) or (reset and not has_named):
            name = f"weights {len(self.engine.weights)}" if named and ranks is None else ""
            self.engine.change_weights(name, reset=reset or not name, ranks=ranks)

    @rule(number=rank_numbers, ready=st.booleans())
    def check(self, number: int, ready: bool) -> None:
        """Set whether a rank has finished checking its weights."""
        self.engine.ranks[number].prints.ready = ready

    @precondition(lambda self: not self.engine.in_flight)
    @rule()
    def reset(self) -> None:
        self.engine.scheduler.reset_connector_cache()

    # The ranks; each works at its own pace.

    @precondition(lambda self: any(rank.copies for rank in self.engine.ranks))
    @rule(number=rank_numbers, times=st.integers(1, 3))
    def copy(self, number: int, times: int) -> None:
        rank = self.engine.ranks[number]
        for _ in range(min(times, len(rank.copies))):
            rank.finish_copy()

    @rule(number=rank_numbers)
    def break_a_copy(self, number: int) -> None:
        self.engine.ranks[number].break_next_copy = True

    @precondition(lambda self: any(rank.sends for rank in self.engine.ranks))
    @rule(number=rank_numbers, index=st.integers(0, 5), times=st.integers(1, 6), stored=st.booleans())
    def send(self, number: int, index: int, times: int, stored: bool) -> None:
        rank = self.engine.ranks[number]
        for _ in range(min(times, len(rank.sends))):
            rank.finish_send(index % len(rank.sends), stored=stored)

    @precondition(lambda self: any(rank.loads for rank in self.engine.ranks))
    @rule(number=rank_numbers, index=st.integers(0, 3), deliver=st.sampled_from([0, 1, 2, 100]))
    def load(self, number: int, index: int, deliver: int) -> None:
        rank = self.engine.ranks[number]
        if rank.loads:
            rank.finish_load(index % len(rank.loads), deliver=deliver)

    @precondition(lambda self: any(rank.loads for rank in self.engine.ranks))
    @rule(delivers=st.tuples(*[st.sampled_from([1, 100])] * RANKS))
    def load_everywhere(self, delivers: tuple[int, ...]) -> None:
        for rank, deliver in zip(self.engine.ranks, delivers, strict=True):
            rank.finish_loads(deliver)

    # The store.

    @rule(answering=st.sampled_from([True, True, False]), certain=st.sampled_from([True, True, False]))
    def answer(self, answering: bool, certain: bool) -> None:
        self.engine.lookups.answering = answering
        self.engine.lookups.certain = certain

    @rule(number=rank_numbers, every=st.integers(1, 4))
    def evict(self, number: int, every: int) -> None:
        held = self.engine.ranks[number].held
        held.difference_update(sorted(held)[::every])

    @rule(numbers=st.sampled_from([[0, 1], [0, 1], [0], [1]]), family=families, blocks=st.integers(1, MOST_BLOCKS))
    def others_save(self, numbers: list[int], family: int, blocks: int) -> None:
        for number in numbers:
            self.engine.ranks[number].held.update(self.engine.keys([family] * (blocks * BLOCK_TOKENS)))

    @rule(family=families, blocks=st.integers(0, MOST_BLOCKS))
    def others_promise(self, family: int, blocks: int) -> None:
        """Let other engines promise blocks. `others_save` decides whether they set them."""
        self.engine.flights.others = set(self.engine.hashes([family] * (blocks * BLOCK_TOKENS)))

    # Invariants.

    @invariant()
    def the_tier_offers_only_what_all_ranks_have_written(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_readable()

    @invariant()
    def the_events_tell_exactly_what_the_tier_has(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_heard()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.lookups.answering = True
            for rank in self.engine.ranks:
                rank.prints.ready = True
            self.engine.run()
            self.engine.check_idle()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log: every engine logs a few lines when it is made, and these tests make thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_no_order_of_events_reads_wrong_bytes_or_leaves_anything_behind(model: Path, asynchronous: bool) -> None:
    machine = type("ConnectorMachine", (Machine,), {"model": model, "asynchronous": asynchronous})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(2), stateful_step_count=80))
