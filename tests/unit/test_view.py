"""Which shards a client asks for a block while the membership changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.wire import PROTOCOL_VERSION, Hello
from kvstore_client._links.link import Link
from kvstore_client._links.view import MAX_FORMER, ShardEntry, View

KEYS = np.random.default_rng(5).integers(0, 256, (512, 16), dtype=np.uint8)


def place(node: str, state: str) -> ShardEntry:
    link = Link(f"{node}/0", node, 1, lambda: Hello(0, PROTOCOL_VERSION), lambda: None)
    return ShardEntry(link, node, node, state, new=state != "draining", old=state != "joining")


def owners(nodes: tuple[str, ...], copies: int) -> list[set[str]]:
    """Return, for each key, the nodes on which its block is set with these members."""
    view = View([place(node, "serving") for node in nodes])
    return [{view.places[number].node for number in row} for row in view.owners(KEYS, copies).tolist()]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("joined", range(1, MAX_FORMER + 1))
def test_a_block_is_found_where_it_was_set_after_several_joins(joined: int, copies: int) -> None:
    """Only the first node is `serving`. Each later node owns some of the blocks that are set until the next node joins,
    and no node is filled."""
    nodes = ("first", *(f"joined-{number}" for number in range(joined)))
    places = [place(node, "joining" if number else "serving") for number, node in enumerate(nodes)]
    view = View(places)
    for turn, known in itertools.product(range(3), range(1, len(nodes) + 1)):
        readers = view.readers(KEYS, copies, turn)
        asked = [{view.places[number].node for number in row if number >= 0} for row in readers.tolist()]
        for had, asks in zip(owners(nodes[:known], copies), asked, strict=True):
            assert had & asks, f"set on {had}, when the members were {nodes[:known]}; asked are {asks}"


def test_owners_are_asked_first_and_no_shard_twice() -> None:
    states = ["serving", "joining", "draining", "joining", "serving", "joining"]
    view = View([place(f"node-{number}", state) for number, state in enumerate(states)])
    readers = view.readers(KEYS, 2)
    assert (np.sort(readers[:, :2]) == np.sort(view.owners(KEYS, 2))).all()
    for row in readers.tolist():
        asked = [number for number in row if number >= 0]
        assert len(set(asked)) == len(asked)


def test_all_ranks_agree_while_no_node_joins_or_drains() -> None:
    view = View([place(f"node-{number}", "serving") for number in range(4)])
    assert view.readers(KEYS, 1).shape == (len(KEYS), 1)
