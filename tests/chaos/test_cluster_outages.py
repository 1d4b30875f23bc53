"""The cluster of test_cluster.py, under the same load, while nodes die, hang or are cut off, and while etcd is down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.chaos.cluster_clients import Clients
from tests.chaos.scenario import (
    FULL,
    NODES,
    RECOVERY_S,
    STEADY_S,
    WATCH_S,
    Copies,
    any_copies,
    assert_all_there,
    assert_nothing_fails,
    assert_over_it,
    describe,
    no_excuse,
    one_copy,
    only_on,
    owners_of,
    two_copies,
)

pytestmark = pytest.mark.exclusive  # calls must end within LATE_S of their deadline


def kill_under_load(site: Copies, clients: Clients, victim: str) -> None:
    owners = owners_of(site)
    start = time.monotonic()
    assert_nothing_fails(clients, start - STEADY_S)
    site.cluster.nodes[victim].kill()
    lost = only_on(victim, owners, stored_before=time.monotonic() + 0.1)
    clients.run_for(RECOVERY_S + WATCH_S)
    assert_over_it(clients, start, lost, f"{victim} killed")


@one_copy
def test_a_killed_node_costs_only_its_share_of_the_blocks(site: Copies, clients: Clients) -> None:
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
def test_a_slow_and_lossy_node_delays_only_calls_that_need_it(site: Copies, clients: Clients) -> None:
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
def test_without_etcd_all_serve_on_and_catch_up_later(site: Copies, clients: Clients) -> None:
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
