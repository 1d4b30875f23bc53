"""The blocks that an engine could lose: how many are not yet in the store, for how long, and how many it lost at its
end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_client.engine.paged import unsent as unsent_module
from kvstore_client.engine.paged.unsent import Unsent
from tests.support.standing_clock import StandingClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandingClock]:
    yield StandingClock(monkeypatch, unsent_module)


def test_a_block_counts_until_its_last_reader_is_done(clock: StandingClock) -> None:
    unsent = Unsent()
    assert (unsent.blocks, unsent.oldest_s) == (0, 0)
    unsent.add(1, 2)
    clock.now += 3
    unsent.add(2, 0)
    unsent.add(3, 1)
    clock.now += 1
    assert (unsent.blocks, unsent.oldest_s) == (3, 4)
    unsent.ended([((1, 10), True), ((3, 12), False)])
    assert (unsent.blocks, unsent.oldest_s) == (1, 4)
    unsent.add(4, 1)
    unsent.ended([((1, 11), True)])
    assert (unsent.blocks, unsent.oldest_s) == (1, 0)


def test_at_the_end_a_block_is_sent_or_lost(clock: StandingClock) -> None:
    unsent = Unsent()
    unsent.add(1, 5)
    unsent.ended([((1, 0), True)])
    assert unsent.engine_ends() == 0
    clock.now += 2
    unsent.ended([((1, 1), True), ((1, 2), False)])
    assert unsent.engine_ends() == 2, "it ends once"
    assert unsent.at_end() == (1, 3), "what was sent before does not count, what is never named is lost"
