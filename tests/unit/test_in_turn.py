"""Which shards move blocks at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvstore_client._links import in_turn as module
from kvstore_client._links.in_turn import in_turn


@dataclass(frozen=True)
class Place:
    """What of a link counts."""

    name: str
    on_this_host: bool = True
    by_reference: bool = False


A, B, C = Place("a"), Place("b"), Place("c")
FAR, LENT = Place("far", on_this_host=False), Place("lent", by_reference=True)


@pytest.mark.parametrize(
    ("cores_beside", "links", "groups"),
    [
        (1, [], [[]]),
        (1, [A, A], [[A, A]]),
        (1, [A, B, A, C], [[A, A], [B], [C]]),
        (2, [A, B, A, C], [[A, B, A], [C]]),
        (3, [A, B, C], [[A, B, C]]),
        (1, [FAR, A, LENT, B], [[FAR, A, LENT], [B]]),
        (1, [A, FAR, LENT], [[A, FAR, LENT]]),
    ],
)
def test_shards_of_this_host_wait_for_cores_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, cores_beside: int, links: list[Place], groups: list[list[Place]]
) -> None:
    monkeypatch.setattr(module, "AT_A_TIME", cores_beside)
    assert [list(group) for group in in_turn(links, lambda link: link)] == groups  # type: ignore[arg-type,return-value]
