"""The codec, tested with golden vectors, with arbitrary bytes, and at its limits.

A vector is a file of hexadecimal digits in `wire/`, with comments after `#`. The files define the protocol: if a test
here fails, the wire format has changed, and `PROTOCOL_VERSION` must change, too.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import example, given

from kvstore import wire
from kvstore._cext import Parts, checksum
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore_client import Namespace
from tests.support.vectors import PARTS, VECTORS, vector

NAMESPACE = Namespace(model="m/7B", dtype="bfloat16", block_tokens=16, block_bytes=917_504, extra={"lora": "é"})
CANONICAL = NAMESPACE.canonical()
SHARD_INFO = wire.ShardInfo(
    node="host:7070",
    shard=1,
    pid=4242,
    version="0.1.0",
    uptime_s=2.5,
    memory_limit_bytes=4 << 30,
    memory_used_bytes=32 << 20,
    rss_bytes=80 << 20,
    segment_bytes=32 << 20,
    segments_free=127,
    connections=2,
    streams=1,
    draining=False,
    sets=3,
    gets=4,
    lookups=5,
    bytes_in=6,
    bytes_out=7,
    errors=8,
    namespaces=[
        wire.NamespaceInfo(
            id=NAMESPACE.id,
            namespace=CANONICAL.decode(),
            block_bytes=917_504,
            blocks=30,
            writing=1,
            segments=1,
            slots=36,
            memory_bytes=32 << 20,
            pinned=2,
            hits=9,
            misses=10,
            created=31,
            evicted=0,
            disk_blocks=28,
            disk_bytes=256 << 20,
            disk_evicted=11,
            replicas=2,
            promised=17,
            awaited=6,
            transient_blocks=4,
            transient_slots=36,
            transient_bytes=32 << 20,
            generation=1_790_000_000_000_000_001,
        )
    ],
    policy="default",
    index_bytes=300_000,
    disk=wire.DiskInfo(
        directory="/data/kv/shard-1",
        state="off",
        reason="[Errno 28] No space left on device",
        limit_bytes=25 << 30,
        used_bytes=256 << 20,
        segment_bytes=256 << 20,
        segments_free=99,
        blocks=28,
        evicted=11,
        dirty_blocks=2,
        dirty_bytes=2 * 917_504,
        behind=True,
        written_blocks=39,
        written_bytes=39 * 917_504,
        skipped_blocks=12,
        fetched_blocks=13,
        fetched_bytes=13 * 917_504,
        corrupt_blocks=3,
        recovered_blocks=14,
        lost_blocks=16,
        recovery_s=0.25,
        warming=False,
        scrub_passes=15,
        scrubbing=True,
        scrubbed_blocks=400,
        scrubbed_bytes=400 * 917_504,
        scrub_corrupt_blocks=1,
    ),
    name="3f0c/1",
    room_bytes=96 << 20,
    hits=9,
    misses=10,
    created=31,
    slow_turns={"disk": 2},
    longest_turn_s=0.25,
    held_bytes={"streams": 5120},
    held_limit_bytes=100_663_296,
    refused={"connections": 7},
    unix_socket="/run/kv.sock",
    lent_blocks=64,
    lent_bytes=64 * 917_504,
    nixl=True,
    transient_bytes=32 << 20,
    transient_limit_bytes=416 << 20,
    requests=[wire.RequestTimes("get", "disk", 0.25, [0, 3, 1])],
    generation=1_790_000_000_000_000_002,
    transport="nixl",
    slow_requests={"disk": 3},
)

REQUESTS: dict[str, wire.Request] = {
    "hello": wire.Hello(
        *(1, 3, CANONICAL, "kvstore-client/0.1.0 pid=7", b"\x00\xffsecret", 3),
        *("5eedc00c1e", True, True, 4, 7, True, "nixl"),
    ),
    "hello_empty": wire.Hello(0, 3),
    "set": wire.Set(
        2, 10_000, 40, 16, True, 3, True, 3600.0, True, bytes(range(16)), bytes(range(16, 32)), 1280, b"", 4242
    ),
    "set_copied": wire.Set(2, 10_000, 1, 8, attributes=bytes.fromhex("400600000200") + b"key--000"),
    "set_transient": wire.Set(2, 10_000, 4, 16, outcomes=True, ttl_s=30.0, reads=255),
    "set_generation": wire.Set(2, 10_000, 1, 16, generation=1_790_000_000_000_000_001),
    "get": wire.Get(3, 10_000, 8192, 32, 8 << 20, True, True, True),
    "get_references": wire.Get(3, 10_000, 64, 16, references=True),
    "get_waiting": wire.Get(3, 40_000, 64, 16, wait_ms=30_000),
    "contains": wire.Contains(4, 600_000, 1, 8, True, 2.5),
    "contains_promised": wire.Contains(4, 10_000, 3, 8, promised=True),
    "match_prefix": wire.MatchPrefix(5, 1, 256, 64, False, 60.0),
    "delete": wire.Delete(6, 250, 0, 16),
    "sync": wire.Sync(7, 10_000),
    "info": wire.Info(8, 10_000),
    "ping": wire.Ping(2**63 - 1, 10_000),
    "credit": wire.Credit(3, 4 << 20),
    "cancel": wire.Cancel(3),
    "scrub": wire.Scrub(10, 10_000),
    "hottest": wire.Hottest(11, 10_000, 524_288, 1_000_000, True),
    "purge": wire.Purge(12, 10_000, True),
    "purge_some": wire.Purge(12, 10_000, True, 1_790_000_000_000_000_001, "Qwen/*", "5b0e"),
    "raise": wire.Raise(0, 1_790_000_000_000_000_001),
    "noted": wire.Noted(0, 1_790_000_000_000_000_001),
    "release": wire.Release(3, 64),
    "share": wire.Share(13, 2, 16 << 20),
    "promise": wire.MakePromise(14, 10_000, 64, 16, 30_000),
    "withdraw": wire.Withdraw(15, 1_000, 64, 16),
    "configure": wire.Configure(17, 10_000, "log-level", "debug"),
    "configure_list": wire.Configure(18, 10_000),
    "expire": wire.Expire(16, 10_000, 64, 17, 86_400.0),
    "clients": wire.Clients(17, 10_000, 256),
    "slowlog": wire.Slowlog(18, 10_000),
}
REPLIES: dict[str, wire.Reply] = {
    "welcome": wire.Welcome(
        id=1,
        protocol=3,
        version="0.1.0",
        node="host:7070",
        shard=1,
        block_bytes=917_504,
        shards=[
            wire.ShardAddress("host:7070/0", "", 7070, 2147483648.0),
            wire.ShardAddress("host:7070/1", "10.0.0.2", 7071, 2147483648.0),
        ],
        zone="rack-7",
        unix_socket="/run/kvstore/7070.sock.1",
        instance="c0ffee",
        nixl=True,
        generation=7,
        transport="nixl",
    ),
    "set_reply_stale": wire.SetReply(2, 1, 0, 0, 0, 0, 1, bytes([4]), 0, 1_790_000_000_000_000_001),
    "set_reply": wire.SetReply(2, 40, 30, 4, 3, 2, 1, bytes([0] * 30 + [1] * 4 + [2] * 3 + [3] * 2 + [4]), 7),
    "part": wire.Part(3, bytes.fromhex("0500000000010000"), bytes(range(16)), False, 7, 5, 3_670_016, bytes(range(28))),
    "part_references": wire.Part(3, bytes(4), bytes(8), False, 1, 0, references=bytes([7] + [0] * 10 + [14] + [0] * 4)),
    "part_last": wire.Part(3, b"", b"", True, 9, 8183, 0),
    "contains_reply": wire.ContainsReply(4, b"\x01\x00\x01"),
    "contains_reply_promised": wire.ContainsReply(4, b"\x01\x02\x00"),
    "match_reply": wire.MatchReply(5, 200),
    "delete_reply": wire.DeleteReply(6, 0),
    "sync_reply": wire.SyncReply(7),
    "info_reply": wire.InfoReply(8, msgspec.msgpack.encode(SHARD_INFO)),
    "pong": wire.Pong(2**63 - 1),
    "scrub_reply": wire.ScrubReply(10, 16),
    "purge_reply": wire.PurgeReply(12, 1_000_000, 1_790_000_000_000_000_001, ["5b0e" * 8], 3, ["10.0.0.7:41234"]),
    "raised": wire.Raised(0, 1_790_000_000_000_000_001),
    "hottest_reply": wire.HottestReply(11, 8, b"hot-1st!hot-2nd!", 700_000, b"hot-0th!hot-1st!"),
    "extent": wire.Extent(0, 7, 32 << 20),
    "retired": wire.Retired(0, bytes([7] + [0] * 7)),
    "share_reply": wire.ShareReply(13),
    "taken": wire.Taken(2, 16),
    "release_ring": wire.ReleaseRing(0, 4096),
    "promise_reply": wire.PromiseReply(14, b"\x00\x01\x02"),
    "withdraw_reply": wire.WithdrawReply(15, 62),
    "expire_reply": wire.ExpireReply(16, b"\x01\x00\x01"),
    "clients_reply": wire.ClientsReply(
        17,
        [
            wire.ConnectedClient(
                *(257, "10.0.0.7:41234", "kvstore-client/0.1.0 pid=7", "chat-engines", "chat", NAMESPACE.id, "m/7B"),
                *("tcp", 3600.5, 0.25, 2, 917_504, 4 << 30, 65_536),
            )
        ],
    ),
    "slowlog_reply": wire.SlowlogReply(
        18,
        [
            wire.SlowRequest(
                *(1_790_000_000.5, "get", 64, 58_720_256, 0.75, 1.5, "disk", 0.5, "10.0.0.7:41234"),
                *("kvstore-client/0.1.0 pid=7", "chat-engines", "chat", NAMESPACE.id, "m/7B"),
            )
        ],
        100,
    ),
    "configure_reply": wire.ConfigureReply(
        17, [wire.RunningSetting("log-level", "debug", "info", "one of debug, info", "--log-level debug")], "info"
    ),
    "error": wire.Error(0, 6, "10000 keys in one request: expected 0 to 8192; split the batch"),
}
FRAMES: dict[str, bytes] = {
    "zmtp_greeting": zmtp.greeting(),
    "zmtp_ready_dealer": zmtp.ready(b"DEALER"),
    "zmtp_ready_router": zmtp.ready(b"ROUTER"),
    "zmtp_pong": zmtp.command(b"PONG", b"context"),
    "zmtp_command_long": zmtp.command(b"ERROR", bytes(250)),
    "zmtp_frame": zmtp.frame(b"\x93\x09\x07\x01", False),
    "zmtp_frame_more": zmtp.frame(b"\x93\x09\x07\x01", True),
    "zmtp_frame_empty": zmtp.frame(b"", False),
    "zmtp_frame_longest_short": zmtp.frame_head(255, True),
    "zmtp_frame_shortest_long": zmtp.frame_head(256, False),
    "zmtp_frame_block_more": zmtp.frame_head(917_504, True),
}


TWO_BLOCKS = wire.Part(
    3,
    np.array([1, 0], dtype="<u4").tobytes(),
    np.array([checksum(b"block001"), checksum(b"block000")], dtype="<u8").tobytes(),
    True,
    2,
)


def test_every_vector_is_tested() -> None:
    tested = {*REQUESTS, *REPLIES, *FRAMES, *PARTS, "namespace", "namespace_id", "message_set"}
    assert {path.stem for path in VECTORS.iterdir()} == tested


def test_every_message_has_a_vector() -> None:
    messages = {type(message) for message in (*REQUESTS.values(), *REPLIES.values())}
    assert messages == {*wire.VERBS, *wire.Reply.__subclasses__()}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_equals_its_vector(name: str) -> None:
    assert wire.encode(REQUESTS[name]).hex(" ") == vector(name).hex(" ")
    assert wire.decode_request(vector(name)) == REQUESTS[name]


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_equals_its_vector(name: str) -> None:
    assert wire.encode(REPLIES[name]).hex(" ") == vector(name).hex(" ")
    assert wire.decode_reply(vector(name)) == REPLIES[name]


@pytest.mark.parametrize("name", FRAMES)
def test_a_zmtp_frame_equals_its_vector(name: str) -> None:
    assert FRAMES[name].hex(" ") == vector(name).hex(" ")


def test_the_canonical_namespace_and_id_equal_their_vectors() -> None:
    assert vector("namespace") == CANONICAL
    assert wire.namespace_id(CANONICAL) == vector("namespace_id")


def test_a_whole_set_equals_its_vector() -> None:
    """The SET has two blocks of 8 bytes with keys of 8 bytes. Its frames are the header, the keys, one payload frame
    and the checksums."""
    frames = [
        wire.encode(wire.Set(9, 1000, 2, 8)),
        b"key--001key--002",
        b"block001block002",
        checksum(b"block001").to_bytes(8, "little") + checksum(b"block002").to_bytes(8, "little"),
    ]
    message = b"".join(zmtp.frame(data, number < 3) for number, data in enumerate(frames))
    assert message.hex(" ") == vector("message_set").hex(" ")


def test_info_contains_the_shard() -> None:
    reply = wire.decode_reply(vector("info_reply"))
    assert isinstance(reply, wire.InfoReply)
    assert msgspec.msgpack.decode(reply.info, type=wire.ShardInfo) == SHARD_INFO


def test_a_shard_without_a_disk_tier_says_so_in_info() -> None:
    info = msgspec.structs.replace(SHARD_INFO, disk=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info))["disk"] is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=wire.ShardInfo) == info


# ---- compatibility -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REQUESTS, *REPLIES])
def test_fields_appended_by_a_newer_peer_are_ignored(name: str) -> None:
    fields = msgspec.msgpack.decode(vector(name))
    longer = msgspec.msgpack.encode([*fields, "new", {"field": 1}])
    if name in REQUESTS:
        assert wire.decode_request(longer) == REQUESTS[name]
    else:
        assert wire.decode_reply(longer) == REPLIES[name]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_decodes_with_more_or_fewer_fields(name: str) -> None:
    assert wire.decode_reply(vector(name)) == TWO_BLOCKS


def test_parts_are_written_with_all_fields() -> None:
    """Both the codec and the code that writes most PARTs write all fields."""
    assert wire.encode(TWO_BLOCKS).hex(" ") == vector("part_of_10_fields").hex(" ")
    positions, sums = np.frombuffer(TWO_BLOCKS.positions, "<u4"), np.frombuffer(TWO_BLOCKS.sums, "<u8")
    memory = np.frombuffer(b"block001block000", dtype=np.uint8)
    parts = Parts(3, positions, sums, memory, np.array([0, 8]), 8, 2, True, 0, 0, b"")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parts.send(ours)
        assert theirs.recv(1000) == zmtp.frame(vector("part_of_10_fields"), True) + zmtp.frame(bytes(memory), False)


def test_optional_fields_may_be_omitted() -> None:
    assert wire.decode_request(msgspec.msgpack.encode([1, 5, 1])) == wire.Hello(5, 1, b"", "", b"", 1)
    assert wire.decode_request(msgspec.msgpack.encode([2, 5, 100, 1, 8])) == wire.Set(5, 100, 1, 8, False, 0, False)
    assert wire.decode_request(msgspec.msgpack.encode([2, 5, 100, 1, 8, True, 3])) == wire.Set(
        5, 100, 1, 8, True, 3, False
    )
    assert wire.decode_request(msgspec.msgpack.encode([3, 5, 100, 1, 8])) == wire.Get(5, 100, 1, 8, 0)


@pytest.mark.parametrize(
    ("oldest", "newest", "spoken"),
    [
        (3, 0, 3),  # a client of the previous release, which does not know ranges
        (3, 4, 4),
        (4, 0, 4),
        (4, 4, 4),
        (4, 9, 4),  # a client of a later release that still speaks this version
        (1, 3, 3),
    ],
)
def test_a_connection_uses_the_highest_common_version(oldest: int, newest: int, spoken: int) -> None:
    assert (wire.OLDEST_PROTOCOL, wire.PROTOCOL_VERSION) == (3, 4)
    assert wire.agreed_protocol(wire.Hello(1, oldest, newest=newest)) == spoken


@pytest.mark.parametrize(
    ("oldest", "newest", "said"),
    [
        (2, 0, "the client speaks version 2 of the protocol: this server speaks versions 3 to 4; upgrade the client"),
        (
            1,
            2,
            "the client speaks versions 1 to 2 of the protocol: this server speaks versions 3 to 4; upgrade the client",
        ),
        (
            5,
            7,
            "the client speaks versions 5 to 7 of the protocol: this server speaks versions 3 to 4; upgrade the server",
        ),
    ],
)
def test_without_a_common_version_the_error_has_both_ranges(oldest: int, newest: int, said: str) -> None:
    with pytest.raises(WireError, match=said) as caught:
        wire.agreed_protocol(wire.Hello(8, oldest, newest=newest))
    assert (caught.value.code, caught.value.request_id) == (ErrorCode.VERSION, 8)


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("welcome", {"zone": "", "unix_socket": "", "instance": "", "nixl": False, "generation": 0, "transport": ""}),
        ("set_reply", {"outcomes": b"", "evicted": 0, "generation": 0}),
    ],
)
def test_replies_of_an_older_shard_are_read(name: str, since: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(vector(name))
    older = msgspec.msgpack.encode(fields[: len(fields) - len(since)])
    assert wire.decode_reply(older) == msgspec.structs.replace(REPLIES[name], **since)


def test_the_transport_known_to_older_peers_has_its_flag_too() -> None:
    for greeting in (wire.Hello(0, 3), REPLIES["welcome"]):
        assert isinstance(greeting, wire.Hello | wire.Welcome)
        for name, flag in (("nixl", True), ("fabric", False), ("", False)):
            named = wire.with_transport(greeting, name)
            assert (named.nixl, wire.transport_of(named)) == (flag, name)
        older = msgspec.structs.replace(greeting, nixl=True, transport="")
        assert wire.transport_of(older) == "nixl"


def test_info_of_an_older_shard_is_read() -> None:
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(SHARD_INFO))
    del older["policy"], older["index_bytes"], older["disk"]
    for name in ("disk_blocks", "disk_bytes", "disk_evicted", "replicas"):
        del older["namespaces"][0][name]
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=wire.ShardInfo)
    assert (info.policy, info.index_bytes, info.disk) == ("lru", 0, None)
    assert (info.pid, info.namespaces[0].blocks, info.namespaces[0].disk_blocks) == (4242, 30, 0)
    assert info.namespaces[0].replicas == 1


# ---- any bytes -----------------------------------------------------------------------------------------------------


def refused(data: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        wire.decode_request(data)
    return caught.value


@given(st.binary(max_size=200))
@example(b"\x95\x01\x01\x01\xc4\x00\xa1\xff")  # a HELLO whose client name is no UTF-8
@example(b"\x91" * 5000)
@example(b"\x92\x01" + b"\xcf" + b"\xff" * 8)
def test_any_bytes_decode_to_a_request_or_a_wire_error(data: bytes) -> None:
    try:
        request = wire.decode_request(data)
    except WireError as error:
        assert error.code in ErrorCode and str(error) and 0 <= error.request_id < 1 << 63
    else:
        assert 0 <= request.id < 1 << 63


@given(st.binary(max_size=200))
@example(b"\x94\x7f\x01\x01\xa1\xff")  # an ERROR whose text is no UTF-8
def test_any_bytes_decode_to_a_reply_or_a_wire_error(data: bytes) -> None:
    try:
        wire.decode_reply(data)
    except WireError as error:
        assert error.code is ErrorCode.PROTOCOL


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
_values = _scalars | st.lists(_scalars, max_size=3) | st.dictionaries(st.text(max_size=3), _scalars, max_size=2)


@given(st.integers(0, 130), st.lists(_values, max_size=9))
def test_any_fields_decode_to_a_request_or_a_wire_error(tag: int, fields: list[Any]) -> None:
    data = msgspec.msgpack.encode([tag, *fields])
    try:
        request = wire.decode_request(data)
    except WireError:
        return
    if isinstance(request, wire.Set | wire.Get | wire.Contains | wire.MatchPrefix | wire.Delete):
        assert wire.MIN_KEY_BYTES <= request.key_bytes <= wire.MAX_KEY_BYTES
        assert 0 <= request.count <= wire.MAX_KEYS
        assert 0 < request.deadline_ms <= wire.MAX_DEADLINE_MS
    if isinstance(request, wire.Contains | wire.MatchPrefix):
        assert 0 <= request.pin_s <= wire.MAX_PIN_S
    if isinstance(request, wire.Set):
        assert 0 <= request.priority <= wire.MAX_PRIORITY
    if isinstance(request, wire.Hello):
        assert 1 <= request.replicas <= wire.MAX_REPLICAS
    if isinstance(request, wire.Hottest):
        assert 0 < request.deadline_ms <= wire.MAX_DEADLINE_MS
        assert 0 <= request.skip < 1 << 63 and 0 <= request.limit < 1 << 63


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_a_damaged_vector_decodes_or_is_refused(name: str, data: st.DataObject) -> None:
    damaged = bytearray(vector(name))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = damaged[: data.draw(st.integers(0, len(damaged)))]
    for decode in (wire.decode_request, wire.decode_reply):
        try:
            decode(cut)
        except WireError as error:
            assert str(error)


_ids = st.integers(0, 2**63 - 1)
_keyed = (_ids, st.integers(1, wire.MAX_DEADLINE_MS), st.integers(0, wire.MAX_KEYS), st.integers(8, 64))
_lookup = (*_keyed, st.booleans(), st.floats(0, wire.MAX_PIN_S))
_asked = (_ids, st.integers(0, 2**63))
_requests = st.one_of(
    st.builds(
        wire.Hello,
        _ids,
        st.integers(-(2**63), 2**63),
        st.binary(),
        st.text(),
        st.binary(),
        st.integers(1, wire.MAX_REPLICAS),
    ),
    st.builds(wire.Set, *_keyed, st.booleans(), st.integers(0, wire.MAX_PRIORITY), st.booleans()),
    st.builds(wire.Get, *_keyed, st.integers(0, 2**63)),
    st.builds(wire.Contains, *_lookup),
    st.builds(wire.MatchPrefix, *_lookup),
    st.builds(wire.Delete, *_keyed),
    st.builds(wire.Sync, *_asked),
    st.builds(wire.Info, *_asked),
    st.builds(wire.Ping, *_asked),
    st.builds(wire.Credit, *_asked),
    st.builds(wire.Cancel, _ids),
    st.builds(wire.Release, _ids, _ids),
    st.builds(wire.Share, _ids, _ids, st.integers(1, 2**63 - 1)),
    st.builds(wire.Scrub, *_asked),
    st.builds(wire.Hottest, _ids, st.integers(1, wire.MAX_DEADLINE_MS), _ids, _ids),
)
_numbers = st.integers(0, 2**64 - 1)
_shards = st.lists(st.builds(wire.ShardAddress, st.text(), st.text(), _numbers, st.floats(allow_nan=False)))
_replies = st.one_of(
    st.builds(
        wire.Welcome,
        _ids,
        _numbers,
        st.text(),
        st.text(),
        _numbers,
        _numbers,
        _shards,
        st.text(),
    ),
    st.builds(wire.SetReply, _ids, _numbers, _numbers, _numbers, _numbers, _numbers, _numbers, st.binary()),
    st.builds(wire.Part, _ids, st.binary(), st.binary(), st.booleans(), _numbers, _numbers, _numbers),
    st.builds(wire.ContainsReply, _ids, st.binary()),
    st.builds(wire.MatchReply, _ids, _numbers),
    st.builds(wire.DeleteReply, _ids, _numbers),
    st.builds(wire.SyncReply, _ids),
    st.builds(wire.Extent, _ids, _numbers, _numbers),
    st.builds(wire.Retired, _ids, st.binary()),
    st.builds(wire.ShareReply, _ids),
    st.builds(wire.Taken, _ids, _numbers),
    st.builds(wire.InfoReply, _ids, st.binary()),
    st.builds(wire.Pong, _ids),
    st.builds(wire.ScrubReply, _ids, _numbers),
    st.builds(wire.HottestReply, _ids, _numbers, st.binary(), _numbers),
    st.builds(wire.Error, _ids, _numbers, st.text()),
)


@given(_requests)
def test_a_request_survives_the_wire(request: wire.Request) -> None:
    assert wire.decode_request(wire.encode(request)) == request


@given(_replies)
def test_a_reply_survives_the_wire(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(reply)) == reply


def test_a_request_decodes_from_any_buffer() -> None:
    data = vector("get")
    for buffer in (data, bytearray(data), memoryview(data)):
        assert wire.decode_request(buffer) == REQUESTS["get"]


# ---- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "given_", "expected"),
    [
        (wire.Set(1, 1, 1, 7), ErrorCode.KEY_SIZE, "7", "8 to 64"),
        (wire.Get(1, 1, 1, 65), ErrorCode.KEY_SIZE, "65", "8 to 64"),
        (wire.Contains(1, 1, 8193, 8), ErrorCode.LIMIT, "8193", "8192"),
        (wire.Delete(1, 1, -1, 8), ErrorCode.LIMIT, "-1", "0 to 8192"),
        (wire.Set(1, 0, 1, 8), ErrorCode.LIMIT, "0 ms", "1 to 600000"),
        (wire.Set(1, 600_001, 1, 8), ErrorCode.LIMIT, "600001", "1 to 600000"),
        (wire.Set(1, 1, 1, 8, priority=4), ErrorCode.LIMIT, "4", "0 to 3"),
        (wire.Set(1, 1, 1, 8, priority=-1), ErrorCode.LIMIT, "-1", "0 to 3"),
        (wire.Set(1, 1, 1, 8, reads=256), ErrorCode.PROTOCOL, "256 reads", "0 to 255"),
        (wire.Set(1, 1, 1, 8, reads=-1), ErrorCode.PROTOCOL, "-1 reads", "0 to 255"),
        (wire.Set(1, 1, 1, 8, True, reads=1), ErrorCode.PROTOCOL, "1 reads", "0 with force"),
        (wire.Set(1, 1, 1, 8, chained=True, reads=1), ErrorCode.PROTOCOL, "1 reads", "chained"),
        (wire.Set(1, 1, 1, 8, attributes=bytes(14), reads=1), ErrorCode.PROTOCOL, "1 reads", "attributes"),
        (wire.Set(1, 1, 1, 8, ttl_s=-1.0), ErrorCode.LIMIT, "-1.0 s", "0 to 315360000 s"),
        (wire.Set(1, 1, 1, 8, ttl_s=math.nan), ErrorCode.LIMIT, "nan s", "0 to 315360000 s"),
        (wire.Purge(1, 0), ErrorCode.LIMIT, "0 ms", "1 to 600000"),
        (wire.Contains(1, 1, 1, 8, False, 60.5), ErrorCode.LIMIT, "60.5", "0 to 60"),
        (wire.MatchPrefix(1, 1, 1, 8, False, -1.0), ErrorCode.LIMIT, "-1", "0 to 60"),
        (wire.MatchPrefix(1, 1, 1, 8, False, float("nan")), ErrorCode.LIMIT, "nan", "0 to 60"),
        (wire.Get(1, 1, 1, 8, -1), ErrorCode.PROTOCOL, "-1", "0 or more"),
        (wire.Hello(1, 1, replicas=0), ErrorCode.LIMIT, "0", "1 to 3"),
        (wire.Hello(1, 1, replicas=4), ErrorCode.LIMIT, "4", "1 to 3"),
        (wire.Hottest(1, 0, 0, 1), ErrorCode.LIMIT, "0 ms", "1 to 600000"),
        (wire.Hottest(1, 1, -1, 1), ErrorCode.LIMIT, "-1", "0 or more"),
        (wire.Hottest(1, 1, 0, -1), ErrorCode.LIMIT, "-1", "0 or more"),
        (wire.Hottest(1, 1, 2**63, 1), ErrorCode.LIMIT, str(2**63), "below 2**63"),
    ],
)
def test_a_number_over_its_limit_is_named(request_: wire.Request, code: ErrorCode, given_: str, expected: str) -> None:
    error = refused(wire.encode(request_))
    assert error.code is code and error.request_id == 1
    assert given_ in str(error) and expected in str(error)


@pytest.mark.parametrize("request_id", [-1, 2**63])
def test_an_id_out_of_range_is_refused(request_id: int) -> None:
    error = refused(msgspec.msgpack.encode([9, request_id, 1]))
    assert error.code is ErrorCode.PROTOCOL and str(request_id) in str(error) and error.request_id == 0


def test_a_broken_header_still_names_its_request() -> None:
    assert refused(msgspec.msgpack.encode([3, 77, "soon", 1, 8])).request_id == 77
    assert refused(msgspec.msgpack.encode([3, "77", 1000, 1, 8])).request_id == 0
    assert refused(b"").request_id == 0


def test_an_unknown_tag_is_refused() -> None:
    assert refused(msgspec.msgpack.encode([99, 1, 1])).code is ErrorCode.PROTOCOL
    assert refused(msgspec.msgpack.encode([73, 1])).code is ErrorCode.PROTOCOL  # a reply is no request


@pytest.mark.parametrize(
    ("canonical", "code", "part"),
    [
        (b"", ErrorCode.PROTOCOL, "JSON"),
        (b"[]", ErrorCode.PROTOCOL, "object"),
        (b'{"version":1,"block_bytes":8}', ErrorCode.PROTOCOL, "model"),
        (b'{"version":1,"block_bytes":"8","model":"m"}', ErrorCode.PROTOCOL, "block_bytes"),
        (b'{"version":1,"block_bytes":8,"model":"\xff"}', ErrorCode.PROTOCOL, "utf-8"),
        (b'{"version":1,"block_bytes":8,"model":"m","x":"\xff"}', ErrorCode.PROTOCOL, "utf-8"),
        (b'{"version":2,"block_bytes":8,"model":"m"}', ErrorCode.VERSION, "version 2"),
        (b'{"version":1,"block_bytes":0,"model":"m"}', ErrorCode.BLOCK_SIZE, "1 to 67108864"),
        (b'{"version":1,"block_bytes":67108865,"model":"m"}', ErrorCode.BLOCK_SIZE, "67108865"),
        (b" " * 8193, ErrorCode.LIMIT, "8193"),
        (b"[" * 8192, ErrorCode.PROTOCOL, "JSON"),
    ],
)
def test_a_bad_namespace_is_refused(canonical: bytes, code: ErrorCode, part: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_namespace(canonical)
    assert caught.value.code is code and part in str(caught.value)


@given(st.binary(max_size=100))
def test_any_bytes_decode_to_a_namespace_or_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_namespace(data)


@given(st.integers(1, wire.MAX_BLOCK_BYTES))
@example(1)
@example(wire.MAX_BLOCK_BYTES)
@example(wire.FRAME_BYTES)
@example(wire.FRAME_BYTES + 1)
def test_frames_stay_within_their_limits(block_bytes: int) -> None:
    per_frame = wire.frame_blocks(block_bytes)
    assert 1 <= per_frame <= wire.MAX_FRAME_BLOCKS
    assert per_frame == 1 or per_frame * block_bytes <= wire.FRAME_BYTES
    assert per_frame * (wire.CHECKSUM_BYTES + 4) < wire.MAX_HEADER_BYTES
