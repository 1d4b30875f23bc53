"""Which blocks a node sends to which member, and in which order, when another node joins or this node leaves."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis import given, settings

from kvstore.cluster.members import Member, Membership, State
from kvstore.cluster.placement import Placement
from kvstore.moving.carrier import Listed
from kvstore.moving.filling import Filling, _Task
from kvstore.moving.mover import TURN_BYTES, turns
from kvstore.moving.planning import NO_SHARD, Gains, MovePlan, plan_joining, plan_leaving
from kvstore.moving.settled import Settled
from kvstore.wire import PROTOCOL_VERSION, Hello, ShardAddress
from kvstore_client._links.link import Link
from kvstore_client._links.view import ShardEntry, View
from tests.support.properties import examples


def member(node: str, shards: int, zone: str) -> Member:
    addresses = [ShardAddress(f"{node}/{number}", "127.0.0.1", 7070 + number, 1.0) for number in range(shards)]
    return Member(node=node, state="serving", shards=addresses, zone=zone)


KEYS = np.random.default_rng(5).integers(0, 256, (300, 16), dtype=np.uint8)
Nodes = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["", "x", "y", "node-1"])), min_size=2, max_size=6)


def holders(members: Sequence[Member], copies: int) -> list[set[str]]:
    """Return, for each key, the shards that hold its block with these members."""
    shards = [(shard, node) for node in members for shard in node.shards]
    placement = Placement(
        [shard.name for shard, _ in shards],
        [1.0] * len(shards),
        [node.node for _, node in shards],
        [node.zone or node.node for _, node in shards],
    )
    return [{shards[number][0].name for number in row} for row in placement.replicas(KEYS, copies).tolist()]


def gaining(node: Member, plan: MovePlan, copies: int) -> tuple[list[set[str]], list[int]]:
    """Return, for each key, the shards that get it from this node, and its rank in the order of sending."""
    gains = Gains(node.node, plan)
    targets, ranks = gains.of(KEYS, copies)
    return [{gains.targets[target].name for target in row if target != NO_SHARD} for row in targets.tolist()], list(
        ranks
    )


@settings(max_examples=examples(0.3))
@given(Nodes, st.integers(1, 3))
def test_a_leaving_node_sends_its_blocks_to_their_next_owners(nodes: list[tuple[int, str]], copies: int) -> None:
    members = [member(f"node-{number}", *node) for number, node in enumerate(nodes)]
    plan = plan_leaving("node-0", members)
    assert not plan.gentle
    gained, ranks = gaining(members[0], plan, copies)
    view = View(
        [
            ShardEntry(
                Link(shard.name, shard.host, shard.port, lambda: Hello(0, PROTOCOL_VERSION), lambda: None),
                node.node,
                node.zone or node.node,
            )
            for node in members[1:]
            for shard in node.shards
        ]
    )
    assert gained == [{view.links[number].name for number in row} for row in view.owners(KEYS, copies).tolist()]
    assert not any(ranks), "nobody else sends"


@settings(max_examples=examples(0.3))
@given(Nodes, st.integers(1, 3), st.data())
def test_each_holder_sends_a_joining_node_its_share_and_one_goes_first(
    nodes: list[tuple[int, str]], copies: int, data: st.DataObject
) -> None:
    members = [member(f"node-{number}", *node) for number, node in enumerate(nodes)]
    there = data.draw(st.integers(1, len(nodes) - 1))
    old = members[:there]
    plan = plan_joining({node.node for node in members[there:]}, members)
    assert plan.gentle
    before, after = holders(old, copies), holders(members, copies)
    senders: list[list[int]] = [[] for _ in KEYS]
    for node in old:
        mine = {shard.name for shard in node.shards}
        for number, (gained, rank) in enumerate(zip(*gaining(node, plan, copies), strict=True)):
            held = bool(before[number] & mine)
            assert gained == (after[number] - before[number] if held else set())
            if held:
                senders[number].append(rank)
    assert all(sorted(ranks) == list(range(len(ranks))) for ranks in senders)
    for node in members[there:]:
        assert not any(gaining(node, plan, copies)[0]), "who joined had nothing before"


def test_a_leaving_node_relies_on_no_joining_or_draining_node() -> None:
    states: list[State] = ["draining", "serving", "joining", "draining", "serving"]
    members = [
        msgspec.structs.replace(member(f"node-{number}", 1, ""), state=state) for number, state in enumerate(states)
    ]
    gained, _ = gaining(members[0], plan_leaving("node-0", members), 2)
    assert gained == holders([members[1], members[2], members[4]], 2)


def test_settled_copies_are_distinguished_from_others() -> None:
    settled = Settled()
    holder, other = ("run", "a/0", b"namespace"), ("new run", "a/0", b"namespace")
    assert not settled.among(holder, KEYS).any()
    settled.add(holder, KEYS[200:])
    settled.add(holder, KEYS[:50])
    assert settled.among(holder, KEYS).tolist() == [number < 50 or number >= 200 for number in range(len(KEYS))]
    assert not settled.among(other, KEYS).any() and not settled.among(holder, KEYS[:, :8].copy()).any()


def test_draining_nodes_own_nothing_and_joining_nodes_do() -> None:
    states: list[State] = ["serving", "joining", "joining", "draining"]
    members = [
        msgspec.structs.replace(member(f"node-{number}", 1, ""), state=state) for number, state in enumerate(states)
    ]
    plan = plan_joining({"node-2"}, members)
    assert (plan.before, plan.after, plan.senders) == (members[:2], members[:3], {"node-0", "node-1"})


def listed(canonical: bytes, block_bytes: int, count: int) -> Listed:
    keys = np.arange(count * 16, dtype=np.uint8).reshape(count, 16)
    return Listed(canonical, 1, block_bytes, keys, np.zeros((count, 1), dtype=np.intp), keys[:, np.newaxis])


def test_namespaces_take_turns_until_every_block_had_one() -> None:
    small, large, none = listed(b"small", 4096, 20_000), listed(b"large", TURN_BYTES // 8, 20), listed(b"none", 1, 0)
    parts = list(turns([small, large, none]))
    assert [some.canonical for some, _ in parts] == [b"small", b"large"] * 3
    for some in (small, large):
        rows = [row for other, part in parts if other is some for row in range(len(some.keys))[part]]
        assert rows == list(range(len(some.keys)))
    assert all(part.stop - part.start <= 8192 for _, part in parts)


# ---- when a node fills others --------------------------------------------------------------------------------------


class Views:
    """The filling thread of node a, which is not started. The test gives it the members: `a=serving` ..."""

    def __init__(self, grace_s: float = 300.0) -> None:
        self.filling = Filling(member("a", 1, ""), [], grace_s)
        self._epoch = 0

    def take(self, **states: str) -> tuple[set[str], set[str]]:
        """Return the nodes that are filled with these members, and the owners among which blocks are placed."""
        self._epoch += 1
        members = [
            msgspec.structs.replace(member(name[0], 1, ""), state=state, instance=name[1:])
            for name, state in states.items()
        ]
        self.filling.take(Membership(self._epoch, members))
        task = self.task
        return ({who[0] for who, _ in task.joined}, {who[0] for who in task.owners}) if task else (set(), set())

    @property
    def task(self) -> _Task | None:
        return self.filling._task

    def finish(self) -> None:
        self.filling._done = self.filling._task


def test_a_node_fills_joining_nodes_until_they_serve_or_leave() -> None:
    views = Views()
    assert views.take(a="serving", b="serving") == (set(), set())
    assert views.take(a="serving", b="serving", c="joining") == ({"c"}, {"a", "b", "c"})
    assert views.take(a="serving", b="serving", c="serving") == (set(), set())
    assert views.take(a="serving", b="joining", c="serving") == ({"b"}, {"a", "b", "c"}), "its lease had ended"
    assert views.take(a="serving", c="serving") == (set(), set())
    assert views.take(a="joining", b="joining", c="serving") == ({"b"}, {"a", "b", "c"}), "not itself, though it joins"


def test_a_node_fills_others_only_while_it_owns_blocks() -> None:
    views = Views()
    assert views.take(b="serving", c="joining") == (set(), set()), "it is not in yet"
    assert views.take(b="serving", c="joining", a="joining") == ({"c"}, {"a", "b", "c"})
    assert views.take(b="serving", c="joining", a="draining") == (set(), set())
    assert views.take(b="serving", c="joining", aX="serving") == (set(), set()), "another process has its id"
    views.filling.stop()
    assert views.take(a="serving", c="joining") == (set(), set())
    assert Views(0.0).take(a="serving", b="joining") == (set(), set()), "there is no time for it"


def test_a_rejoining_node_still_fills_others() -> None:
    views = Views()
    again = msgspec.structs.replace(member("a", 1, ""), instance="X")
    assert views.take(a="serving", b="serving", c="joining") == ({"c"}, {"a", "b", "c"})
    views.filling.joins_as(again)
    assert views.take(a="serving", b="draining", c="joining") == ({"c"}, {"a", "c"}), "etcd has not written it yet"
    assert views.take(aX="joining", b="serving", c="joining") == ({"c"}, {"a", "b", "c"})


def test_filling_restarts_only_if_the_blocks_to_copy_change() -> None:
    views = Views()
    views.take(a="serving", b="serving", c="joining")
    first = views.task
    views.take(a="serving", b="draining", c="joining")
    assert (second := views.task) is not first, "b's blocks have other owners now"
    views.take(a="serving", c="joining")
    assert views.task is second, "it owned nothing any more"
    views.take(a="serving", c="joining", d="joining")
    assert (third := views.task) is not second
    views.finish()
    views.take(a="serving", c="serving", d="joining")
    assert views.task is third, "all is copied to d already"
    views.take(a="serving", c="serving", dX="joining")
    assert views.task is not third, "d was started anew"
