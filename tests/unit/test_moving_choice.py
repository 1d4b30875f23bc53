"""What a node that leaves gives to whom, and in which order."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from kvstore.cluster.members import Member
from kvstore.cluster.moving import NOBODY, TURN_BYTES, Mover, _Listed, _turns
from kvstore.cluster.placement import Placement
from kvstore.wire import ShardAddress


def member(node: str, shards: int, zone: str) -> Member:
    addresses = [ShardAddress(f"{node}/{number}", "127.0.0.1", 7070 + number, 1.0) for number in range(shards)]
    return Member(node=node, state="serving", shards=addresses, zone=zone)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("xyz")), min_size=2, max_size=6), st.integers(1, 3))
def test_a_shard_gains_what_it_holds_without_the_node_and_did_not_with_it(
    nodes: list[tuple[int, str]], copies: int
) -> None:
    members = [member(f"node-{number}", *node) for number, node in enumerate(nodes)]
    mover = Mover(members[0].shards, members[0].node, members, lambda done, total: None)
    keys = np.random.default_rng(5).integers(0, 256, (300, 16), dtype=np.uint8)
    gaining = mover.gaining(keys, copies)

    def holders(some: list[Member]) -> list[set[str]]:
        shards = [(shard, node) for node in some for shard in node.shards]
        placement = Placement(
            [shard.name for shard, _ in shards],
            [1.0] * len(shards),
            [node.node for _, node in shards],
            [node.zone for _, node in shards],
        )
        return [{shards[number][0].name for number in row} for row in placement.replicas(keys, copies).tolist()]

    with_it, without = holders(members), holders(members[1:])
    for row, before, after in zip(gaining.tolist(), with_it, without, strict=True):
        assert {mover.targets[target].name for target in row if target != NOBODY} == after - before
    mine = {shard.name for shard in members[0].shards}
    assert all((before & mine) or (row == NOBODY).all() for row, before in zip(gaining, with_it, strict=True))


def listed(canonical: bytes, block_bytes: int, count: int) -> _Listed:
    keys = np.arange(count * 16, dtype=np.uint8).reshape(count, 16)
    return _Listed(canonical, 1, block_bytes, keys, np.zeros((count, 1), dtype=np.intp))


def test_namespaces_take_turns_and_every_block_has_one() -> None:
    small, large, none = listed(b"small", 4096, 20_000), listed(b"large", TURN_BYTES // 8, 20), listed(b"none", 1, 0)
    turns = list(_turns([small, large, none]))
    assert [some.canonical for some, _ in turns] == [b"small", b"large"] * 3
    for some in (small, large):
        rows = [row for other, part in turns if other is some for row in range(len(some.keys))[part]]
        assert rows == list(range(len(some.keys)))
    assert all(part.stop - part.start <= 8192 for _, part in turns)
