"""Common parts of the tests of clusters under load: the cluster, and checks of the load's calls. The fixtures are in
conftest.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.chaos.cluster_clients import Clients, Excuse, key_array
from tests.chaos.cluster_load import Call, Miss
from tests.support.cluster import Site, new_owners, owner_nodes

NODES = ("n1", "n2", "n3", "n4")
RECOVERY_S = 3.0
LATE_S = 0.2  # by how much a call may exceed its deadline
HIT_RATE = 0.02  # by how much the hit rate may fall
TIMEOUT_S = 2.0
GRACE_S = 6
STEADY_S = 1.0  # seconds of load before the event
WATCH_S = 1.0  # seconds of load after the clients should have recovered

FULL = os.environ.get("KVSTORE_CHAOS") == "full"

one_copy = pytest.mark.parametrize("site", [1], indirect=True, ids=["one-copy"])
two_copies = pytest.mark.parametrize("site", [2], indirect=True, ids=["two-copies"])
_both = pytest.mark.parametrize("site", [1, 2], indirect=True, ids=["one-copy", "two-copies"])
any_copies = _both if FULL else two_copies


class Copies(Site):
    """A site, and how many copies its clients keep of each block."""

    replicas = 1


def owners_of(site: Copies) -> Callable[[Miss], set[str]]:
    """Return a function that returns the nodes on which a block is set with the present members."""
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
    """Return an excuse for misses of blocks that were stored only on this node."""
    return lambda call, miss: miss.stored_at <= stored_before and owners(miss) == {node}


def assert_over_it(clients: Clients, since: float, excuse: Excuse, what: str) -> None:
    """Check that an event at `since` made calls fail for at most `RECOVERY_S`."""
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


def assert_hit_rate_kept(clients: Clients, since: float) -> None:
    rates = clients.hit_rates(since, time.monotonic())
    print(f"hit rates: {[round(rate, 3) for rate in rates]}")
    assert min(rates) >= 1.0 - HIT_RATE, describe(clients.troubles(since, time.monotonic(), no_excuse), since)
