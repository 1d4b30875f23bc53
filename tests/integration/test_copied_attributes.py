"""Copies of a block on other shards keep its priority, its remaining time to live, and its position in its chain."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.moving.mover import Mover, places
from kvstore.moving.planning import NO_SHARD, MovePlan, plan_joining, plan_leaving
from kvstore.wire import PROTOCOL_VERSION, ErrorCode, ShardAddress
from kvstore.wire.attributes import TTL_STEP_S, Attributes, attributes_dtype
from kvstore.wire.queries import KeyArray, ShardQueries
from kvstore_client import KVStoreClient, Namespace
from tests.support.cluster import member_of
from tests.support.harness import (
    ERROR,
    HELLO,
    SET,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    sums_of,
    wait_until,
)

TIMEOUT_S = 10.0
TTL_S = 600.0
NAMESPACE = make_namespace(4096, "copied")


def matrix(keys: Sequence[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)


def attributes_on(shard: ShardAddress, namespace: Namespace, keys: Sequence[bytes]) -> dict[bytes, Attributes]:
    """Return the attributes of those of these blocks that a shard has."""
    found: dict[bytes, Attributes] = {}
    with ShardQueries((shard.host, shard.port), TIMEOUT_S, namespace.canonical()) as asking:
        for positions, _, attributes, _ in asking.get(matrix(keys)):
            for row, position in enumerate(positions.tolist()):
                found[keys[position]] = attributes[row]
    return found


def followed(found: dict[bytes, Attributes]) -> dict[bytes, bytes]:
    return {key: entry["before"].tobytes() for key, entry in found.items()}


def order_of(keys: Sequence[bytes], some: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return, for each key of `some`, the key of `some` before it in the chain `keys`; for the first one, itself."""
    mine = [key for key in keys if key in set(some)]
    return dict(zip(mine, [*mine[:1], *mine], strict=False))


def assert_kept(found: dict[bytes, Attributes], priority: int, since: float) -> None:
    for entry in found.values():
        left_s = entry["ttl"] * TTL_STEP_S
        assert entry["priority"] == priority
        assert TTL_S - (time.monotonic() - since) - 1 <= left_s <= TTL_S + 1


def carry_out(sender: Server, plan: MovePlan) -> None:
    member = member_of(sender)
    report = Mover(member.shards, member.node, plan, lambda report: None).run(time.monotonic() + TIMEOUT_S)
    assert report.failed == 0 and report.moved == report.total > 0


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "leaves"])
def test_moved_blocks_keep_priority_ttl_and_position(start_server: StartServer, joins: bool) -> None:
    """A chain was set in several calls. A node with two shards copies it to a node with one shard and a node with
    three."""
    sender, *others = (start_server("--shards", shards, memory="64MiB") for shards in ("2", "1", "3"))
    members = [member_of(server) for server in (sender, *others)]
    keys, since = make_keys(300), time.monotonic()
    with KVStoreClient(sender.endpoint, NAMESPACE) as client:
        for at in range(0, 300, 64):
            some = keys[at : at + 64]
            blocks = blocks_of(some, NAMESPACE.block_bytes)
            parent = keys[at - 1] if at else None
            client.set(some, blocks, parent=parent, position=at, priority=2, ttl_s=TTL_S, deferred=False)
    by_sender = [attributes_on(shard, NAMESPACE, keys) for shard in members[0].shards]
    for found in by_sender:
        assert followed(found) == order_of(keys, list(found)), "a chain is linked over its calls"
    if joins:
        plan = plan_joining({member.node for member in members[1:]}, members)
    else:
        plan = plan_leaving(members[0].node, [msgspec.structs.replace(members[0], state="draining"), *members[1:]])
    carry_out(sender, plan)
    moved: set[bytes] = set()
    for shard in (shard for member in members[1:] for shard in member.shards):
        found = attributes_on(shard, NAMESPACE, keys)
        assert_kept(found, 2, since)
        expected: dict[bytes, bytes] = {}
        for mine in by_sender:
            expected |= order_of(keys, [key for key in found if key in mine])
        assert followed(found) == expected
        moved |= set(found)
    assert len(moved) == 300 if not joins else 150 < len(moved) < 300


def test_a_repaired_block_keeps_priority_ttl_and_position(start_server: StartServer) -> None:
    """Two nodes have copies of a chain, which their shards divide differently. Each node gets its lost blocks back."""
    servers = [start_server("--shards", shards, memory="64MiB") for shards in ("2", "3")]
    keys, since = make_keys(120), time.monotonic()
    blocks = blocks_of(keys, NAMESPACE.block_bytes)
    with KVStoreClient([server.endpoint for server in servers], NAMESPACE, replicas=2) as client:
        client.set(keys, blocks, priority=1, ttl_s=TTL_S, deferred=False)
        for server in servers:
            with KVStoreClient(server.endpoint, NAMESPACE) as alone:
                assert alone.delete(keys[40:]) == 80
            out = np.empty((len(keys), NAMESPACE.block_bytes), dtype=np.uint8)

            def repaired(server: Server = server, out: npt.NDArray[np.uint8] = out) -> bool:
                return bool(client.get_into(keys, out).all() and len(held(server, keys)) == len(keys))

            wait_until(repaired, what="every block is back: each read asks one of the two nodes first")
            for shard in member_of(server).shards:
                found = attributes_on(shard, NAMESPACE, keys)
                assert_kept(found, 1, since)
                assert followed(found) == order_of(keys, list(found))


def held(server: Server, keys: Sequence[bytes]) -> set[bytes]:
    return {key for shard in member_of(server).shards for key in attributes_on(shard, NAMESPACE, keys)}


def test_copies_in_full_memory_are_evicted_tail_first(start_server: StartServer) -> None:
    """If its new shard needs room, a moved chain loses its end first, even if blocks in the middle were used."""
    sender, receiver = (start_server("--policy", "lru", memory="16MiB", segment="16MiB") for _ in range(2))
    members = [member_of(server) for server in (sender, receiver)]
    namespace = make_namespace(64 << 10, "copied")
    keys, others = make_keys(200), make_keys(156, first=1000)
    with KVStoreClient(sender.endpoint, namespace) as client:
        client.set(keys, blocks_of(keys, 64 << 10), deferred=False)
        client.get(keys[150:160])
    carry_out(
        sender, plan_leaving(members[0].node, [msgspec.structs.replace(members[0], state="draining"), members[1]])
    )
    with KVStoreClient(receiver.endpoint, namespace) as client:
        client.set(others, blocks_of(others, 64 << 10), deferred=False)
        assert client.match_prefix(keys, refresh=False) == client.contains(keys).sum() == 100


# ---- the chains' places, and what is refused -----------------------------------------------------------------------


def test_positions_skip_blocks_that_go_elsewhere() -> None:
    keys = matrix(make_keys(6))
    before = keys[[0, 0, 1, 2, 3, 5]]  # 0 <- 1 <- 2 <- 3 <- 4, and 5 without a parent
    targets = np.array([[0, NO_SHARD], [1, NO_SHARD], [NO_SHARD, NO_SHARD], [0, 1], [1, 0], [0, NO_SHARD]])
    found = places(keys, before, targets, np.array([0, 1, 3, 4, 5]))
    assert (found[:, 0] == keys[[0, 1, 0, 3, 5]]).all()
    assert (found[2, 1] == keys[1]).all() and (found[3, 1] == keys[3]).all()


def test_listing_circular_positions_ends() -> None:
    keys = matrix(make_keys(3))
    targets = np.array([[0], [NO_SHARD], [NO_SHARD]])
    assert (places(keys, keys[[1, 2, 1]], targets, np.array([0]))[0, 0] == keys[0]).all()


def test_attributes_of_the_wrong_length_are_refused_and_nothing_is_stored(server: Server) -> None:
    keys = make_keys(3)
    right = np.zeros(3, dtype=attributes_dtype(16))
    right["before"] = matrix(keys)
    right["priority"] = 255  # a value above the range counts as the highest
    blocks = blocks_of(keys, 4096)
    with RawClient(server) as raw:
        assert raw.ask(pack(HELLO, 1, PROTOCOL_VERSION, NAMESPACE.canonical()))
        fields = (False, 0, False, 0.0, False, b"", b"", 0)
        for data in (right.tobytes()[:-1], right.tobytes() + b"x", b"x"):
            answer = raw.ask(
                pack(SET, 2, 5000, 3, 16, *fields, data), b"".join(keys), b"".join(blocks), sums_of(blocks)
            )
            assert answer[:3] == [ERROR, 2, ErrorCode.PROTOCOL] and "attributes" in answer[3]
        many = make_keys(513)
        data = np.zeros(513, dtype=attributes_dtype(16)).tobytes()
        answer = raw.ask(pack(SET, 3, 5000, 513, 16, *fields, data), b"".join(many))
        assert answer[:3] == [ERROR, 3, ErrorCode.PROTOCOL] and "512" in answer[3]
        answer = raw.ask(
            pack(SET, 4, 5000, 3, 16, *fields, right.tobytes()), b"".join(keys), b"".join(blocks), sums_of(blocks)
        )
        assert answer[3] == 3, "created"
    (shard,) = member_of(server).shards
    found = attributes_on(shard, NAMESPACE, keys)
    assert {int(entry["priority"]) for entry in found.values()} == {3}
    assert followed(found) == {key: key for key in keys}
