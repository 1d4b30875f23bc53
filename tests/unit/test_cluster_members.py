"""The record that a node writes about itself, and which records are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.cluster.members import MAX_MEMBER_BYTES, Member, MemberError, decode_member, encode_member
from kvstore.wire import ShardAddress

MEMBER = Member(
    "a", "serving", [ShardAddress("a/0", "10.0.0.1", 7070, 1e9), ShardAddress("a/1", "10.0.0.1", 7071, 1e9)], zone="z"
)


def test_a_record_reads_back_as_it_was_written() -> None:
    assert decode_member(encode_member(MEMBER)) == MEMBER


def test_fields_of_a_later_version_are_ignored() -> None:
    record = json.loads(encode_member(MEMBER)) | {"something": [1]}
    assert decode_member(json.dumps(record).encode()) == MEMBER


def test_states_say_where_blocks_are_set_and_may_be_found() -> None:
    owners = {
        state: (member.is_new_owner, member.is_old_owner)
        for state in ("joining", "serving", "draining")
        for member in [Member("a", state, MEMBER.shards)]  # type: ignore[arg-type]
    }
    assert owners == {"joining": (True, False), "serving": (True, True), "draining": (False, True)}


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(encode_member(MEMBER)) | fields).encode()


def shard(**fields: Any) -> bytes:
    return changed(shards=[list(({"name": "a/0", "host": "h", "port": 1, "weight": 1.0} | fields).values())])


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"{}",
        b" " * (MAX_MEMBER_BYTES + 1),
        changed(node=""),
        changed(node=5),
        changed(state="gone"),
        changed(shards=[]),
        changed(shards=None),
        shard(name=""),
        shard(host=""),
        shard(port=0),
        shard(port=65536),
        shard(port=1.5),
        shard(weight=0),
        shard(weight=-1),
        shard(weight="1"),
        shard().replace(b"1.0", b"1e999"),
        changed(shards=[["a/0", "h", 1]]),
        changed(shards=[["a/0", "h", 1, 1.0]] * 2),
    ],
    ids=lambda record: repr(record[:40]),
)
def test_an_invalid_record_is_no_member(record: bytes) -> None:
    with pytest.raises(MemberError):
        decode_member(record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"nodes: 3", "the record is not the JSON of a member: "),
        (
            b" " * (MAX_MEMBER_BYTES + 1),
            f"the record has {MAX_MEMBER_BYTES + 1} bytes: expected at most {MAX_MEMBER_BYTES}",
        ),
        (changed(node=""), "the node id is empty"),
        (changed(shards=[]), "node 'a' has no shards: expected at least 1"),
        (shard(port=0), "node 'a' has shard 'a/0' at host 'h', port 0, with weight 1.0: expected a name, "),
        (changed(shards=[["a/0", "h", 1, 1.0]] * 2), "node 'a' has two shards with the same name"),
    ],
    ids=lambda part: repr(part[:40]),
)
def test_a_refused_record_is_logged_with_the_reason(record: bytes, message: str) -> None:
    with pytest.raises(MemberError) as caught:
        decode_member(record)
    assert str(caught.value).startswith(message)
