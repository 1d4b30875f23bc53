"""Lists of clients of a shard whose places are all taken by clients with the longest possible names."""

from __future__ import annotations

import contextlib

import msgspec

from kvstore.wire import MAX_LISTED_CLIENTS
from kvstore_client import KVStoreClient
from tests.attack.crowd import CLIENTS, all_places, kvstore, pings
from tests.support.harness import (
    HELLO,
    PROTOCOL,
    WELCOME,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    Server,
    StartServer,
    make_namespace,
    pack,
    zmtp_frame,
)

LIST, LIST_REPLY = 22, 86
NAME = "\U0010ffff" * 14_000  # of 4 bytes each; a header has at most 64 KiB
NAMESPACE = make_namespace(64, "\x1b\u202e\U0010ffff" * 600)  # almost 8 KiB
LARGEST = 1 << 20  # a reply; the protocol allows 16 MiB
REQUESTS = 600


def listed(raw: RawClient) -> list[list[object]]:
    """Return all connections, from replies whose sizes are checked."""
    rows: list[list[object]] = []
    while True:
        raw.send(pack(LIST, 5, 10_000, rows[-1][0] if rows else 0))
        flags, header = raw.read_frame()
        assert not flags and len(header) < LARGEST
        tag, _, part = msgspec.msgpack.decode(header)
        assert tag == LIST_REPLY and len(part) <= MAX_LISTED_CLIENTS
        if not part:
            return rows
        rows += part


def test_all_connections_are_listed_and_lists_stay_bounded(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server(memory="32MiB")
    with all_places(server) as raws, MemoryWatch(server, 32 << 20), contextlib.ExitStack() as stack:
        for raw in raws:
            assert raw.ask(pack(HELLO, 0, PROTOCOL, NAMESPACE.canonical(), NAME))[0] == WELCOME
        # On a slow machine, the connections below take the places of the first ones here, which are idle by then.
        operator = stack.enter_context(RawClient(server))
        operator.hello()
        rows = listed(operator)
        assert CLIENTS <= len(rows) <= CLIENTS + 1
        assert {len(str(row[2])) for row in rows} == {len("raw"), 64} and max(len(str(row[6])) for row in rows) == 200

        with KVStoreClient(server.endpoint, new_namespace()) as client:
            (seen,) = client.clients(timeout_s=60).values()
            assert len(seen) >= CLIENTS
        shown = kvstore("clients", "--json", "--timeout", "60", server=server)
        assert shown.returncode == 0 and len(msgspec.json.decode(shown.stdout)["clients"]) >= CLIENTS
        table = kvstore("clients", "--limit", "3000", "--timeout", "60", server=server)
        assert table.returncode == 0 and all(line.isprintable() for line in table.stdout.splitlines())
        _ask_without_reading(server, raws[-1])
        assert pings(raws[-2]) and pings(operator)


def _ask_without_reading(server: Server, raw: RawClient) -> None:
    """Send many requests at once, whose replies together are larger than what a shard may hold for clients."""
    raw.sock.sendall(b"".join(zmtp_frame(pack(LIST, number, 10_000), 0) for number in range(REQUESTS)))
    with RawClient(server) as other:
        other.hello()
        assert pings(other)
    answers = [raw.reply()[0] for _ in range(REQUESTS)]
    assert [(fields[0], fields[1]) for fields in answers] == [(LIST_REPLY, number) for number in range(REQUESTS)]
    assert REQUESTS * len(msgspec.msgpack.encode(answers[0])) > 96 << 20
