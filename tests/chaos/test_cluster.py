"""A cluster of four nodes with addresses of their own, under load from two clients, while nodes join and leave.

In every test there is no wrong byte and no exception, and no call ends more than a moment after its deadline. Clients
recover within seconds: after that no call fails, and only blocks lost with a node are missed. Each test ends with the
four nodes running again. KVSTORE_CHAOS=full runs every scenario with one and with two copies, and kills every node.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvstore.cluster.members import Membership
from tests.chaos.cluster_clients import Clients
from tests.chaos.scenario import (
    NODES,
    RECOVERY_S,
    STEADY_S,
    WATCH_S,
    Copies,
    any_copies,
    assert_all_there,
    assert_hit_rate_kept,
    assert_no_errors,
    assert_nothing_fails,
    one_copy,
    only_on,
    owners_of,
    two_copies,
)
from tests.support.cluster import SERVE_S, new_owners, owner_nodes
from tests.support.harness import make_keys

pytestmark = pytest.mark.exclusive  # calls must end within LATE_S of their deadline


@two_copies
def test_a_rolling_restart_under_load_costs_no_error_and_no_hits(site: Copies, clients: Clients) -> None:
    # This must be the first test with two copies, while memory is not full. Blocks moved by a drain count as the most
    # recently used ones at their destination; in full memory they would displace replicas that are not read.
    clients.run_for(STEADY_S)
    start = time.monotonic()
    for name in NODES:
        assert site.cluster.nodes[name].stop() == 0
        clients.run_for(0.1)
        site.cluster.nodes[name].restart()
        site.cluster.wait_for_members(*NODES, deadline_s=10.0)
    clients.run_for(WATCH_S)
    print(f"all restarted in {time.monotonic() - start:.1f} s")
    assert_no_errors(clients, start)
    assert_hit_rate_kept(clients, start - STEADY_S / 2)
    assert_all_there(clients)


@any_copies
def test_a_fifth_node_takes_its_share_of_keys_without_lost_hits(site: Copies, clients: Clients) -> None:
    site.cluster.wait_for(SERVE_S, **dict.fromkeys(NODES, "serving"))
    clients.run_for(STEADY_S)
    before = site.cluster.membership()
    start = time.monotonic()
    site.add("n5", grace_seconds=60)
    site.cluster.wait_for_members(*NODES, "n5", deadline_s=SERVE_S)
    clients.run_for(4.0)
    assert site.cluster.states()["n5"] == "joining"
    after = site.cluster.membership()
    moved = owners_of_many(before) != owners_of_many(after)
    print(f"{moved.mean():.1%} of the keys have another owner")
    assert 0.1 < moved.mean() <= 1 / 5 + 0.03
    assert (owners_of_many(after)[moved] == "n5").all()
    assert_hit_rate_kept(clients, start - STEADY_S / 2)
    assert_no_errors(clients, start)
    blocks = stored_blocks(site, "n5")
    print(f"n5 has {blocks} blocks")
    assert blocks > 0


def owners_of_many(membership: Membership) -> np.ndarray:
    """Return for each of 20,000 keys the node that owns it."""
    keys = np.frombuffer(b"".join(make_keys(20_000)), dtype=np.uint8).reshape(-1, 16)
    return owner_nodes(new_owners(membership), keys, 1)[:, 0]


def stored_blocks(site: Copies, node: str) -> int:
    """Return how many blocks a node has."""
    from kvstore.wire.queries import ShardQueries

    with ShardQueries((site.network.address(node), 7070), 5.0) as asking:
        return sum(namespace.blocks for namespace in asking.info().namespaces)


@one_copy
def test_nodes_that_join_in_succession_find_the_first_ones_blocks(site: Copies, clients: Clients) -> None:
    owners = owners_of(site)
    site.cluster.nodes["n3"].kill()
    lost = only_on("n3", owners, stored_before=time.monotonic() + 0.1)
    site.add("n3", grace_seconds=30)
    site.cluster.wait_for_members(*NODES, deadline_s=SERVE_S)
    clients.run_for(4.0)  # lost blocks are set again, on n3
    start = time.monotonic()
    site.add("n6", grace_seconds=60)
    site.cluster.wait_for_members(*NODES, "n6", deadline_s=SERVE_S)
    assert site.cluster.states()["n3"] == "joining"
    clients.run_for(4.0)
    assert_nothing_fails(clients, start, lost)


@any_copies
def test_a_drained_node_leaves_without_an_error_or_a_miss(site: Copies, clients: Clients) -> None:
    clients.run_for(STEADY_S)
    start = time.monotonic()
    drained = site.run("drain", "n4", "--endpoint", site.cluster.url, "--seconds", "20")
    assert drained.returncode == 0, drained.stdout + drained.stderr
    print(drained.stdout.strip()[-300:])
    site.cluster.wait_for_members("n1", "n2", "n3", deadline_s=1.0)
    clients.run_for(RECOVERY_S)
    assert_no_errors(clients, start)
    assert_hit_rate_kept(clients, start - STEADY_S / 2)
    assert site.cluster.nodes["n4"].running
    if site.replicas == 2:
        assert_all_there(clients)
