"""Which shards are asked for blocks at the same time, and how long other shards wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvstore.wire.dealer import GetAnswer
from kvstore_client._links import in_turn as module
from kvstore_client._links.in_turn import LEAST_BYTES_PER_S, NEARLY_BYTES, SHORTEST_TURN_S, Turn, in_turn
from kvstore_client._links.ownership import Ownership

BLOCK = 1 << 20


@dataclass(eq=False)
class Place:
    """The fields of a link that this module uses."""

    name: str
    on_this_host: bool = True
    by_reference: bool = False
    sock: Any = "a socket"
    received: int = 1000
    lane_of: Place | None = None
    sending: Any = field(default_factory=Ownership)

    @property
    def first(self) -> Place:
        return self.lane_of or self


@dataclass(eq=False)
class Asked:
    """The fields of a call that this module uses."""

    link: Place
    count: int = 16
    done: bool = False
    answer: Any = field(default_factory=lambda: GetAnswer(1, 16, BLOCK))


A, B, C, FAR = Place("a"), Place("b"), Place("c"), Place("far", on_this_host=False)
LENT = Place("lent", by_reference=True)
A2 = Place("a's other lane", lane_of=A)
DOWN = Place("down", sock=None)
TAKEN = Place("taken")
TAKEN.sending.owner = "another thread"


@pytest.mark.parametrize(
    ("cores_beside", "links", "groups"),
    [
        (1, [], [[]]),
        (1, [A, A], [[A, A]]),
        (1, [A, B, A, C], [[A, A], [B], [C]]),
        (2, [A, B, A, C], [[A, B, A], [C]]),
        (3, [A, B, C], [[A, B, C]]),
        (1, [FAR, B, A], [[FAR, B], [A]]),
        (1, [A, FAR], [[A, FAR]]),
        (1, [A, LENT, B], [[A, LENT, B]]),
        (1, [A, A2, B], [[A, A2], [B]]),
        (1, [DOWN, A, TAKEN, B], [[A], [DOWN, TAKEN, B]]),
        (1, [DOWN, A], [[DOWN, A]]),
    ],
)
def test_local_shards_wait_for_cores_but_never_for_unready_blocks(
    monkeypatch: pytest.MonkeyPatch, cores_beside: int, links: list[Place], groups: list[list[Place]]
) -> None:
    monkeypatch.setattr(module, "SHARDS_AT_A_TIME", cores_beside)
    found = in_turn([Asked(link) for link in links])  # type: ignore[misc]
    assert [[call.link for call in group] for group in found] == groups


def test_a_turn_ends_when_its_blocks_are_nearly_there_or_lost() -> None:
    here, far = Place("here"), Place("far", on_this_host=False)
    calls = [Asked(here), Asked(here), Asked(far)]
    turn = Turn(calls)  # type: ignore[arg-type]
    assert turn.turn_s == pytest.approx(SHORTEST_TURN_S + 32 * BLOCK / LEAST_BYTES_PER_S)
    assert not turn.over()
    here.received += 32 * BLOCK - NEARLY_BYTES - 1
    assert not turn.over()
    here.received += 1
    assert turn.over(), "nobody waits for the one elsewhere"
    here.received = 0
    for call in calls[:2]:
        call.done = True
    assert turn.over()
    assert np.isclose(Turn([Asked(far)]).turn_s, SHORTEST_TURN_S)  # type: ignore[list-item]
