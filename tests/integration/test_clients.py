"""CLIENTS and `kvstore clients`: every connection, with figures that can be checked, and the same in sums."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.wire import MAX_LISTED_CLIENTS, ConnectedClient
from kvstore_client import KVStoreClient, Namespace, NotAuthorized
from tests.support import forked
from tests.support.harness import (
    ERROR,
    GET,
    HELLO,
    PING,
    PROTOCOL,
    SET,
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
    wait_until,
    zmtp_frame,
)
from tests.support.logins import Guarded, LocalRaw, connect, log_in

CLIENTS, CLIENTS_REPLY = 22, 86
BLOCK = 4096


def listed(client: KVStoreClient) -> dict[str, ConnectedClient]:
    """Return the connections of the only shard, by the name that HELLO gave."""
    (rows,) = client.clients().values()
    assert [row.number for row in rows] == sorted(row.number for row in rows)
    return {row.client: row for row in rows}


def named(raw: RawClient, name: str, namespace: Namespace | None = None, token: bytes = b"") -> RawClient:
    """Send HELLO with a name."""
    canonical = namespace.canonical() if namespace is not None else b""
    assert raw.ask(pack(HELLO, 0, PROTOCOL, canonical, name, token))[0] != ERROR
    return raw


def kvstore(server: Server, *arguments: str, status: int = 0, **variables: str) -> str:
    done = forked.run(
        *("kvstore_cli", "clients", *arguments, "--endpoint", server.endpoint),
        env=environment(**{"COLUMNS": "200", **variables}),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def answer(server: Server, *arguments: str, **variables: str) -> Any:
    return json.loads(kvstore(server, *arguments, "--json", **variables))


@pytest.fixture
def local_server(start_server: StartServer, tmp_path: Path) -> Server:
    """A server with a Unix socket."""
    return start_server("--unix-socket", str(tmp_path / "socket"))


def test_clients_over_tcp_and_the_unix_socket_are_listed(
    local_server: Server, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    namespace, other = new_namespace(BLOCK), new_namespace(BLOCK)
    with (
        KVStoreClient(local_server.endpoint, namespace, shared_memory=False) as client,
        RawClient(local_server) as remote,
        LocalRaw(str(tmp_path / "socket")) as local,
        RawClient(local_server) as silent,
    ):
        named(remote, "by TCP", namespace)
        named(local, "by the socket", other)
        rows = listed(client)
        tcp, unix = rows["by TCP"], rows["by the socket"]
        assert tcp.address == "{}:{}".format(*remote.sock.getsockname()) and tcp.transport == "tcp"
        assert (tcp.namespace, tcp.model, tcp.principal, tcp.tenant) == (namespace.id, namespace.model, "", "")
        assert unix.address == f"user {os.getuid()} of this host:{os.getpid()}" and unix.transport == "unix"
        assert (unix.namespace, unix.model) == (other.id, other.model)
        greeted = rows[""]
        assert greeted.address == "{}:{}".format(*silent.sock.getsockname()), "a connection without a HELLO"
        assert (greeted.namespace, greeted.model, greeted.requests) == ("", "", 0)
        assert unix.number > tcp.number and 0 <= unix.age_s <= tcp.age_s
        (own,) = (row for name, row in rows.items() if name.startswith("kvstore-client/"))
        assert f"pid={os.getpid()}" in own.client and own.idle_s < 5


def test_the_figures_of_a_connection(local_server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(BLOCK), make_keys(20)
    with (
        KVStoreClient(local_server.endpoint, namespace, shared_memory=False) as client,
        RawClient(local_server) as raw,
    ):
        named(raw, "raw", namespace)
        before = listed(client)["raw"]
        frames = set_frames(1, keys, blocks_of(keys, BLOCK))
        size = sum(len(zmtp_frame(frame, 0)) for frame in frames)
        raw.ask(*frames)
        after = listed(client)["raw"]
        assert after.bytes_in - before.bytes_in == size
        assert 0 < after.bytes_out - before.bytes_out < 1000
        assert (after.number, after.requests, after.waiting_bytes) == (before.number, 0, 0)

        raw.send(pack(GET, 2, 60_000, 20, 16, 5 * BLOCK), b"".join(keys))
        wait_until(lambda: listed(client)["raw"].bytes_out - after.bytes_out > 5 * BLOCK, what="the credit is used")
        assert listed(client)["raw"].requests == 1, "the GET waits for credit"
        raw.send(*set_frames(3, keys, blocks_of(keys, BLOCK))[:2], more=True)
        wait_until(lambda: listed(client)["raw"].requests == 2, what="the payload of a SET is missing")
        assert listed(client)["raw"].bytes_out - after.bytes_out < 6 * BLOCK
        assert client.get(keys).hit == 20
        (own,) = (row for name, row in listed(client).items() if name.startswith("kvstore-client/"))
        assert own.bytes_out > 20 * BLOCK


def test_what_a_client_does_not_read_is_waiting(local_server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(1 << 20), make_keys(16)
    with (
        KVStoreClient(local_server.endpoint, namespace, shared_memory=False) as client,
        RawClient(local_server, receive_buffer=1 << 16) as lazy,
    ):
        put(client, keys)
        named(lazy, "lazy", namespace)
        assert listed(client)["lazy"].waiting_bytes == 0
        lazy.send(pack(GET, 1, 60_000, len(keys), 16), b"".join(keys))
        wait_until(lambda: listed(client)["lazy"].waiting_bytes > 1 << 16, what="the kernel's queue is full")
        row = listed(client)["lazy"]
        assert row.requests == 1 and row.waiting_bytes <= row.bytes_out + (2 << 20)
        assert answer(local_server, "--sort", "waiting", "--limit", "1")["clients"][0]["client"] == "lazy"


def test_blocks_in_shared_memory_are_counted(local_server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(1 << 16), make_keys(32)
    with (
        KVStoreClient(local_server.endpoint, namespace, shared_memory=True) as near,
        KVStoreClient(local_server.endpoint, namespace, shared_memory=False) as far,
    ):
        put(near, keys)
        assert near.get(keys).hit == 32
        (rows,) = far.clients().values()
        (shared,) = (row for row in rows if row.transport == "shared memory")
        assert shared.bytes_in > 32 << 16 and shared.bytes_out > 32 << 16
        assert [row.transport for row in rows if row is not shared] == ["tcp"]


def test_a_list_of_several_parts_is_complete(local_server: Server, new_namespace: MakeNamespace) -> None:
    count = MAX_LISTED_CLIENTS + 20
    raws = [RawClient(local_server) for _ in range(count)]
    try:
        for number, raw in enumerate(raws):
            named(raw, f"raw {number}")
        with KVStoreClient(local_server.endpoint, new_namespace(), shared_memory=False) as client:
            (rows,) = client.clients().values()
        names = [row.client for row in rows]
        assert [name for name in names if name.startswith("raw ")] == [f"raw {number}" for number in range(count)]
        tag, _, part = raws[0].ask(pack(CLIENTS, 5, 1000))
        assert tag == CLIENTS_REPLY and len(part) == MAX_LISTED_CLIENTS
        tag, _, rest = raws[0].ask(pack(CLIENTS, 6, 1000, part[-1][0]))
        assert len(rest) >= 20 and rest[0][0] > part[-1][0]
        assert raws[0].ask(pack(CLIENTS, 7, 1000, rest[-1][0]))[2] == []
        assert raws[0].ask(pack(CLIENTS, 8, 1000, -1))[0] == ERROR
    finally:
        for raw in raws:
            raw.close()


# ---- logins ----------------------------------------------------------------------------------------------------------


def test_a_tenant_sees_its_own_connections_only(guarded: Guarded, new_namespace: MakeNamespace) -> None:
    namespace = new_namespace(BLOCK)
    paths = ("tcp", "unix")
    with (
        connect(guarded, "tcp") as ours,
        connect(guarded, "unix") as theirs,
        connect(guarded, "tcp") as operator,
        connect(guarded, "tcp") as stranger,
    ):
        for raw, who in ((ours, "all"), (theirs, "other"), (operator, "operator")):
            named(raw, f"{who} of {paths}", namespace, guarded.tokens[who].encode())
        assert stranger.ask(pack(PING, 1, 1000))
        seen = {
            who: {(row.principal, row.tenant): row for row in self_listed(guarded, who)}
            for who in ("monitor", "other", "operator")
        }
    assert {("all", "a"), ("monitor", "a")} <= seen["monitor"].keys()
    assert {tenant for _, tenant in seen["monitor"]} == {"a"}
    assert {tenant for _, tenant in seen["other"]} == {"b"}
    assert {("all", "a"), ("other", "b"), ("operator", ""), ("", "")} <= seen["operator"].keys()
    assert seen["operator"]["other", "b"].transport == "unix"
    assert seen["operator"]["all", "a"].model == namespace.model
    assert seen["operator"]["all", "a"].namespace != seen["operator"]["other", "b"].namespace


def self_listed(guarded: Guarded, who: str) -> list[ConnectedClient]:
    with KVStoreClient(
        guarded.server.endpoint, make_namespace(1, "lists"), token=guarded.tokens[who], shared_memory=False
    ) as client:
        (rows,) = client.clients().values()
        return rows


@pytest.mark.parametrize("who", ["read", "write", "delete", "wrong"])
def test_the_list_needs_the_verb_monitor_or_admin(guarded: Guarded, who: str) -> None:
    if who == "wrong":
        with connect(guarded, "tcp") as raw:
            assert "CLIENTS: this server wants a token first" in str(raw.ask(pack(CLIENTS, 1, 1000))[3])
        return
    with pytest.raises(NotAuthorized, match=r"CLIENTS: principal '.*' may not: this needs the verb admin or monitor"):
        self_listed(guarded, who)
    said = kvstore(guarded.server, status=1, KVSTORE_TOKEN=guarded.tokens[who])
    assert "CLIENTS: principal" in said and "this needs the verb admin or monitor" in said


def test_a_client_with_tls_is_listed_with_its_own_address(guarded: Guarded) -> None:
    with connect(guarded, "tls") as raw, connect(guarded, "tls") as lists:
        log_in(raw, b"", guarded.tokens["read"])
        log_in(lists, b"", guarded.tokens["operator"])
        rows = [ConnectedClient(*row) for row in lists.ask(pack(CLIENTS, 1, 1000))[2]]
        (row,) = (row for row in rows if row.principal == "read")
        assert (row.address, row.transport) == ("{}:{}".format(*raw.sock.getsockname()), "tls")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_connections_and_sums(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace = start_server("--shards", "2"), new_namespace(BLOCK)
    keys = make_keys(40)
    with (
        KVStoreClient(server.endpoint, namespace) as client,
        RawClient(server, source="127.0.0.9") as one,
        RawClient(server, source="127.0.0.9") as two,
    ):
        put(client, keys)
        named(one, "engine one", namespace)
        named(two, "engine two")
        table = kvstore(server)
        assert f"{namespace.model} {namespace.id[:12]}" in table and "engine two" in table
        assert f"127.0.0.1:{server.port}/1" in table, "the shard"
        rows = answer(server, "--sort", "received")["clients"]
        assert rows == sorted(rows, key=lambda row: -row["bytes_in"]) and rows[0]["bytes_in"] > 10 * BLOCK
        assert {"shard", "number", "address", "client", "age_s", "waiting_bytes"} <= rows[0].keys()
        first = answer(server, "--limit", "1")
        assert len(first["clients"]) == 1 and first["left_out"] >= 4 and first["silent"] == []
        assert "more rows; --limit N shows more" in kvstore(server, "--limit", "1")

        groups = {row["address"]: row for row in answer(server, "--by", "address")["groups"]}
        assert groups["127.0.0.9"]["connections"] == 2
        assert groups["127.0.0.1"]["bytes_in"] > 40 * BLOCK
        by_client = {row["client"]: row for row in answer(server, "--by", "client")["groups"]}
        assert by_client["engine one"]["connections"] == 1 and by_client["engine one"]["address"] == "127.0.0.9"
        (ours,) = (row for name, row in by_client.items() if f"pid={os.getpid()}" in name)
        assert ours["connections"] == 2, "one for each shard"
        (tenants,) = answer(server, "--by", "tenant")["groups"]
        assert tenants["tenant"] == "" and tenants["connections"] >= 6
        assert "127.0.0.9" in kvstore(server, "--by", "address", "--sort", "connections", COLUMNS="80")
        assert "'--sort' " not in kvstore(server, "--sort", "age") and "columns of --by address" in kvstore(
            server, "--by", "address", "--sort", "shard", status=2
        )


def test_a_dead_shard_is_named_and_the_others_are_shown(start_server: StartServer) -> None:
    server = start_server("--shards", "2")
    hung = server.shards()[1]
    hung.suspend()
    try:
        said = kvstore(server, "--timeout", "1", status=1)
    finally:
        hung.resume()
    assert "kvstore-client/" in said and "1 of 2 shards did not answer" in said


def test_names_of_clients_do_not_break_the_table(start_server: StartServer) -> None:
    server = start_server()
    hostile = "\x1b[2J\r\n[bold]evil[/bold]\t\u202e" + "x" * (8 << 10)
    with RawClient(server) as raw, RawClient(server) as other:
        named(raw, hostile, make_namespace(1, "\x1b]0;m\x07\n[red]" + "M" * 4000))
        named(other, "\ud7ff\U0010ffff" * 32)
        raw.send(pack(SET, 1, 1000, 0, 16), b"", b"")
        for columns in ("80", "300"):
            table = kvstore(server, COLUMNS=columns)
            assert all(line.isprintable() for line in table.splitlines())
            assert "\\x1b[2J\\r\\n[bold]evil" in table.replace("\n", "") or columns == "80"
            assert max(map(len, table.splitlines())) <= int(columns)
        rows = answer(server)["clients"]
        (row,) = (row for row in rows if "evil" in row["client"])
        assert row["client"] == hostile[:64] and len(row["model"]) == 200
