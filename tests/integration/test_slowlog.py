"""The slow log: requests that a shard made wait are in it with the stage that took the time, and others are not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.wire import SlowlogReply, SlowRequest
from kvstore_client import KVStoreClient, Namespace, NotAuthorized
from tests.support import forked
from tests.support.disk import disk_flags, wait_until_on, wait_until_written
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    CREDIT,
    ERROR,
    GET,
    HELLO,
    PART,
    PROMISE,
    PROTOCOL,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    pack,
    put,
    set_frames,
    shard_info,
    stays,
    wait_until,
    zmtp_frame,
)
from tests.support.logins import Guarded, connect, log_in

SLOWLOG, SLOWLOG_REPLY = 23, 87
BLOCK = 4096
LONG_S = 0.3  # longer than the limit of every server here


def slow_log(client: KVStoreClient) -> SlowlogReply:
    """Return the log of a server with one shard."""
    (reply,) = client.slow_requests().values()
    return reply


def wait_for(client: KVStoreClient, verb: str) -> SlowRequest:
    """Wait until a request of this verb is in the log, and return it."""
    found: list[SlowRequest] = wait_until(
        lambda: [row for row in slow_log(client).requests if row.verb == verb], what=f"a slow {verb}"
    )
    return found[0]


def kvstore(server: Server, *arguments: str, status: int = 0, **variables: str) -> str:
    done = forked.run(
        *("kvstore_cli", "slowlog", *arguments, "--endpoint", server.endpoint),
        env=environment(**{"COLUMNS": "200", **variables}),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def stay_stopped(process: psutil.Process) -> None:
    """Wait until a process has been stopped for `LONG_S`."""
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    stays(lambda: process.status() == psutil.STATUS_STOPPED, LONG_S)


def delayed(server: Server, child: Callable[[psutil.Process], psutil.Process], work: Callable[[], object]) -> None:
    """Stop one of a shard's processes while it has work to do, and let it go on after `LONG_S`."""
    (shard,) = server.shards()
    process = child(shard)
    process.suspend()
    try:
        work()
        stay_stopped(process)
    finally:
        process.resume()


@pytest.fixture
def disk_server(start_server: StartServer, tmp_path: Path) -> Server:
    return start_server(*disk_flags(tmp_path / "disk"))


def keeper(shard: psutil.Process) -> psutil.Process:
    (found,) = shard.children()
    return found


def test_a_removal_that_waits_for_the_disk_is_listed(disk_server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(BLOCK), make_keys(10)
    with KVStoreClient(disk_server.endpoint, namespace, timeout_s=30) as client, RawClient(disk_server) as raw:
        wait_until_on(client)
        put(client, keys)
        wait_until_written(client)
        raw.ask(pack(HELLO, 0, PROTOCOL, namespace.canonical(), "\x1b[2Jremover"))
        before = time.time()
        delayed(disk_server, keeper, lambda: raw.send(pack(6, 1, 60_000, 4, 16), b"".join(keys[:4])))
        assert raw.reply()[0] == [70, 1, 4]
        row = wait_for(client, "delete")
        assert (row.keys, row.bytes, row.stage) == (4, 0, "disk")
        assert LONG_S * 0.9 < row.stage_s <= row.seconds <= row.total_s < 60
        assert before < row.at <= time.time()
        assert row.address == "{}:{}".format(*raw.sock.getsockname())
        assert (row.client, row.principal, row.tenant) == ("\x1b[2Jremover", "", "")
        assert (row.namespace, row.model) == (namespace.id, namespace.model)
        assert shard_info(client).slow_requests["disk"] >= 1

        delayed(
            disk_server, keeper, lambda: raw.send(*set_frames(2, keys[5:], blocks_of(keys[5:], BLOCK, 1), force=True))
        )
        assert raw.reply()[0][:3] == [SET_REPLY, 2, 5]
        row = wait_for(client, "set")
        assert (row.keys, row.bytes, row.stage) == (5, 5 * BLOCK, "disk") and row.seconds > LONG_S * 0.9
        table = kvstore(disk_server)
        assert "\\x1b[2Jremover" in table and "\x1b" not in table and "disk" in table
        document = json.loads(kvstore(disk_server, "--json", "--limit", "1"))
        assert [each["verb"] for each in document["requests"]] == ["set"] and document["left_out"] >= 1
        assert document["limits_ms"] == [100] and document["requests"][0]["shard"].endswith("/0")


def test_a_turn_that_takes_long_makes_its_requests_slow(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """The shard is stopped again and again while it looks up keys, until that happens in the middle of a turn."""
    server, namespace = start_server(), new_namespace(BLOCK)
    keys = b"".join(make_keys(8192))
    (shard,) = server.shards()
    with KVStoreClient(server.endpoint, namespace, timeout_s=30) as client, RawClient(server) as raw:
        put(client, make_keys(100))
        raw.hello(namespace.canonical())
        request = zmtp_frame(pack(CONTAINS, 1, 60_000, 8192, 16), 1) + zmtp_frame(keys, 0)

        def found() -> list[SlowRequest]:
            raw.sock.sendall(20 * request)
            shard.suspend()
            stay_stopped(shard)
            shard.resume()
            for _ in range(20):
                assert raw.reply()[0][0] == CONTAINS_REPLY
            return [row for row in slow_log(client).requests if row.verb == "contains"]

        row = wait_until(found)[0]
        assert row.keys == 8192 and row.stage in ("requests", "events") and row.seconds == row.total_s > LONG_S / 2
        assert row.client == "raw"


def test_what_clients_take_long_for_is_not_listed(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace, keys = start_server(), new_namespace(BLOCK), make_keys(12)
    with KVStoreClient(server.endpoint, namespace, timeout_s=30) as client, RawClient(server) as raw:
        raw.hello(namespace.canonical())
        # A SET whose payload comes late, and a GET that waits for it because it was promised.
        assert raw.ask(pack(PROMISE, 1, 10_000, 12, 16, 60_000), b"".join(keys))[0] != ERROR
        with RawClient(server) as reader:
            reader.hello(namespace.canonical())
            reader.send(pack(GET, 2, 60_000, 12, 16, 2 * BLOCK, True, False, False, False, 50_000), b"".join(keys))
            head, named, *rest = set_frames(3, keys, blocks_of(keys, BLOCK))
            raw.send(head, named, more=True)
            wait_until(lambda: shard_info(client).uptime_s > 2 * LONG_S, what="the SET and the GET have taken long")
            raw.send(*rest)
            assert raw.reply()[0][0] == SET_REPLY
            # Then the GET waits for credit.
            assert reader.reply()[0][0] == PART
            until = shard_info(client).uptime_s + LONG_S
            wait_until(lambda: shard_info(client).uptime_s > until)
            reader.send(pack(CREDIT, 2, 100 * BLOCK))
            while not reader.reply()[0][4]:
                pass
        (get,) = (row for row in shard_info(client).requests if row.verb == "get")
        assert get.seconds > LONG_S, "the histogram counts the time of clients"
        rows = [row for row in slow_log(client).requests if row.verb in ("get", "set")]
        assert all(row.seconds < row.total_s / 2 for row in rows), "on a busy machine, turns may be slow"


def test_the_log_has_the_last_128_requests(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace = start_server("--slowlog-ms", "1"), new_namespace(BLOCK)
    keys = b"".join(make_keys(8192))
    with KVStoreClient(server.endpoint, namespace, timeout_s=30) as client, RawClient(server) as raw:
        put(client, make_keys(1))
        raw.hello(namespace.canonical())

        def slow() -> int:
            for _ in range(50):
                raw.send(pack(CONTAINS, 1, 60_000, 8192, 16), keys)
            for _ in range(50):
                raw.reply()
            return sum(shard_info(client).slow_requests.values())

        wait_until(lambda: slow() > 128)
        rows = slow_log(client).requests
        assert len(rows) == 128 and all(row.seconds >= 0.001 for row in rows)
        assert [row.at for row in rows] == sorted((row.at for row in rows), reverse=True)


def test_the_command_says_why_there_is_nothing_to_show(start_server: StartServer) -> None:
    server = start_server("--slowlog-ms", "600000")
    assert kvstore(server) == "No request has taken 600000 ms since the shards started.\n"


def test_without_a_limit_nothing_is_kept(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    server = start_server("--slowlog-ms", "0", *disk_flags(tmp_path / "disk"))
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=30) as client, RawClient(server) as raw:
        wait_until_on(client)
        raw.hello(client.namespace.canonical())
        delayed(server, keeper, lambda: raw.send(pack(6, 1, 60_000, 1, 16), make_keys(1)[0]))
        raw.reply()
        assert slow_log(client).requests == [] and slow_log(client).limit_ms == 0
        assert kvstore(server) == "The slow log is off: slowlog_ms is 0.\n"


# ---- logins ----------------------------------------------------------------------------------------------------------


def seen(guarded: Guarded, who: str) -> set[tuple[str, str]]:
    """Return the principals and tenants of the requests in the log."""
    with KVStoreClient(
        guarded.server.endpoint, make_namespace(1, "lists"), token=guarded.tokens[who], shared_memory=False
    ) as client:
        return {(row.principal, row.tenant) for row in slow_log(client).requests}


def test_a_tenant_sees_its_own_slow_requests_only(guarded: Guarded, new_namespace: MakeNamespace) -> None:
    namespace: Namespace = new_namespace(BLOCK)
    with connect(guarded, "tcp") as ours, connect(guarded, "tcp") as theirs:
        raws: dict[str, Any] = {"all": ours, "other": theirs}
        for who, raw in raws.items():
            log_in(raw, namespace.canonical(), guarded.tokens[who])
            raw.ask(*set_frames(1, make_keys(2), blocks_of(make_keys(2), BLOCK)))
        for raw in raws.values():
            delayed(guarded.server, keeper, lambda raw=raw: raw.send(pack(6, 2, 60_000, 1, 16), make_keys(1)[0]))
            raw.reply()
    assert {("all", "a"), ("other", "b")} <= seen(guarded, "operator")
    assert {tenant for _, tenant in seen(guarded, "monitor")} == {"a"}
    assert {tenant for _, tenant in seen(guarded, "other")} == {"b"}
    with pytest.raises(NotAuthorized, match=r"SLOWLOG: principal 'read' may not: this needs the verb admin or monitor"):
        seen(guarded, "read")
    assert "this needs the verb admin or monitor" in kvstore(
        guarded.server, status=1, KVSTORE_TOKEN=guarded.tokens["write"]
    )
