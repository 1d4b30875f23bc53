"""Moves of a node's blocks to their next owners, between real servers whose member records the tests make."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore._cext import checksum_into
from kvstore.cluster.etcd import Drain
from kvstore.cluster.members import Member, State
from kvstore.moving.draining import Draining
from kvstore.moving.mover import REST_RATIO, Mover
from kvstore.moving.planning import MovePlan, plan_joining, plan_leaving
from kvstore.moving.progress import MoveProgress, MoveReport
from kvstore.wire import NamespaceInfo, ShardAddress
from kvstore.wire.queries import KeyArray, ShardQueries
from kvstore_client import KVStoreClient, Namespace
from tests.support.cluster import member_of, place
from tests.support.disk import disk_flags, open_client, wait_until_on, wait_until_written
from tests.support.harness import StartServer, block_of, blocks_of, make_keys, make_namespace, wait_until

ASK_S = 10.0
MOVE_S = 30.0
LRU = ("--policy", "lru")
SMALL = make_namespace(4096, "small")
LARGE = make_namespace(1 << 18, "large")


def matrix(keys: Sequence[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)


@contextmanager
def asking(shard: ShardAddress, namespace: Namespace, copies: int = 1) -> Iterator[ShardQueries]:
    with ShardQueries((shard.host, shard.port), ASK_S, namespace.canonical(), copies) as connection:
        yield connection


def owners(members: Sequence[Member], keys: Sequence[bytes], copies: int) -> list[tuple[ShardAddress, list[bytes]]]:
    """Return the shards of these members, each with the keys whose blocks it should hold."""
    placed, placement = place(members)
    replicas = placement.replicas(matrix(keys), copies)
    return [
        (shard, [keys[row] for row in np.flatnonzero((replicas == number).any(axis=1))])
        for number, (_, shard) in enumerate(placed)
    ]


def put(
    shard: ShardAddress, namespace: Namespace, keys: Sequence[bytes], copies: int = 1, damage: bool = False
) -> None:
    """Set blocks on one shard, the hottest first. `damage`: give them wrong checksums."""
    step = max(1, (4 << 20) // namespace.block_bytes)
    with asking(shard, namespace, copies) as connection:
        for at in reversed(range(0, len(keys), step)):
            some = keys[at : at + step]
            blocks = blocks_of(some, namespace.block_bytes)
            sums = np.empty(len(some), dtype=np.uint64)
            checksum_into(blocks, sums)
            reply = connection.set(matrix(some), [memoryview(block) for block in blocks], sums + np.uint64(damage))
            assert reply.error == 0


def fill(members: Sequence[Member], namespace: Namespace, keys: Sequence[bytes], copies: int = 1) -> None:
    """Set blocks on their owners."""
    for shard, some in owners(members, keys, copies):
        put(shard, namespace, some, copies)


def held(shard: ShardAddress, namespace: Namespace, keys: Sequence[bytes]) -> list[bytes]:
    """Return which of `keys` a shard has, and check their bytes."""
    found = []
    with asking(shard, namespace) as connection:
        step = max(1, (4 << 20) // namespace.block_bytes)
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            size = namespace.block_bytes
            for positions, _, _, memory in connection.get(matrix(some)):
                for number, position in enumerate(positions.tolist()):
                    assert memory[number * size : (number + 1) * size] == block_of(some[position], size)
                    found.append(some[position])
    return sorted(found)


def namespace_on(shard: ShardAddress, namespace: Namespace) -> NamespaceInfo:
    with asking(shard, namespace) as connection:
        (found,) = (some for some in connection.info().namespaces if some.id == namespace.id)
    return found


def move(
    leaving: Member, others: Sequence[Member], seconds: float = MOVE_S, stop_after: int | None = None
) -> tuple[MoveReport, list[MoveReport]]:
    """Move the blocks. Returns the final report and all reports of progress."""
    members = [msgspec.structs.replace(leaving, state="draining"), *others]
    return carry_out(leaving, plan_leaving(leaving.node, members), seconds, stop_after)


def carry_out(
    sender: Member, plan: MovePlan, seconds: float = MOVE_S, stop_after: int | None = None
) -> tuple[MoveReport, list[MoveReport]]:
    told: list[MoveReport] = []

    def progress(so_far: MoveReport) -> None:
        told.append(so_far)
        if stop_after is not None and so_far.done >= stop_after:
            mover.stop()

    mover = Mover(sender.shards, sender.node, plan, progress)
    report = mover.run(time.monotonic() + seconds)
    assert [some.done for some in told] == sorted(some.done for some in told)
    assert all(some.total == report.total for some in told) and (not told or told[-1] == report)
    return report, told


def test_a_client_of_the_remaining_nodes_reads_every_block(start_server: StartServer) -> None:
    leaving = start_server("--shards", "2", memory="128MiB")
    rest = [start_server("--shards", shards, memory="128MiB") for shards in ("1", "2")]
    members = [member_of(server) for server in (leaving, *rest)]
    small, large = make_keys(2000), make_keys(150, first=10_000)
    for namespace, keys in ((SMALL, small), (LARGE, large)):
        fill(members, namespace, keys)
    mine = sum(len(some) for keys in (small, large) for _, some in owners(members, keys, 1)[:2])
    report, told = move(members[0], members[1:])
    assert report == MoveReport(mine, mine, 0, 0) and told[0] == MoveReport(mine, 0, 0, 0)
    leaving.stop()
    for namespace, keys in ((SMALL, small), (LARGE, large)):
        with KVStoreClient([server.endpoint for server in rest], namespace) as client:
            blocks = client.get(keys).blocks
        assert [bytes(block or b"") for block in blocks] == blocks_of(keys, namespace.block_bytes)


@pytest.mark.parametrize("zones", [["", "", "", ""], ["x", "x", "y", "y"]])
def test_every_copy_is_kept(start_server: StartServer, zones: list[str]) -> None:
    servers = [start_server() for _ in zones]
    members = [member_of(server, zone=zone) for server, zone in zip(servers, zones, strict=True)]
    keys = make_keys(1200)
    fill(members, SMALL, keys, copies=2)
    (_, mine), *_ = owners(members, keys, 2)
    report, _ = move(members[0], members[1:])
    gained = 0
    for shard, some in owners(members[1:], keys, 2):
        assert held(shard, SMALL, keys) == sorted(some)
        gained += len(some)
        assert namespace_on(shard, SMALL).replicas == 2  # so that a later drain of this node knows it, too
    gained -= sum(len(some) for _, some in owners(members, keys, 2)[1:])
    assert report == MoveReport(2 * len(mine), gained, 2 * len(mine) - gained, 0)


def test_both_copies_are_made_while_their_other_holder_drains_too(start_server: StartServer) -> None:
    servers = [start_server() for _ in range(5)]
    states: list[State] = ["serving", "draining", "joining", "serving", "serving"]
    members = [member_of(server, state) for server, state in zip(servers, states, strict=True)]
    keys = make_keys(800)
    fill([members[0], members[1], members[3]], SMALL, keys, copies=2)  # as before the other nodes joined
    (_, mine), *_ = owners([members[0], members[1], members[3]], keys, 2)
    report, _ = move(members[0], members[1:])
    assert report.total == 2 * len(mine) == report.moved + report.present and report.present < len(mine)
    for shard, some in owners(members[2:], mine, 2):
        assert set(held(shard, SMALL, mine)) >= set(some), "as acknowledged: on each of its next owners"


def test_blocks_that_the_others_have_are_not_sent(start_server: StartServer) -> None:
    members = [member_of(start_server()) for _ in range(2)]
    keys = make_keys(1000)
    fill(members, SMALL, keys)
    (_, mine), _ = owners(members, keys, 1)
    put(members[1].shards[0], SMALL, mine[:300])
    with asking(members[1].shards[0], SMALL) as connection:
        before = connection.info().bytes_in
        report, _ = move(members[0], members[1:])
        assert report == MoveReport(len(mine), len(mine) - 300, 300, 0)
        assert connection.info().bytes_in - before < (len(mine) - 250) * 4096
        again, _ = move(members[0], members[1:])
        assert again == MoveReport(len(mine), 0, len(mine), 0)


def test_nodes_that_do_not_own_blocks_get_none(start_server: StartServer) -> None:
    servers = [start_server() for _ in range(4)]
    states: list[State] = ["serving", "serving", "joining", "draining"]
    members = [member_of(server, state) for server, state in zip(servers, states, strict=True)]
    keys = make_keys(1000)
    put(members[0].shards[0], SMALL, keys)
    report, _ = move(members[0], members[1:])
    (serves, of_serving), (joins, of_joining) = owners(members[1:3], keys, 1)
    assert held(serves, SMALL, keys) == sorted(of_serving)
    assert held(joins, SMALL, keys) == sorted(of_joining), "though it may be filled already"
    assert report == MoveReport(len(keys), len(keys), 0, 0)
    assert held(members[3].shards[0], SMALL, keys) == []


def test_the_hottest_blocks_go_first(start_server: StartServer) -> None:
    members = [member_of(start_server(*LRU, memory="128MiB")) for _ in range(3)]
    small, large = make_keys(8000), make_keys(380, first=10_000)
    for namespace, keys in ((SMALL, small), (LARGE, large)):
        put(members[0].shards[0], namespace, keys)
    for stop_after in (700, len(small) + 30):
        report, _ = move(members[0], members[1:], stop_after=stop_after)
        assert stop_after <= report.moved + report.present < report.total and not report.failed
        for namespace, keys in ((SMALL, small), (LARGE, large)):
            there = {key for member in members[1:] for key in held(member.shards[0], namespace, keys)}
            batch = (4 << 20) // namespace.block_bytes  # only a part of the last batch may be there
            assert there <= set(keys[: len(there) + batch]), f"not the hottest of {namespace}"
    assert len(there) >= 30


@pytest.mark.exclusive
def test_a_move_ends_at_its_deadline(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    servers = [start_server(memory="128MiB") for _ in range(2)]
    members = [member_of(server) for server in servers]
    put(members[0].shards[0], LARGE, make_keys(300))
    before = time.monotonic()
    with servers[1].stopped():
        report, _ = move(members[0], members[1:], seconds=1.0)
    assert 0.9 < time.monotonic() - before < 2.0
    assert report.total > 0 and report.moved + report.present + report.failed == 0, "what was not tried did not fail"
    assert not caplog.records
    assert move(members[0], members[1:], seconds=-1.0)[0] == MoveReport(0, 0, 0, 0)


def test_a_move_can_be_stopped(start_server: StartServer) -> None:
    servers = [start_server(memory="128MiB") for _ in range(2)]
    members = [member_of(server) for server in servers]
    put(members[0].shards[0], LARGE, make_keys(300))
    told: list[MoveReport] = []
    mover = Mover(members[0].shards, members[0].node, plan_leaving(members[0].node, members), told.append)
    reports: list[MoveReport] = []
    with servers[1].stopped():
        thread = threading.Thread(target=lambda: reports.append(mover.run(time.monotonic() + 60)))
        thread.start()
        wait_until(lambda: told, what="all is listed")
        time.sleep(0.1)  # so that a call is probably in progress
        before = time.monotonic()
        mover.stop()
        thread.join(20)
    assert reports and time.monotonic() - before < 20.0, "it need not go on until its deadline"
    assert reports[0].total > 0 and reports[0].moved == 0


def test_a_dead_node_is_left_out(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    servers = [start_server("--shards", "2"), start_server(), start_server()]
    members = [member_of(server) for server in servers]
    keys = make_keys(3000)
    fill(members, SMALL, keys)
    mine = [key for _, some in owners(members, keys, 1)[:2] for key in some]
    (_, first), (_, second) = owners(members[1:], mine, 1)
    servers[2].kill()
    with caplog.at_level(logging.WARNING):
        report, _ = move(members[0], members[1:])
    assert report == MoveReport(len(mine), len(first), 0, len(second))
    assert set(held(members[1].shards[0], SMALL, mine)) == set(first)
    (record,) = caplog.records
    assert members[2].shards[0].name in record.getMessage()


def test_a_failing_shard_of_its_own_costs_only_its_blocks(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    members = [member_of(start_server()) for _ in range(2)]
    keys = make_keys(1000)
    fill(members, SMALL, keys)
    (_, mine), _ = owners(members, keys, 1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = ShardAddress("gone", "127.0.0.1", nobody.getsockname()[1], 1.0)  # without weight, so it owned nothing
        leaving = msgspec.structs.replace(members[0], shards=[gone, *members[0].shards])
        with caplog.at_level(logging.WARNING):
            report, _ = move(leaving, members[1:])
    assert report == MoveReport(len(mine), len(mine), 0, 0)
    assert any("gone" in record.getMessage() for record in caplog.records)


def test_an_empty_node_moves_nothing(start_server: StartServer) -> None:
    members = [member_of(start_server()) for _ in range(2)]
    report, told = move(members[0], members[1:])
    assert report == MoveReport(0, 0, 0, 0) and told == [MoveReport(0, 0, 0, 0)]


def test_the_last_node_keeps_its_blocks(start_server: StartServer) -> None:
    member = member_of(start_server())
    put(member.shards[0], SMALL, make_keys(10))
    assert move(member, []) == (MoveReport(0, 0, 0, 0), [])


def test_blocks_with_wrong_bytes_are_not_moved(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    members = [member_of(start_server()) for _ in range(2)]
    keys = make_keys(900)
    (_, mine), _ = owners(members, keys, 1)
    good, bad = mine[20:], mine[:20]
    put(members[0].shards[0], SMALL, good)
    put(members[0].shards[0], SMALL, bad, damage=True)
    report, _ = move(members[0], members[1:])
    assert report == MoveReport(len(mine), len(good), 0, len(bad))
    assert held(members[1].shards[0], SMALL, mine) == sorted(good)
    assert "20 block(s) are damaged" in caplog.text


def test_a_namespace_that_does_not_fit_does_not_block_others(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    members = [member_of(start_server(segment="4MiB")), member_of(start_server(segment="1MiB"))]
    huge = make_namespace(2 << 20, "huge")
    keys, blocks = make_keys(200), make_keys(10, first=1000)
    put(members[0].shards[0], huge, blocks)
    put(members[0].shards[0], SMALL, keys)
    report, _ = move(members[0], members[1:])
    assert report == MoveReport(len(keys) + len(blocks), len(keys), 0, len(blocks))
    assert held(members[1].shards[0], SMALL, keys) == sorted(keys)
    assert len(caplog.records) == 1 and "--segment" in caplog.text


def test_blocks_that_are_only_on_disk_are_moved(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(*disk_flags(tmp_path / "disk"), *LRU, memory="16MiB")
    namespace = make_namespace(64 << 10, "disk")
    keys = make_keys(500)  # twice what memory holds
    with open_client(server, namespace) as client:
        wait_until_on(client)
        members = [member_of(server), member_of(start_server(memory="128MiB"))]
        put(members[0].shards[0], namespace, keys)
        wait_until_written(client)
        report, _ = move(members[0], members[1:])
    assert report == MoveReport(len(keys), len(keys), 0, 0)
    assert held(members[1].shards[0], namespace, keys) == sorted(keys)


# ---- to nodes that join --------------------------------------------------------------------------------------------


def test_a_joining_node_gets_its_share_from_the_holders(start_server: StartServer) -> None:
    members = [member_of(start_server()) for _ in range(3)]
    joins = members[2]
    keys = make_keys(2000)
    fill(members[:2], SMALL, keys)
    ((_, mine),) = owners(members, keys, 1)[2:]
    plan = plan_joining({joins.node}, members)
    reports = [carry_out(member, plan)[0] for member in members[:2]]
    assert sum(report.moved for report in reports) == len(mine)
    assert all(report == MoveReport(report.moved, report.moved, 0, 0) and report.moved for report in reports)
    assert held(joins.shards[0], SMALL, keys) == sorted(mine)
    assert carry_out(joins, plan)[0] == MoveReport(0, 0, 0, 0), "who joined has nothing to give to itself"


def test_a_copy_on_two_nodes_is_sent_once(start_server: StartServer) -> None:
    members = [member_of(start_server(memory="128MiB")) for _ in range(3)]
    joins = members[2]
    namespace = make_namespace(64 << 10, "copies")
    keys = make_keys(900)
    fill(members[:2], namespace, keys, copies=2)  # each node has all blocks
    lost = set(keys[::10])
    with KVStoreClient(f"tcp://{members[0].shards[0].host}:{members[0].shards[0].port}", namespace) as client:
        client.delete(sorted(lost))
    ((shard, mine),) = owners(members, keys, 2)[2:]
    plan = plan_joining({joins.node}, members)
    reports: list[MoveReport] = []
    threads = [
        threading.Thread(target=lambda member=member: reports.append(carry_out(member, plan)[0]))
        for member in members[:2]
    ]
    with asking(shard, namespace) as connection:
        before = connection.info().bytes_in
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        received = connection.info().bytes_in - before
    assert sum(report.moved for report in reports) == len(mine)
    assert held(shard, namespace, keys) == sorted(mine)
    assert received < 1.5 * len(mine) * namespace.block_bytes
    assert namespace_on(shard, namespace).replicas == 2


def test_joining_sends_nothing_more_to_a_full_shard(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    giving = member_of(start_server(memory="256MiB", segment="1MiB"))
    small = member_of(start_server(*LRU, memory="16MiB", segment="1MiB"))
    roomy = member_of(start_server(memory="256MiB", segment="1MiB"))
    # All have the same weight, so each should have a third.
    members = [
        msgspec.structs.replace(some, shards=[msgspec.structs.replace(shard, weight=1.0) for shard in some.shards])
        for some in (giving, small, roomy)
    ]
    keys = make_keys(600)
    put(members[0].shards[0], LARGE, keys)  # 150 MiB
    its_own = make_keys(8, first=10_000)
    put(small.shards[0], LARGE, its_own)
    with caplog.at_level(logging.INFO, "kvstore.moving"):
        report, _ = carry_out(members[0], plan_joining({small.node, roomy.node}, members))
    _, (_, to_small), (_, to_roomy) = owners(members, keys, 1)
    there = held(small.shards[0], LARGE, keys)
    assert report == MoveReport(len(to_small) + len(to_roomy), len(there) + len(to_roomy), 0, 0)
    assert 16 <= len(there) <= 56 < len(to_small)
    assert set(there) == set(to_small[: len(there)]), "the hottest"
    assert held(roomy.shards[0], LARGE, keys) == sorted(to_roomy)
    assert (
        held(small.shards[0], LARGE, its_own) == sorted(its_own) and namespace_on(small.shards[0], LARGE).evicted == 0
    )
    assert [record.getMessage() for record in caplog.records].count(
        f"moving: shard {small.shards[0].name} is full: nothing more is copied to it"
    ) == 1


def test_leaving_sends_to_full_shards_too(start_server: StartServer) -> None:
    members = [member_of(start_server(memory="128MiB")), member_of(start_server(*LRU, memory="16MiB"))]
    keys = make_keys(200)
    put(members[0].shards[0], LARGE, keys)
    assert move(members[0], members[1:])[0] == MoveReport(len(keys), len(keys), 0, 0)


# ---- pass after pass -----------------------------------------------------------------------------------------------


def drain(leaving: Member, others: Callable[[], Sequence[Member]], seconds: float = MOVE_S) -> Drain:
    """Drain a node. `others` is called before each pass. Returns the progress."""
    told: list[str] = []
    draining = Draining(
        leaving.node,
        leaving.shards,
        Drain("", seconds),
        lambda: told.append("announced"),
        lambda: [msgspec.structs.replace(leaving, state="draining"), *others()],
        lambda: told.append("left"),
    )
    draining.start()
    draining.join(seconds + 10)
    assert not draining.is_alive() and told == ["announced", "left"]
    return draining.progress


def test_a_drain_rechecks_for_late_sets_and_dead_nodes(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [start_server() for _ in range(3)]
    members = [member_of(server) for server in servers]
    keys, late = make_keys(600), make_keys(50, first=5000)
    put(members[0].shards[0], SMALL, keys)
    servers[2].kill()
    passes: list[Sequence[Member]] = []

    def others() -> Sequence[Member]:
        if passes:  # like a client with the old view
            put(members[0].shards[0], SMALL, late)
        passes.append(members[1:] if not passes else members[1:2])
        return passes[-1]

    with caplog.at_level(logging.WARNING):
        progress = drain(members[0], others)
    assert held(members[1].shards[0], SMALL, [*keys, *late]) == sorted([*keys, *late])
    count = len(keys) + len(late)
    assert (progress.total, progress.done, progress.moved) == (count, count, count)
    assert (progress.present, progress.failed, len(passes)) == (0, 0, 3)


def test_a_drain_sends_every_block_to_a_full_shard_once(start_server: StartServer) -> None:
    members = [member_of(start_server(memory="128MiB")), member_of(start_server(*LRU, memory="16MiB"))]
    keys = make_keys(200)
    put(members[0].shards[0], LARGE, keys)
    progress = drain(members[0], lambda: members[1:])
    assert (progress.total, progress.moved, progress.present, progress.failed) == (200, 200, 0, 0)


def test_a_drain_gives_up_on_permanent_failures_and_reports_them(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.moving.draining.FAILING_S", 0.5)
    members = [member_of(start_server()) for _ in range(2)]
    good, bad = make_keys(100), make_keys(20, first=1000)
    put(members[0].shards[0], SMALL, good)
    put(members[0].shards[0], SMALL, bad, damage=True)
    progress = drain(members[0], lambda: members[1:])
    assert (progress.total, progress.done, progress.moved, progress.failed) == (120, 120, 100, 20)


@pytest.mark.exclusive
def test_a_background_move_works_a_quarter_of_the_time_and_can_stop(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [member_of(start_server(memory="128MiB")) for _ in range(2)]
    put(members[0].shards[0], LARGE, make_keys(300))
    worked: list[float] = []
    rested: list[float] = []

    rest = MoveProgress.rest

    def timed(progress: MoveProgress, began: float) -> None:
        ended = time.monotonic()
        worked.append(ended - began)
        rest(progress, began)
        rested.append(time.monotonic() - ended)

    monkeypatch.setattr(MoveProgress, "rest", timed)
    plan = plan_joining({members[1].node}, members)
    began = time.monotonic()
    report = Mover(members[0].shards, members[0].node, plan, lambda report: None).run(began + MOVE_S)
    took = time.monotonic() - began
    assert report.moved == report.total > 64
    assert sum(rested) >= REST_RATIO * sum(worked)
    assert sum(worked) + sum(rested) > 0.8 * took, "it does not work besides"
    mover = Mover(members[0].shards, members[0].node, plan, lambda report: None)
    mover.progress.deadline = time.monotonic() + 60
    threading.Timer(0.2, mover.stop).start()
    began = time.monotonic()
    mover.progress.rest(began - 10)
    assert time.monotonic() - began < 5
