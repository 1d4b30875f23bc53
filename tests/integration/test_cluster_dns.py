"""A cluster with a DNS name: the nodes are real, and each test decides which addresses the name has."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.cluster import dns
from kvstore.cluster.following import Follower
from kvstore.cluster.members import DirectoryError, Membership
from tests.support.harness import Server, StartServer, wait_until

NAME = "kvstore.test"


class Name:
    """Resolves `NAME` to the addresses that the test sets, or raises the exception that it sets."""

    def __init__(self) -> None:
        self.addresses: list[str] | OSError = []
        self._ask = socket.getaddrinfo

    def __call__(self, host: Any, *arguments: Any, **options: Any) -> Any:
        if host != NAME:
            return self._ask(host, *arguments, **options)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return [found for address in self.addresses for found in self._ask(address, *arguments, **options)]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Name:
    """The name. It is resolved, and nodes are asked, every few tenths of a second."""
    name = Name()
    monkeypatch.setattr(socket, "getaddrinfo", name)
    monkeypatch.setattr(dns, "RESOLVE_S", (0.1, 0.2))
    monkeypatch.setattr(dns, "RESOLVE_EVERY_S", (0.2, 0.3))
    monkeypatch.setattr(dns, "GRACE_S", 2.0)
    return name


@pytest.fixture
def nodes(start_server: StartServer) -> list[Server]:
    """Two nodes: 127.0.0.1 and 127.0.0.2, on one port."""
    first = start_server("--node-id", "a", "--zone", "x", "--shards", "1")
    return [first, start_server("--node-id", "b", "--zone", "y", "--host", "127.0.0.2", "--port", str(first.port))]


class Following:
    """A follower and everything that it reported."""

    def __init__(self, url: str) -> None:
        self.views: list[Membership] = []
        self.follower = Follower(url, self.views.append, name="test")

    def __enter__(self) -> Following:
        self.follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()

    def states(self) -> dict[str, str]:
        return {member.node: member.state for member in self.views[-1].members} if self.views else {}


@pytest.fixture
def following(nodes: list[Server], name: Name) -> Iterator[Following]:
    following = Following(f"dns://{NAME}:{nodes[0].port}")
    yield following
    following.follower.close()


def test_each_address_is_a_node_that_identifies_itself(nodes: list[Server], name: Name, following: Following) -> None:
    name.addresses = ["127.0.0.2", "127.0.0.1"]
    with following:
        view = following.follower.wait(5)
        port = nodes[0].port
        assert [
            (m.node, m.state, m.zone, m.shards[0].name, m.shards[0].host, m.shards[0].port) for m in view.members
        ] == [
            ("a", "serving", "x", "a/0", "127.0.0.1", port),
            ("b", "serving", "y", "b/0", "127.0.0.2", port),
        ]


def test_a_new_address_joins_and_then_serves(name: Name, following: Following) -> None:
    name.addresses = ["127.0.0.1"]
    with following:
        following.follower.wait(5)
        name.addresses = ["127.0.0.1", "127.0.0.2"]
        wait_until(lambda: following.states() == {"a": "serving", "b": "joining"})
        wait_until(lambda: following.states() == {"a": "serving", "b": "serving"})
        name.addresses = ["127.0.0.2"]
        wait_until(lambda: following.states() == {"b": "serving"})
        epochs = [view.epoch for view in following.views]
        assert epochs == sorted(set(epochs))


def test_an_unresponsive_node_is_removed_and_later_joins_again(
    nodes: list[Server], name: Name, following: Following
) -> None:
    name.addresses = ["127.0.0.1", "127.0.0.2"]
    with following:
        following.follower.wait(5)
        nodes[1].kill()
        wait_until(lambda: following.states() == {"a": "serving"})
        nodes[1].restart()
        wait_until(lambda: following.states() == {"a": "serving", "b": "joining"})


def test_an_unresolvable_name_removes_no_node(
    name: Name, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    name.addresses = ["127.0.0.1"]
    with following:
        following.follower.wait(5)
        name.addresses = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        wait_until(lambda: "Temporary failure" in following.follower.lost)
        assert following.states() == {"a": "serving"}
        name.addresses = ["127.0.0.1"]
        wait_until(lambda: not following.follower.lost)
        assert len(following.views) == 1
    assert caplog.text.count("cannot read the members") == 1


def test_if_all_nodes_fall_silent_they_stay_in_the_view(nodes: list[Server], name: Name, following: Following) -> None:
    name.addresses = ["127.0.0.1", "127.0.0.2"]
    with following:
        following.follower.wait(5)
        for node in nodes:
            node.kill()
        wait_until(lambda: "none of 2 addresses answers" in following.follower.lost)
        assert len(following.states()) >= 1


def test_a_node_with_two_addresses_is_one_member(
    nodes: list[Server], name: Name, start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    twin = start_server("--node-id", "a", "--host", "127.0.0.3", "--port", str(nodes[0].port))
    name.addresses = ["127.0.0.1", "127.0.0.3"]
    with Following(f"dns://{NAME}:{twin.port}") as following:
        (member,) = following.follower.wait(5).members
        assert member.shards[0].host == "127.0.0.1"
    assert "not using 127.0.0.3: node 'a' has another address" in caplog.text


def test_without_any_node_the_reason_is_given(name: Name) -> None:
    name.addresses = ["127.0.0.4"]
    with (
        Following(f"dns://{NAME}:1") as following,
        pytest.raises(DirectoryError, match=r"none of 1 addresses.*refused"),
    ):
        following.follower.wait(1)
