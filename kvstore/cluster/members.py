"""The members of a cluster, as nodes register themselves and clients see them.

A `Membership` is what etcd held at one revision; that revision is its epoch. Everybody with the same members computes
the same owners, so nothing else has to be agreed on. Plain data; any thread.

A node's state says which of two placements it takes part in:

* *new*: where blocks are set, and looked for first: members that join or serve;
* *old*: where blocks may still lie that have moved to another owner: members that serve or drain.

So while a node joins, what it does not have yet is found where it was before; and while a node drains, it still
answers for what the others do not have yet. When all members serve, the two placements are one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvstore.wire import ShardAddress

# A name of labels, or an IPv6 address.
_HOST: Final = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9A-Fa-f:.]+(%\w+)?", re.ASCII)
MAX_MEMBER_BYTES: Final = 64 * 1024  # a node's record in the directory

State = Literal["joining", "serving", "draining"]


class MemberError(Exception):
    """A record does not describe a member; the message says why."""


class DirectoryError(Exception):
    """The members cannot be read or written; the message says why."""


class Member(msgspec.Struct, frozen=True):
    """One node."""

    node: str  # its id: unique in the cluster, the same after a restart
    state: State
    shards: list[ShardAddress]  # with hosts; weight: bytes of block memory
    zone: str = ""  # what fails together; replicas go to different ones
    version: str = ""
    instance: str = ""  # another one for every start of the node
    started: float = 0.0  # unix seconds, for people
    metrics: str = ""  # HOST:PORT where the node serves its metrics; empty: it does not

    @property
    def is_new_owner(self) -> bool:
        """Whether blocks are set on it."""
        return self.state != "draining"

    @property
    def is_old_owner(self) -> bool:
        """Whether it may hold blocks that no other node has."""
        return self.state != "joining"


class Membership(msgspec.Struct, frozen=True):
    """All members at one epoch, by node id."""

    epoch: int
    members: Sequence[Member]


def encode_member(member: Member) -> bytes:
    """The record of a member: JSON."""
    return msgspec.json.encode(member)


def decode_member(record: bytes) -> Member:
    """The member that a record describes. Raises `MemberError` for anything else."""
    if len(record) > MAX_MEMBER_BYTES:
        raise MemberError(f"the record has {len(record)} bytes: expected at most {MAX_MEMBER_BYTES}")
    try:
        member = msgspec.json.decode(record, type=Member)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MemberError(f"the record is not the JSON of a member: {error}") from None
    check_member(member)
    return member


def check_member(member: Member) -> None:
    """Raise `MemberError` unless the member has an id and shards that can be connected to and placed on."""
    if not member.node:
        raise MemberError("the node id is empty")
    if not member.shards:
        raise MemberError(f"node {member.node!r} has no shards: expected at least 1")
    for shard in member.shards:
        address = _HOST.fullmatch(shard.host) and 0 < shard.port < 1 << 16
        if not (shard.name and address and 0 < shard.weight < math.inf):
            raise MemberError(
                f"node {member.node!r} has shard {shard.name!r} at host {shard.host!r}, port {shard.port}, with weight "
                f"{shard.weight}: expected a name, a host name or address, a port from 1 to 65535, a finite weight > 0"
            )
    if len({shard.name for shard in member.shards}) < len(member.shards):
        raise MemberError(f"node {member.node!r} has two shards with the same name")
