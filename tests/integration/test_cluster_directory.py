"""The list of members in a real etcd: what nodes write, what clients read, and what followers see if etcd fails."""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cluster.etcd import Drain, EtcdDirectory
from kvstore.cluster.following import Follower
from kvstore.cluster.members import DirectoryError, Member, Membership, State, encode_member
from kvstore.cluster.schemes import parse_cluster_url
from kvstore.cluster.url import EtcdURL
from kvstore.wire import ShardAddress
from tests.support.cluster import Following, open_directory, states_of
from tests.support.etcd import Etcd
from tests.support.harness import stays, wait_until
from tests.support.ports import free_ports

TTL_S = 2


@pytest.fixture
def url(etcd: Etcd, request: pytest.FixtureRequest) -> str:
    """Return the URL of a cluster that no other test uses."""
    return etcd.url(f"t{abs(hash(request.node.name)) % 10**9}")


@pytest.fixture
def directory(url: str) -> Iterator[EtcdDirectory]:
    directory = open_directory(url)
    yield directory
    directory.close()


def member(node: str, state: State = "serving", port: int = 7070, instance: str = "1") -> Member:
    return Member(node, state, [ShardAddress(f"{node}/0", "10.0.0.1", port, 1e9)], instance=instance)


def put(url: str, key: str, value: bytes) -> None:
    """Write a value, as an operator can with etcdctl."""
    parsed = parse_cluster_url(url)
    assert isinstance(parsed, EtcdURL)
    (host, port), *_ = parsed.endpoints
    body = {"key": f"/kvstore/{parsed.name}/nodes/{key}".encode(), "value": value}
    request = urllib.request.Request(
        f"http://{host}:{port}/v3/kv/put",
        json.dumps({name: base64.b64encode(data).decode() for name, data in body.items()}).encode(),
    )
    urllib.request.urlopen(request, timeout=5).close()


# ---- the directory -------------------------------------------------------------------------------------------------


def test_a_member_is_listed_from_registration_to_withdrawal(directory: EtcdDirectory) -> None:
    assert list(directory.membership().members) == []
    lease = directory.grant(TTL_S)
    assert directory.register(member("b"), lease)
    other = directory.grant(60)
    assert directory.register(member("a"), other)
    view = directory.membership()
    assert list(view.members) == [member("a"), member("b")]
    assert directory.read_member("a") == member("a") and directory.read_member("c") is None
    directory.withdraw("b", lease)
    later = directory.membership()
    assert list(later.members) == [member("a")] and later.epoch > view.epoch
    assert not directory.keep_alive(lease) and directory.keep_alive(other)


def test_only_a_lease_that_is_kept_alive_lasts(directory: EtcdDirectory) -> None:
    kept, left = directory.grant(TTL_S), directory.grant(TTL_S)
    assert directory.register(member("kept"), kept) and directory.register(member("left"), left)
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        assert directory.keep_alive(kept)
        time.sleep(0.05)
    assert states_of(directory.membership()) == {"kept": "serving"}


def test_only_its_own_lease_can_change_a_record(directory: EtcdDirectory) -> None:
    mine, other = directory.grant(60), directory.grant(60)
    assert directory.register(member("a", "joining"), mine)
    assert directory.register(member("a", "serving"), mine)
    assert not directory.register(member("a", instance="2"), other)
    assert directory.read_member("a") == member("a", "serving")
    assert directory.register(member("a", instance="2"), other, replace=True)
    assert not directory.register(member("a", "draining"), mine)
    directory.withdraw("a", mine)  # a record under another lease stays
    assert directory.read_member("a") == member("a", instance="2")


def test_waiting_for_a_change_wakes_at_once_and_misses_nothing(url: str, directory: EtcdDirectory) -> None:
    epoch = directory.membership().epoch
    began = time.monotonic()
    assert not directory.wait_for_change(epoch, 0.3)
    assert 0.25 < time.monotonic() - began < 2
    lease = directory.grant(60)
    assert directory.register(member("a"), lease)
    assert directory.wait_for_change(epoch, 5)  # the change came before the call
    epoch = directory.membership().epoch
    timer = threading.Timer(0.3, lambda: directory.withdraw("a", lease))
    timer.start()
    began = time.monotonic()
    assert directory.wait_for_change(epoch, 10)
    assert time.monotonic() - began < 2
    timer.join()


def test_other_clusters_and_drain_requests_are_no_change(url: str, directory: EtcdDirectory) -> None:
    other = open_directory(url + "x")
    epoch = directory.membership().epoch
    assert other.register(member("a"), other.grant(60))
    directory.write_drain("a", Drain("1", 5.0))
    assert not directory.wait_for_change(epoch, 0.5)
    assert list(directory.membership().members) == []
    other.close()


@pytest.mark.exclusive
def test_close_wakes_threads_that_wait_for_a_change(directory: EtcdDirectory) -> None:
    epoch = directory.membership().epoch
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            directory.wait_for_change(epoch, 30)
        except DirectoryError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: directory._watching is not None, what="the watch is open")
    began = time.monotonic()
    directory.close()
    thread.join(5)
    assert ended and time.monotonic() - began < 0.5
    with pytest.raises(DirectoryError, match="closed"):
        directory.membership()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"garbage \xff",
        b"{}",
        encode_member(member("another")),
        encode_member(member("a")).replace(b"a/0", b"ok/0"),
    ],
)
def test_an_invalid_record_is_ignored_and_named(
    url: str, directory: EtcdDirectory, record: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert directory.register(member("ok"), directory.grant(60))
    put(url, "a", record)
    for _ in range(3):
        assert states_of(directory.membership()) == {"ok": "serving"}
    said = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(said) == 1 and "'a'" in said[0], said


def test_a_drain_is_requested_updated_and_ended(directory: EtcdDirectory) -> None:
    assert directory.read_drain("a") is None
    directory.write_drain("a", Drain("1", 30.0))
    assert directory.read_drain("a") == Drain("1", 30.0, "asked")
    directory.write_drain("a", Drain("1", 30.0, "moving", 100, 20, 3))
    assert directory.read_drain("a") == Drain("1", 30.0, "moving", 100, 20, 3)
    directory.end_drain("a")
    assert directory.read_drain("a") is None


@pytest.mark.exclusive
def test_a_dead_or_silent_endpoint_is_replaced_by_the_next(own_etcd: Etcd, tmp_path: Path) -> None:
    (dead,) = free_ports(1)
    with Etcd(tmp_path / "silent") as silent:
        silent.signal(signal.SIGSTOP)
        url = f"etcd://127.0.0.1:{dead},127.0.0.1:{silent.port},127.0.0.1:{own_etcd.port}/n"
        for _ in range(4):  # whichever endpoint is used first
            directory = open_directory(url, timeout_s=0.5)
            began = time.monotonic()
            assert directory.register(member("a"), directory.grant(60), replace=True)
            assert time.monotonic() - began < 1.5
            assert states_of(directory.membership()) == {"a": "serving"}
            directory.close()


def test_with_no_endpoint_alive_the_error_has_every_reason() -> None:
    ports = free_ports(2)
    directory = open_directory(f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/n")
    with pytest.raises(DirectoryError) as caught:
        directory.membership()
    text = str(caught.value)
    assert all(f"127.0.0.1:{port}: connection refused" in text for port in ports), text


# ---- following -----------------------------------------------------------------------------------------------------


def test_a_follower_reports_every_change_once(url: str, directory: EtcdDirectory) -> None:
    first, second = directory.grant(60), directory.grant(60)
    directory.register(member("a"), first)
    with Following(url) as following:
        assert states_of(following.follower.wait(5)) == {"a": "serving"}
        directory.register(member("b", "joining"), second)
        following.wait_for({"a": "serving", "b": "joining"})
        directory.register(member("b", "serving"), second)
        following.wait_for({"a": "serving", "b": "serving"}, 1.0)
        directory.register(member("b", "serving"), second)  # the same again
        directory.withdraw("a", first)
        following.wait_for({"b": "serving"}, 1.0)
        assert [states_of(view) for view in following.views] == [
            {"a": "serving"},
            {"a": "serving", "b": "joining"},
            {"a": "serving", "b": "serving"},
            {"b": "serving"},
        ]
        epochs = [view.epoch for view in following.views]
        assert epochs == sorted(set(epochs)) and following.follower.lost == ""


def test_a_node_that_leaves_during_a_join_is_gone_at_once(url: str, directory: EtcdDirectory) -> None:
    leases = [directory.grant(60) for _ in range(3)]
    directory.register(member("a"), leases[0])
    directory.register(member("b"), leases[1])
    with Following(url) as following:
        following.wait_for({"a": "serving", "b": "serving"})
        directory.register(member("c", "joining"), leases[2])
        directory.withdraw("a", leases[0])
        wait_until(lambda: "a" not in states_of(following.views[-1]), 0.5, "a is gone")
        following.wait_for({"b": "serving", "c": "joining"}, 3.0)


def test_a_returning_node_is_listed_at_once_and_a_new_one_later(
    url: str, directory: EtcdDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.following.SPREAD_S", 1e6)
    lease, *of_b = (directory.grant(60) for _ in range(4))
    directory.register(member("a"), lease)
    directory.register(member("b"), of_b[0])
    with Following(url) as following:
        following.wait_for({"a": "serving", "b": "serving"})
        directory.withdraw("b", of_b[0])
        following.wait_for({"a": "serving"})
        directory.register(member("b", "joining"), of_b[1])
        following.wait_for({"a": "serving", "b": "joining"})
        directory.withdraw("b", of_b[1])
        following.wait_for({"a": "serving"})
        directory.register(member("b", "joining", instance="2"), of_b[2])
        directory.register(member("a", "draining"), lease)
        following.wait_for({"a": "draining"})


def test_a_follower_waits_for_the_first_member_and_logs_that(url: str, directory: EtcdDirectory) -> None:
    with Following(url) as following:
        with pytest.raises(DirectoryError, match=r"no node is registered"):
            following.follower.wait(0.5)
        directory.register(member("a"), directory.grant(60))
        assert states_of(following.follower.wait(2)) == {"a": "serving"}
    (port,) = free_ports(1)
    nowhere = Following(f"etcd://127.0.0.1:{port}/n")
    with nowhere, pytest.raises(DirectoryError, match=r"connection refused"):
        nowhere.follower.wait(0.5)


def test_a_failing_callback_is_logged_and_the_next_change_reported(
    url: str, directory: EtcdDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    lease = directory.grant(60)
    directory.register(member("a"), lease)
    seen = []

    def fail(view: Membership) -> None:
        seen.append(states_of(view))
        raise RuntimeError("no")

    follower = Follower(url, fail)
    follower.start()
    wait_until(lambda: seen)
    directory.register(member("a", "draining"), lease)
    wait_until(lambda: seen[-1] == {"a": "draining"})
    follower.close()
    assert "using the new members" in caplog.text


@pytest.mark.exclusive
def test_closing_a_follower_is_quick_and_ends_all_reports(url: str, directory: EtcdDirectory) -> None:
    directory.register(member("a"), directory.grant(60))
    following = Following(url)
    following.follower.wait(5)
    wait_until(lambda: following.follower._directory._watching, what="it is in its watch")
    began = time.monotonic()
    following.follower.close()
    assert time.monotonic() - began < 0.5
    assert not following.follower._thread.is_alive()
    told = len(following.views)
    directory.register(member("b"), directory.grant(60))
    with Following(url) as another:
        another.wait_for({"a": "serving", "b": "serving"})
    assert len(following.views) == told


def test_a_forked_child_does_not_disturb_its_parents_followers(url: str, directory: EtcdDirectory) -> None:
    lease = directory.grant(60)
    directory.register(member("a"), lease)
    with Following(url) as following:
        following.follower.wait(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the test forks a process with threads on purpose
            pid = os.fork()
        if pid == 0:
            following.follower.close()
            own = Follower(url, lambda _view: None)
            own.start()
            os._exit(0 if states_of(own.wait(5)) == {"a": "serving"} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert following.follower.errors == 0
        directory.register(member("a", "draining"), lease)
        following.wait_for({"a": "draining"}, 1.0)


def test_without_etcd_the_last_view_stays_and_changes_follow_later(
    own_etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = own_etcd.url("n")
    directory = open_directory(url)
    lease = directory.grant(600)
    directory.register(member("a"), lease)
    with Following(url) as following:
        following.wait_for({"a": "serving"})
        own_etcd.kill()
        wait_until(lambda: following.follower.lost, what="it says that etcd is lost")
        assert "connection refused" in following.follower.lost
        assert [states_of(view) for view in following.views] == [{"a": "serving"}]
        own_etcd.restart()
        wait_until(lambda: not following.follower.lost, what="it says that etcd is back")
        directory.register(member("a", "draining"), lease)
        following.wait_for({"a": "draining"})
    said = [record.getMessage() for record in caplog.records if "cluster" in record.name]
    assert (
        sum("cannot read the members" in text for text in said) == 1
        and sum("can be read again" in text for text in said) == 1
    )
    directory.close()


def test_a_hanging_etcd_counts_as_lost(own_etcd: Etcd) -> None:
    directory = open_directory(own_etcd.url("n"))
    directory.register(member("a"), directory.grant(600))
    with Following(own_etcd.url("n")) as following:
        following.wait_for({"a": "serving"})
        own_etcd.signal(signal.SIGSTOP)
        wait_until(lambda: following.follower.lost, what="it says that etcd is lost")
        own_etcd.signal(signal.SIGCONT)
        wait_until(lambda: not following.follower.lost, what="it says that etcd is back")
    directory.close()


def test_an_etcd_without_its_data_removes_no_member(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    url = own_etcd.url("n")
    directory = open_directory(url)
    for node in "ab":
        directory.register(member(node), directory.grant(600))
    with Following(url) as following:
        following.wait_for({"a": "serving", "b": "serving"})
        own_etcd.kill()
        own_etcd.restart(empty=True)
        wait_until(lambda: "lists no members any more; keeping the last 2" in caplog.text, what="it says so")
        directory.register(member("a"), directory.grant(600))
        stays(lambda: following.states().keys() >= {"a", "b"}, 1.0)
        directory.register(member("b"), directory.grant(600))
        directory.register(member("c"), directory.grant(600))
        following.wait_for({"a": "serving", "b": "serving", "c": "serving"}, 10)
        assert all({"a", "b"} <= set(states_of(view)) for view in following.views)
    directory.close()


def test_a_member_that_does_not_return_is_removed_in_the_end(own_etcd: Etcd) -> None:
    url = own_etcd.url("n")
    directory = open_directory(url)
    lease = directory.grant(600)
    directory.register(member("a"), lease)
    directory.register(member("b"), lease)
    with Following(url) as following:
        following.wait_for({"a": "serving", "b": "serving"})
        directory.withdraw("a", lease)
        wait_until(lambda: following.follower._refilled_at)
        directory.register(member("b"), directory.grant(600))
        following.wait_for({"b": "serving"}, 10)
    directory.close()
