"""A cluster of four nodes with addresses of their own, under load from two clients, while things go wrong.

Whatever happens: no wrong byte, no exception, no call that ends later than its deadline and a moment, and clients are
over it soon: from then on nothing fails, and nothing is missed but what was lost with a node. Each test ends with the
four nodes running again. KVSTORE_CHAOS=full runs every scenario with one and with two copies, and kills every node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.cluster.members import Membership
from tests.chaos.cluster_clients import Clients, Excuse, key_array
from tests.chaos.cluster_load import Call, Miss
from tests.support.cluster import SERVE_S, Site, new_owners, owner_nodes
from tests.support.harness import make_keys
from tests.support.network import need, unavailable

NODES = ("n1", "n2", "n3", "n4")
RECOVERY_S = 3.0
LATE_S = 0.2  # what a call may take beyond its deadline
HIT_RATE = 0.02  # what it may fall by
TIMEOUT_S = 2.0
GRACE_S = 6
STEADY_S = 1.0  # load before something happens
WATCH_S = 1.0  # load after clients should be over it

FULL = os.environ.get("KVSTORE_CHAOS") == "full"

one_copy = pytest.mark.parametrize("site", [1], indirect=True, ids=["one-copy"])
two_copies = pytest.mark.parametrize("site", [2], indirect=True, ids=["two-copies"])
_both = pytest.mark.parametrize("site", [1, 2], indirect=True, ids=["one-copy", "two-copies"])
any_copies = _both if FULL else two_copies
pytestmark = pytest.mark.exclusive  # calls must end within LATE_S of their deadline


class Copies(Site):
    """A site whose clients keep so many copies."""

    replicas = 1


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    need(unavailable())
    folder = tmp_path_factory.mktemp("cluster")
    with Copies(folder, nodes=len(NODES), grace_seconds=GRACE_S, drain_seconds=5) as site:
        site.replicas = request.param
        yield site


@pytest.fixture
def clients(site: Copies, request: pytest.FixtureRequest) -> Iterator[Clients]:
    """The load. What must hold in every test is checked at its end."""
    site.mend()
    # With two copies nothing may be lost, and a block set again would hide that it was.
    recompute = site.replicas == 1
    with Clients(site, request.node.name, site.replicas, timeout_s=TIMEOUT_S, recompute=recompute) as clients:
        yield clients
    latest = clients.latest()
    print(f"{len(clients.calls())} calls, the latest a {latest.op}, {latest.late_s:+.3f} s from its deadline")
    assert not clients.wrong()
    assert not clients.raised()
    assert latest.late_s <= LATE_S, latest
    for node in site.cluster.nodes.values():
        assert "Traceback" not in node.log_text(), node.log_text()[-3000:]


def owners_of(site: Copies) -> Callable[[Miss], set[str]]:
    """Which nodes a block is set on, under the present members."""
    membership = site.cluster.membership()
    assert len(membership.members) == len(NODES)
    known: dict[tuple[int, int], set[str]] = {}

    def owners(miss: Miss) -> set[str]:
        block = miss.chain, miss.position
        if block not in known:
            nodes = owner_nodes(new_owners(membership), key_array([miss]), site.replicas)
            known[block] = set(nodes[0].tolist())
        return known[block]

    return owners


def no_excuse(call: Call, miss: Miss) -> bool:
    return False


def only_on(node: str, owners: Callable[[Miss], set[str]], stored_before: float = float("inf")) -> Excuse:
    """Misses of what was stored on this node and no other."""
    return lambda call, miss: miss.stored_at <= stored_before and owners(miss) == {node}


def assert_over_it(clients: Clients, since: float, excuse: Excuse, what: str) -> None:
    """What began at `since` no longer makes calls fail."""
    now = time.monotonic()
    troubles = clients.troubles(since, now, excuse)
    took_s = max((call.at - since for call in troubles), default=0.0)
    failed = sum(call.errors > 0 for call in troubles)
    print(f"{what}: {failed} sets failed, {len(troubles) - failed} reads missed, the last after {took_s:.2f} s")
    assert took_s <= RECOVERY_S, describe(troubles, since)


def assert_nothing_fails(clients: Clients, since: float, excuse: Excuse = no_excuse) -> None:
    troubles = clients.troubles(since, time.monotonic(), excuse)
    assert not troubles, describe(troubles, since)


def assert_no_errors(clients: Clients, since: float) -> None:
    troubles = [call for call in clients.calls() if call.at >= since and call.errors]
    assert not troubles, describe(troubles, since)


def describe(troubles: list[Call], since: float) -> str:
    return "\n".join(
        f"after {call.at - since:.2f} s: {call.op} took {call.took_s:.2f} s, {call.errors} errors, "
        f"{len(call.missed)} of {call.keys} missed, e.g. {call.missed[:2]}"
        for call in troubles[-10:]
    )


def assert_all_there(clients: Clients) -> None:
    for check in clients.check():
        assert check.acknowledged > 500 and not check.missing, f"{len(check.missing)} of {check.acknowledged}"


# ---- nodes that come and go ----------------------------------------------------------------------------------------


def assert_hit_rate_kept(clients: Clients, since: float) -> None:
    rates = clients.hit_rates(since, time.monotonic())
    print(f"hit rates: {[round(rate, 3) for rate in rates]}")
    assert min(rates) >= 1.0 - HIT_RATE, describe(clients.troubles(since, time.monotonic(), no_excuse), since)


@two_copies
def test_a_rolling_restart_under_load_costs_no_error_and_no_hits(site: Copies, clients: Clients) -> None:
    # The first test with two copies: what a drain moves is the latest where it arrives, so in full memory it
    # takes the place of replicas that nobody reads.
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
def test_a_fifth_node_takes_its_share_of_the_keys_and_costs_no_hits(site: Copies, clients: Clients) -> None:
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
    """By key, of 20,000: the node that owns it."""
    keys = np.frombuffer(b"".join(make_keys(20_000)), dtype=np.uint8).reshape(-1, 16)
    return owner_nodes(new_owners(membership), keys, 1)[:, 0]


def stored_blocks(site: Copies, node: str) -> int:
    """How many blocks a node has."""
    from kvstore.wire.asking import Asking

    with Asking((site.network.address(node), 7070), 5.0) as asking:
        return sum(namespace.blocks for namespace in asking.info().namespaces)


@one_copy
def test_nodes_that_join_one_after_the_other_find_what_the_first_was_given(site: Copies, clients: Clients) -> None:
    owners = owners_of(site)
    site.cluster.nodes["n3"].kill()
    lost = only_on("n3", owners, stored_before=time.monotonic() + 0.1)
    site.add("n3", grace_seconds=30)
    site.cluster.wait_for_members(*NODES, deadline_s=SERVE_S)
    clients.run_for(4.0)  # what was lost is set again, on n3
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


# ---- nodes that die or are away ------------------------------------------------------------------------------------


def kill_under_load(site: Copies, clients: Clients, victim: str) -> None:
    owners = owners_of(site)
    start = time.monotonic()
    assert_nothing_fails(clients, start - STEADY_S)
    site.cluster.nodes[victim].kill()
    lost = only_on(victim, owners, stored_before=time.monotonic() + 0.1)
    clients.run_for(RECOVERY_S + WATCH_S)
    assert_over_it(clients, start, lost, f"{victim} killed")


@one_copy
def test_a_killed_node_costs_its_share_of_the_blocks_and_no_more(site: Copies, clients: Clients) -> None:
    clients.run_for(STEADY_S)
    kill_under_load(site, clients, "n2")


@two_copies
@pytest.mark.parametrize("victim", NODES if FULL else NODES[:1])
def test_no_acknowledged_block_is_lost_whichever_node_dies(site: Copies, clients: Clients, victim: str) -> None:
    clients.run_for(STEADY_S)
    kill_under_load(site, clients, victim)
    assert_all_there(clients)


@contextmanager
def away(site: Copies, node: str, how: str) -> Iterator[None]:
    network = site.network
    if how == "stopped":
        with site.cluster.nodes[node].stopped():
            yield
    elif how == "cut off":
        network.cut(node)
        try:
            yield
        finally:
            network.heal(node)
    else:
        network.separate(node, "etcd")
        try:
            yield
        finally:
            network.reunite(node, "etcd")


@contextmanager
def slow_and_lossy(site: Copies, node: str) -> Iterator[None]:
    site.network.impair(node, delay_s=0.2, loss=0.05)
    try:
        yield
    finally:
        site.network.heal(node)


@any_copies
@pytest.mark.parametrize(
    ("node", "how"), [("n1", "stopped"), ("n2", "cut off"), ("n3", "separated from etcd")], ids=lambda value: value
)
def test_a_node_that_was_away_rejoins_with_its_blocks(site: Copies, clients: Clients, node: str, how: str) -> None:
    clients.run_for(STEADY_S)
    owners = owners_of(site)
    start = time.monotonic()
    assert_nothing_fails(clients, start - STEADY_S)
    with away(site, node, how):
        clients.run_for(RECOVERY_S + WATCH_S)
        site.cluster.wait_until(lambda states: node not in states, 1.0, f"{node} is no member")
        lost = only_on(node, owners, stored_before=start + RECOVERY_S)
        assert_over_it(clients, start, lost, f"{node} {how}")
    site.cluster.wait_for_members(*NODES, deadline_s=10.0)
    back = time.monotonic()
    clients.run_for(RECOVERY_S + WATCH_S)
    assert_over_it(clients, back, no_excuse, f"{node} back")
    if site.replicas == 2:
        assert_all_there(clients)


@any_copies
def test_a_slow_and_lossy_node_delays_only_what_needs_it(site: Copies, clients: Clients) -> None:
    clients.run_for(STEADY_S)
    owners = owners_of(site)
    start = time.monotonic()
    with slow_and_lossy(site, "n4"):
        clients.run_for(4.0)
        rates = clients.hit_rates(start, time.monotonic())
        took_s = np.array([call.took_s for call in clients.calls() if call.at >= start + 1.0])
        print(f"hit rates with a slow node: {[round(rate, 3) for rate in rates]}")
        median_s, slowest_s = np.quantile(took_s, [0.5, 0.99])
        print(f"calls took {median_s:.3f} s in the median, {slowest_s:.3f} s at the 99th percentile")
        troubles = clients.troubles(start, time.monotonic(), only_on("n4", owners))
        assert not [call for call in troubles if call.missed], describe(troubles, start)
    healed = time.monotonic()
    site.cluster.wait_for_members(*NODES, deadline_s=10.0)
    clients.run_for(RECOVERY_S + WATCH_S)
    assert_over_it(clients, healed, no_excuse, "n4 healed")
    if site.replicas == 2:
        assert_all_there(clients)


# ---- without etcd --------------------------------------------------------------------------------------------------


@any_copies
def test_without_etcd_everybody_serves_on_and_catches_up_when_it_is_back(site: Copies, clients: Clients) -> None:
    clients.run_for(STEADY_S)
    start = time.monotonic()
    if site.replicas == 1:
        site.etcd.kill()
    else:
        site.etcd.stop()
    clients.run_for(4.0)  # twice a lease's time
    site.etcd.restart()
    clients.run_for(1.5)
    assert_nothing_fails(clients, start)
    site.cluster.wait_for_members(*NODES, deadline_s=5.0)
    kill_under_load(site, clients, "n3")
