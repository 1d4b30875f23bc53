"""A verb needs one row: all code that depends on a request's verb reads `wire.VERBS`, and the documents agree with that
table.

The last tests add a verb to the table; apart from a handler, a shard needs nothing else.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from functools import reduce
from operator import or_

import msgspec
import pytest

from kvstore import wire
from kvstore.auth.rights import Rights, verbs_of
from kvstore.node.metrics import _request_times
from kvstore.shard.account import AddressBudget
from kvstore.shard.connection_limits import ConnectionLimits
from kvstore.shard.handlers import RequestHandlers
from kvstore.shard.peer import Peer
from kvstore.shard.reader import MessageReader
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.turns import SliceQueue
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.wire import DELETE, RIGHTS, ErrorCode, KeyedRequest, Reply, Request, Verb, messages
from kvstore_client import Namespace
from tests.support.harness import ROOT

NAMESPACE = Namespace(model="m", dtype="uint8", block_tokens=1, block_bytes=64).canonical()
KEYS = bytes(range(32))


def structs(base: type[msgspec.Struct]) -> set[type]:
    return {each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, base)}


def test_every_request_has_one_row() -> None:
    assert structs(Request) - {Request, KeyedRequest} == set(wire.VERBS)
    assert all(verb.request is request for request, verb in wire.VERBS.items())
    assert len({verb.name for verb in wire.VERBS.values()}) == len(wire.VERBS)
    with pytest.raises(AssertionError, match="two rows"):
        messages.table(*wire.VERBS.values(), Verb(wire.Ping, DELETE))


def test_the_specification_contains_the_table() -> None:
    """docs/protocol.md has the same tags, names and replies as the table, and says which requests have keys."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    tables = text[text.index("## Messages") : text.index("## Payload")]
    replies = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \| [^|]+ \|$", tables, re.MULTILINE))
    assert set(replies) == {str(each.__struct_config__.tag) for each in structs(Reply) - {Reply}}
    requests = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| ([^|]+) \| ([^|]+) \|$", tables, re.MULTILINE)
    said = {name: (int(tag), frames.isascii()) for tag, name, frames, _ in requests}  # a dash: a request without keys
    assert said == {verb.name.upper(): (verb.request.__struct_config__.tag, verb.keyed) for verb in wire.VERBS.values()}
    assert {reply for _, _, _, by in requests for reply in re.findall(r"[A-Z_]{4,}", by)} < set(replies.values())


def test_the_security_page_lists_the_right_for_each_request() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    for name, bit in RIGHTS.items():
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
        named = set(re.findall(r"[A-Z_]{3,}", row.partition(";")[0]))
        needing = {verb.name.upper() for verb in wire.VERBS.values() if verb.right & bit} - {"RAISE"}
        assert named == needing, name


# ---- a new verb ------------------------------------------------------------------------------------------------------


class CountOnes(KeyedRequest, tag=60, frozen=True):
    """A new request, whose frames are the header and the keys."""

    least: int = 0


class CountOnesReply(msgspec.Struct, array_like=True, frozen=True, tag=123):
    id: int
    ones: int


def check_count_ones(request: CountOnes) -> None:
    if request.least > 9:
        raise wire.WireError(ErrorCode.LIMIT, f"least {request.least}: expected up to 9")


class Shard:
    """One connection to a shard in this process."""

    def __init__(self, rights: Rights | None = None) -> None:
        address = wire.ShardAddress("n/0", "", 1, 1.0)
        config = ShardConfig("n", 0, -1, -1, 1 << 20, 1 << 16, [address], "warning", 0.0, "default", [], None)
        self.state = ShardState(time.monotonic(), *([] if rights is None else [rights]))
        self.store = ShardStore(config.memory_bytes, config.segment_bytes, config.policy, config.rules)
        places = ConnectionLimits(self.state.account, "", lambda share: False)
        self.answers = RequestHandlers(config, self.store, None, self.state, places)
        self.answers.keyed_handlers[CountOnes] = self._count_ones
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(5)
        share = AddressBudget(self.state.account, "test")
        self.peer = Peer(self.state, theirs, share, "test", 1, SliceQueue(), lambda peer: None)
        places.add(self.peer, self.state.now)
        self.reader = MessageReader(self.peer, self.answers, self.state)

    def _count_ones(self, peer: Peer, request: CountOnes, namespace: NamespaceStore | None, keys: bytes) -> None:
        assert namespace is None  # the namespace has no blocks
        peer.outbox.reply(CountOnesReply(request.id, keys.count(1) - request.least))  # type: ignore[arg-type]

    def ask(self, *frames: bytes) -> bytes:
        """Return everything that the connection receives in answer to a message."""
        for at, frame in enumerate(frames, 1):
            self.reader.end_frame(frame, at < len(frames))
        self.peer.outbox.flush(self.state.now)
        return self.sock.recv(1 << 16)

    def close(self) -> None:
        self.peer.close("the test is over")
        self.sock.close()
        self.store.arena.close()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verb[CountOnes]]:
    verb = Verb(CountOnes, DELETE, (), check_count_ones, timed=True)
    monkeypatch.setitem(wire.VERBS, CountOnes, verb)
    monkeypatch.setattr(messages, "_request_decoder", msgspec.msgpack.Decoder(reduce(or_, wire.VERBS)))
    yield verb


def test_every_row_has_a_handler() -> None:
    shard = Shard()
    shard.close()
    del shard.answers.keyed_handlers[CountOnes]
    one_frame, keyed = set(shard.answers.handlers), {*shard.answers.keyed_handlers, wire.Set}
    assert {each: verb.keyed for each, verb in wire.VERBS.items()} == {
        **dict.fromkeys(one_frame, False),
        **dict.fromkeys(keyed, True),
    }


def test_a_new_verb_needs_only_a_row_and_a_handler(toy: Verb[CountOnes]) -> None:
    shard = Shard()
    header = wire.encode(CountOnes(7, 1000, 2, 16, least=0))
    refused = shard.ask(header, KEYS)
    assert b"no namespace yet: send HELLO with a namespace first" in refused
    assert b"WELCOME" not in shard.ask(wire.encode(wire.Hello(1, wire.PROTOCOL_VERSION, NAMESPACE)))
    assert shard.ask(header, KEYS).endswith(wire.encode(CountOnesReply(7, 1)))
    assert b"COUNT_ONES without its keys frame" in shard.ask(header)
    assert b"COUNT_ONES ends with its keys frame" in shard.ask(header, KEYS, b"more")
    assert b"least 10: expected up to 9" in shard.ask(wire.encode(CountOnes(8, 1000, 2, 16, least=10)), KEYS)
    assert b"keys of 5 bytes: expected 8 to 64" in shard.ask(wire.encode(CountOnes(9, 1000, 1, 5)), b"12345")
    (row,) = shard.state.timing.rows()
    assert (row.verb, row.tier, sum(row.counts)) == ("count_ones", "memory", 1)
    metric = _request_times([shard.answers._report.info(Rights("", "*", 0))])
    assert "count_ones" in {sample.labels["verb"] for sample in metric.samples}
    shard.close()


def test_a_new_verbs_row_decides_who_may_use_it(toy: Verb[CountOnes]) -> None:
    header = wire.encode(CountOnes(7, 1000, 2, 16))
    for verbs, answer in (
        (["read", "write"], b"COUNT_ONES: principal 'p' may not: this needs the verb delete"),
        (["delete"], b"no namespace yet"),
    ):
        shard = Shard(Rights("p", "t", verbs_of(verbs)))
        assert answer in shard.ask(header, KEYS)
        shard.close()
