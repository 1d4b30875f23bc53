"""Keeps the links of one client to all shards of a store, and closes the links of shards that leave.

Normally, the only thread is that of a cluster's `Watch`. A caller sends its requests itself, and the caller that waits
first reads for all (see `leading`). `dialing` connects again after a connection is lost. If a shard owes an answer and
is silent for too long, its link becomes broken.

The nodes are either a fixed list, whose WELCOMEs name the shards, or members of a cluster, which a `Watch` reports. A
view is replaced as a whole. A link that left the view is closed when no call needs it. Thread-safe, also after a fork.

Over 400 lines because the view, its links and their connections change together.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore import __version__, wire
from kvstore.cluster.members import DirectoryError, Membership, PackageMissing
from kvstore.wire import MAX_REPLICAS
from kvstore.wire.dealer import ReplyCollector
from kvstore.wire.remote_memory import Transport
from kvstore_client._links.connector import SharedMemory
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.dialing import Dialer
from kvstore_client._links.first_contact import welcome_of_next
from kvstore_client._links.generations import KnownGenerations, Listener
from kvstore_client._links.lanes import LaneReaders
from kvstore_client._links.leading import Leading
from kvstore_client._links.link import SHARED_MEMORY, Link
from kvstore_client._links.liveness import DEAD_AFTER_S
from kvstore_client._links.polling import LOOK_ANYWAY_S
from kvstore_client._links.view import Node, ShardEntry, View
from kvstore_client._links.watching import Watch
from kvstore_client.endpoints import Endpoints
from kvstore_client.errors import TRANSPORT_ERRORS, ConnectionLost, KVStoreError, Timeout
from kvstore_client.results import ClientStats

log = logging.getLogger("kvstore_client")

PREFERRED_S: Final = 1.0  # how long the same replica stays the preferred one
FAIL_OPEN_WAIT_S: Final = 1.0  # how long a client with `fail_open` first waits for a node or the directory
FIRST_NODES: Final = 3  # how many of a cluster's nodes are tried at the start, until one is connected


class LinkPool:
    """The links of one client. `lanes`: the number of connections to each shard. `transport`: how to read the memory of
    shards on other hosts. `credentials`: the client's token. `keeps_copies`, `fail_open`: see `KVStoreClient`.
    Thread-safe."""

    def __init__(
        self,
        endpoints: Endpoints,
        namespace: bytes,
        timeout_s: float,
        replicas: int,
        shared_memory: SharedMemory = "auto",
        lanes: int = 1,
        transport: Transport | None = None,
        credentials: Credentials | None = None,
        keeps_copies: bool = False,
        fail_open: bool = False,
    ) -> None:
        self.tls = endpoints.tls
        self.stats = ClientStats()
        self.timeout_s = timeout_s
        self.closed = False
        self.view = View([])
        self._namespace = namespace
        self._shared_memory = shared_memory
        self._transport = transport
        self._credentials = credentials
        self._lanes = lanes
        self.replicas = replicas
        self.generations = KnownGenerations()
        self._keeps_copies = keeps_copies
        self._fail_open = fail_open
        self._nodes = [Node(host, port) for host, port in endpoints.nodes]
        self._cluster = endpoints.cluster  # empty if the nodes are a list
        self._members: Watch | None = None
        self._no_members = ""  # why no member was known at the start
        self._ids = itertools.count(1)
        self._phase = random.uniform(0.0, MAX_REPLICAS)  # random, so that clients do not all ask the same replica
        self._new_process_state()

    def _new_process_state(self) -> None:
        self._pid = os.getpid()
        self._leading = Leading(lambda: [*self.links, *self._retired], self.look_after)
        self.wait, self.wake = self._leading.wait, self._leading.wake
        self._map_lock = threading.Lock()
        self._lane_readers = LaneReaders(self._wake)
        self.dialer = Dialer(lambda: self.connections, self._connect_again, self._wake, self.stats, self._fail_open)
        self._retired: dict[Link, float] = {}  # for each link that left the view: when to close it
        self._looked_after = 0.0
        self._listener = Listener(self.generations, self._listened) if self._keeps_copies else None

    def _listened(self) -> Sequence[Link]:
        return self.connections

    def after_fork(self) -> None:
        """Forget everything that a child process shares with its parent. Send nothing on the parent's connections."""
        if self.closed:
            return
        self._leading.forget()
        self._lane_readers.forget()
        self.generations.new_locks()
        for link in [*self.connections, *self._retired]:
            link.reset_locks()
            link.close(forked=True)
            link.broken = None
        self._new_process_state()
        if self._members is not None:
            self._members = Watch(self._cluster, self._follow, self.tls)

    def _wake(self) -> None:
        self._leading.wake()

    @property
    def links(self) -> Sequence[Link]:
        """The links of the present view."""
        return self.view.links

    @property
    def connections(self) -> Sequence[Link]:
        """All lanes of the links of the present view."""
        return self.links if self._lanes == 1 else [lane for link in self.links for lane in link.lanes]

    @property
    def preferred_replica(self) -> int:
        """The number of the replica to ask first now. It changes only once a second, so that a look-up and the read
        after it mostly use the same replica."""
        return int(time.monotonic() / PREFERRED_S + self._phase)

    @property
    def directory_lost(self) -> str:
        """Why the cluster's directory does not answer, or names no node. Empty if it answers, or if there is no
        directory."""
        if self._members is None:
            return ""
        return self._members.lost or ("" if self.view.places else self._no_members)

    def no_shards(self) -> KVStoreError:
        """Return the error for a call when no shard is known."""
        if self.closed:
            return ConnectionLost("this client is closed")
        if self._cluster:
            return ConnectionLost(f"{self._cluster}: no node of the cluster is known")
        return ConnectionLost("no shard is known")

    def next_id(self) -> int:
        """Return a new request id, which no other request of this client has."""
        return next(self._ids)

    def hello(self) -> wire.Hello:
        """Return the HELLO of this client. The request id 0 is used only for HELLO."""
        client = f"kvstore-client/{__version__} pid={os.getpid()}"
        token = self._credentials.token if self._credentials is not None else b""
        return wire.Hello(
            0,
            wire.OLDEST_PROTOCOL,
            self._namespace,
            client,
            token,
            self.replicas,
            release_ring=True,
            newest=wire.PROTOCOL_VERSION,
            generation=self.generations.known,
            holds=self._keeps_copies,
        )

    def _new_link(self, name: str, host: str, port: int) -> Link:
        heard = self.generations
        first = Link(name, host, port, self.hello, self._wake, self._shared_memory, self._transport, self.tls, heard)
        others = range(1, self._lanes)
        lanes = [
            first,
            *(Link(name, host, port, self.hello, self._wake, False, tls=self.tls, generations=heard) for _ in others),
        ]
        for lane in lanes:
            lane.lanes = lanes
        return first

    def _watch(self, link: Link) -> None:
        """Start to read a link's new connection."""
        if link.first is link:
            self._leading.watch(link)
        else:
            self._lane_readers.watch(link)

    @property
    def path(self) -> str:
        """How blocks are received from the shards. It is "shared memory" if any shard on this host lends its memory,
        else the transport's name if any shard is read through it, else "tls" or "tcp"."""
        paths = {link.path for link in self.links}
        ways = (SHARED_MEMORY, self._transport.name if self._transport is not None else "")
        return next((way for way in ways if way in paths), "tcp" if self.tls is None else "tls")

    # ---- connections -----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to every node of a list, or to one node of a cluster. Raises if this fails, unless `fail_open` is
        set. A refusal is raised in any case. With `fail_open`, nodes that do not greet cost 1.5 s at most."""
        try:
            if self._cluster:
                self._connect_cluster()
            else:
                self._connect_nodes()
        except TRANSPORT_ERRORS as error:
            if not self._fail_open:
                self.close()
                raise
            log.warning("%s; all blocks are misses until the store answers", error)
        except BaseException:
            self.close()
            raise

    def _connect_nodes(self) -> None:
        if not self._fail_open or len(self._nodes) == 1:
            for node in self._nodes:
                self._connect_node(node)
            return
        with ThreadPoolExecutor(len(self._nodes), "kvstore-connect") as threads:  # all at once, so that none waits
            connecting = [threads.submit(self._connect_node, node) for node in self._nodes]
        for each in connecting:
            each.result()

    def _connect_node(self, node: Node) -> None:
        link = self._new_link(f"{node.host}:{node.port}", node.host, node.port)
        try:
            welcome = link.connect(self.timeout_s, FAIL_OPEN_WAIT_S if self._fail_open else math.inf)
        except TRANSPORT_ERRORS as failure:
            token = self._credentials.token if self._credentials is not None else b""
            found = welcome_of_next(node.host, node.port, self.tls, token, self.timeout_s)
            error: KVStoreError = failure
            if found is not None:
                shard = f"shard {found.shard} of {len(found.shards)}"
                error = type(failure)(f"{failure}; it is {shard}, and another shard of the node answers")
            if not self._fail_open:
                raise error from None
            if found is not None:
                self._adopt(node, link, found)
            else:
                node.links = [link]
                self._remap()
            self.dialer.break_link(link, error)
        else:
            try:
                self._adopt(node, link, welcome)
            except ValueError as twice:
                link.drop(ConnectionLost(str(twice)))
                raise
            self._watch(link)
            self.dialer.open_lanes(link)

    def _connect_cluster(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            self._members = Watch(self._cluster, self._follow, self.tls)
        except DirectoryError as error:  # a package is missing, or an option of the directory is wrong
            raise (ImportError if isinstance(error, PackageMissing) else ValueError)(str(error)) from None
        try:
            self._members.wait(min(self.timeout_s, FAIL_OPEN_WAIT_S) if self._fail_open else self.timeout_s)
        except DirectoryError as error:
            self._no_members = str(error)
            raise ConnectionLost(str(error)) from None
        places = list(self.view.places)
        if not places:
            raise self.no_shards()
        random.shuffle(places)
        one_a_node = list({place.node: place.link for place in places}.values())
        first = one_a_node[:FIRST_NODES]
        for left, link in zip(range(len(first), 0, -1), first, strict=True):
            try:
                now = time.monotonic()
                return self.dialer.ensure_up(link, now + (deadline - now) / left)
            except TRANSPORT_ERRORS:
                if left == 1:
                    raise

    def _adopt(self, node: Node, first: Link, welcome: wire.Welcome) -> None:
        """Make a link for each shard that the node named in its WELCOME. Raises `ValueError` if another node of the
        list is the same server. Blocks would be counted twice, and both copies of a block would be in one place."""
        with self._map_lock:
            node.instance = welcome.instance
            twin = next((each for each in self._nodes if each is not node and each.is_same_as(node)), None)
            if twin is not None:
                raise ValueError(
                    f"endpoints {twin.host}:{twin.port} and {node.host}:{node.port} are one server, {welcome.node}: "
                    "expected each server once"
                )
            first.name = welcome.shards[welcome.shard].name
            known = {link.name: link for link in node.links}
            known[first.name] = first
            links = []
            for address in welcome.shards:
                host = address.host or node.host
                link = known.pop(address.name, None) or self._new_link(address.name, host, address.port)
                link.rename(address.name, host, address.port, address.weight)
                links.append(link)
            node.links, node.zone = links, welcome.zone
        self._retire(known.values())
        self._remap()

    def _ignore(self, node: Node, twice: ValueError) -> KVStoreError:
        """Remove a node that turned out to be the server of another node. Return the error for calls that use it."""
        log.error("%s; the second is ignored", twice)
        with self._map_lock:
            self._nodes = [each for each in self._nodes if each is not node]
        self._retire(node.links)
        self._remap()
        error = ConnectionLost(str(twice))
        for link in node.links:
            link.broken = error
            link.drop(error)
        return error

    def _remap(self) -> None:
        with self._map_lock:  # a view that was made earlier must not replace this one
            self.view = View(
                [
                    ShardEntry(link, f"{node.host}:{node.port}", node.zone or f"{node.host}:{node.port}")
                    for node in self._nodes
                    for link in node.links
                ]
            )

    def _follow(self, membership: Membership) -> None:
        """Replace the view, because the cluster has changed. The follower's thread calls this."""
        with self._map_lock:
            if self.closed:
                return
            known = {(link.name, link.host, link.port): link for link in self.links}
            places: dict[str, ShardEntry] = {}
            for member in membership.members:
                for shard in member.shards:
                    if shard.name in places:
                        log.error(
                            "shard %s is named by nodes %s and %s: the second is ignored; is its disk folder a copy?",
                            shard.name,
                            places[shard.name].node,
                            member.node,
                        )
                        continue
                    link = known.pop((shard.name, shard.host, shard.port), None)
                    if link is None:
                        link = self._new_link(shard.name, shard.host, shard.port)
                        link.fixed_name = True
                    link.weight = shard.weight
                    places[shard.name] = ShardEntry(
                        link,
                        member.node,
                        member.zone or member.node,
                        member.state,
                        member.is_new_owner,
                        member.is_old_owner,
                    )
            self.view = View(list(places.values()), membership.epoch)
        self._retire(known.values())
        self._close_retired(time.monotonic())

    def _retire(self, links: Iterable[Link]) -> None:
        """Mark links as retired, because they are not in the view any more. Calls in progress may still use them."""
        closed_at = time.monotonic() + self.timeout_s
        for link in links:
            for lane in link.lanes:
                lane.retired = True
                if lane.sock is not None:
                    self._retired[lane] = closed_at

    def _close_retired(self, now: float) -> None:
        for link, closed_at in list(self._retired.items()):
            if now > closed_at and not link.pending:
                self._retired.pop(link, None)
                link.drop(ConnectionLost(f"{link}: it left the cluster"))

    def _connect_again(self, link: Link, timeout_s: float) -> None:
        before = link.connections
        try:
            welcome = link.connect(timeout_s)
        except KVStoreError as refusal:
            if link.first is not link and not isinstance(refusal, TRANSPORT_ERRORS):
                self.dialer.give_up_lane(link, refusal)
            raise
        if link.first is link:
            node = next((node for node in self._nodes if link in node.links), None)
            if node is not None:
                try:
                    self._adopt(node, link, welcome)
                except ValueError as twice:
                    raise self._ignore(node, twice) from None
            self.dialer.open_lanes(link)
        self._watch(link)
        if link.retired:  # it left the view while it connected
            self._retire([link.first])
        if self.closed:  # it was closed while the link connected
            link.drop(error := ConnectionLost("this client is closed"))
            raise error
        if before:
            self.stats.reconnects += 1
            log.info("%s: connected again", link)

    def close(self) -> None:
        """Disconnect. Calls in progress fail with `ConnectionLost`."""
        if self.closed:
            return
        self.closed = True
        if self._listener is not None:
            self._listener.stop()
        self.dialer.stop()
        if self._members is not None:
            self._members.close()
        for link in [*self.connections, *self._retired]:
            link.connector.interrupt()
        self.dialer.join()
        for link in [*self.connections, *self._retired]:
            link.drop(ConnectionLost("this client is closed"))
        self._lane_readers.close()  # before `_leading`, because they wake the caller that leads
        self._leading.close()

    # ---- requests --------------------------------------------------------------------------------------------

    def lost(self, link: Link, answer: ReplyCollector) -> None:
        """Fail an answer that its caller gave up. If the shard has sent nothing for a whole timeout, break the link."""
        sent_at = answer.sent_at
        silent = sent_at > link.liveness.last_received and time.monotonic() - sent_at > self.timeout_s * 0.9
        link.abandon(answer)
        error = Timeout(f"{link}: no reply in time")
        answer.fail(error)
        if silent and link.sock is not None:
            self.dialer.break_link(link, error)
            link.drop(error)

    def look_after(self) -> None:
        """Send a PING to silent shards, and break the links to shards that do not answer. Callers call this often while
        they wait."""
        now = time.monotonic()
        if now < self._looked_after + LOOK_ANYWAY_S:
            return
        self._looked_after = now
        for link in [*self.connections, *self._retired]:
            if link.pending and not link.liveness.look_after(now):
                error = Timeout(f"{link}: it owes an answer and has been silent for {DEAD_AFTER_S:g} s")
                self.dialer.break_link(link, error)
                link.drop(error)
        for link in self.links if self._lanes > 1 else ():
            if link.sock is not None:
                self.dialer.open_lanes(link)
        if self._retired:
            self._close_retired(now)
