"""The members of a cluster behind one DNS name, such as a headless Kubernetes service. Each address is a node.

The name is resolved every two seconds. The directory asks each new address which node it is, and repeats this every
ten seconds. A node that the first look-up finds counts as serving. A node that is found later counts as joining for the
default grace period, because DNS does not say when the node started. Nodes do not announce that they leave. A node
counts as gone when the name no longer resolves to its address, or when it has left two requests unanswered. While the
name cannot be resolved, or no address answers, the members cannot be read.
Only one thread may use a directory, except that any thread may call `close`.
"""

from __future__ import annotations

import functools
import logging
import random
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore.cluster.members import DirectoryError, Member, MemberError, Membership, State, check_member
from kvstore.cluster.schemes import Scheme
from kvstore.cluster.url import DnsURL, parse_dns_url
from kvstore.tls import TLSOptions
from kvstore.wire import ShardAddress
from kvstore.wire.queries import Dial, ShardQueries, ShardQueryError, dial_tcp

log = logging.getLogger(__name__)

RESOLVE_S: Final = (1.5, 2.5)
RESOLVE_EVERY_S: Final = (8.0, 12.0)
RESOLVE_TIMEOUT_S: Final = 1.0
GRACE_S: Final = 300.0
_ASKERS: Final = 16
_MISSED: Final = 2  # a node counts as gone after this many requests without an answer


@dataclass
class _Node:
    """The state of one address."""

    member: Member | None = None  # None if it has not answered, or no longer answers
    joined: float = 0.0
    ask_at: float = 0.0
    missed: int = 0
    told: str = ""  # the node id in the last log line that says that this address is not used


class DnsDirectory:
    """The nodes at one name. Its methods raise `DirectoryError` and no other error. Each call blocks for at most a few
    seconds."""

    def __init__(self, url: DnsURL, tls: TLSOptions | None = None) -> None:
        """`tls`: how to connect to the nodes."""
        self.url = url
        self._dial: Dial = dial_tcp
        if tls is not None:
            from kvstore.tls.outgoing import dial

            self._dial = functools.partial(dial, tls)
        self._closed = threading.Event()
        self._nodes: dict[str, _Node] = {}
        self._members: Sequence[Member] = ()
        self._epoch = 0

    def membership(self) -> Membership:
        """Return all current members. The epoch is a count of changes."""
        addresses = self._resolve()
        now = time.monotonic()
        self._nodes = {address: self._nodes.get(address, _Node()) for address in addresses}
        due = [address for address, node in self._nodes.items() if node.ask_at <= now]
        with ThreadPoolExecutor(_ASKERS, "kvstore-dns") as askers:
            answers = list(askers.map(self._ask, due))
        for address, answer in zip(due, answers, strict=True):
            self._learn(self._nodes[address], answer, now)
        members = self._list(now)
        if not members:
            reasons = {str(answer) for answer in answers if isinstance(answer, Exception)}
            raise DirectoryError(
                f"{self.url}: none of {len(addresses)} addresses answers: {'; '.join(sorted(reasons))}"
            )
        if members != self._members:
            self._members = members
            self._epoch += 1
        return Membership(self._epoch, members)

    def wait_for_change(self, after_epoch: int, timeout_s: float) -> bool:
        """Block until it is time to resolve the name again."""
        self._closed.wait(min(timeout_s, random.uniform(*RESOLVE_S)))
        return True

    def close(self) -> None:
        """Close the directory, and wake a thread in `wait_for_change`."""
        self._closed.set()

    def _resolve(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.url.host, self.url.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DirectoryError(f"{self.url}: cannot resolve {self.url.host!r}: {error}") from None
        return sorted({str(address[0]) for *_, address in found})

    def _ask(self, address: str) -> Member | ShardQueryError | MemberError:
        try:
            with ShardQueries((address, self.url.port), RESOLVE_TIMEOUT_S, dial=self._dial) as asking:
                welcome = asking.welcome
            shards = [
                ShardAddress(shard.name, shard.host or address, shard.port, shard.weight) for shard in welcome.shards
            ]
            member = Member(welcome.node, "serving", shards, zone=welcome.zone)
            check_member(member)
        except (ShardQueryError, MemberError) as error:
            return error
        return member

    def _learn(self, node: _Node, answer: Member | Exception, now: float) -> None:
        if isinstance(answer, Member):
            if node.member is None:
                node.joined = now if self._members else now - GRACE_S
            node.member, node.missed, node.ask_at = answer, 0, now + random.uniform(*RESOLVE_EVERY_S)
            return
        node.missed += 1
        if node.missed >= _MISSED:
            node.member = None

    def _list(self, now: float) -> list[Member]:
        """Return a member for each node that answers; a node with several addresses counts once."""
        members: dict[str, Member] = {}
        shards: set[str] = set()
        for address, node in self._nodes.items():
            if node.member is None:
                continue
            names = {shard.name for shard in node.member.shards}
            if node.member.node in members or names & shards:
                if node.told != node.member.node:
                    node.told = node.member.node
                    log.info("%s: not using %s: node %r has another address", self.url, address, node.member.node)
                continue
            state: State = "serving" if now - node.joined >= GRACE_S else "joining"
            members[node.member.node] = msgspec.structs.replace(node.member, state=state)
            shards |= names
        return [members[name] for name in sorted(members)]


DNS_CLUSTERS: Final = Scheme(parse_dns_url, DnsDirectory)
