"""The members of a cluster, as nodes register themselves and clients see them.

Agreement is etcd's: a `Membership` is what it held at one revision, and that revision is its epoch. Whoever has the
same members computes the same owners. Plain data; any thread.

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
    """A record that is no member; the message says why."""


class DirectoryError(Exception):
    """Where the members are listed cannot be asked; the message says why."""


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
        """Whether it may have blocks that nobody else has."""
        return self.state != "joining"


class Membership(msgspec.Struct, frozen=True):
    """All members at one epoch, by node id."""

    epoch: int
    members: Sequence[Member]


def encode_member(member: Member) -> bytes:
    """The record of a member: JSON."""
    return msgspec.json.encode(member)


def decode_member(record: bytes) -> Member:
    """The member a record describes; `MemberError` for anything that must not be trusted."""
    if len(record) > MAX_MEMBER_BYTES:
        raise MemberError(f"a record of {len(record)} bytes: expected at most {MAX_MEMBER_BYTES}")
    try:
        member = msgspec.json.decode(record, type=Member)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MemberError(f"no member record: {error}") from None
    check_member(member)
    return member


def check_member(member: Member) -> None:
    """Raise `MemberError` for a member that cannot be."""
    if not member.node or not member.shards:
        raise MemberError(f"node {member.node!r} with {len(member.shards)} shards: expected an id and at least 1 shard")
    for shard in member.shards:
        address = _HOST.fullmatch(shard.host) and 0 < shard.port < 1 << 16
        if not (shard.name and address and 0 < shard.weight < math.inf):
            raise MemberError(f"node {member.node!r} names a shard that cannot be: {shard}")
    if len({shard.name for shard in member.shards}) < len(member.shards):
        raise MemberError(f"node {member.node!r} has two shards of one name")
