"""The links of one client to all shards of a store, and what happens when a link leaves.

Normally only the thread of a cluster's `Watch` runs. A caller sends its requests itself, and the caller that waits
first reads for all (`leading`). A connection that is lost is made again by `dialing`. If a shard owes an answer and is
silent for too long, its link is broken.

The nodes are a fixed list, whose WELCOME tells their shards, or members of a cluster, which a `Watch` reports. A view
is replaced as a whole. A link that left it is closed when no call can be using it. Thread-safe, also after a fork.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore import __version__, wire
from kvstore.cluster.members import DirectoryError, Membership
from kvstore.wire import MAX_REPLICAS
from kvstore.wire.dealer import Answer
from kvstore.wire.remote_memory import Transport
from kvstore_client._links.connector import SharedMemory
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.dialing import Dialer
from kvstore_client._links.generations import Generations, Listener
from kvstore_client._links.lanes import LaneReaders
from kvstore_client._links.leading import Leading
from kvstore_client._links.link import SHARED_MEMORY, Link
from kvstore_client._links.liveness import DEAD_AFTER_S
from kvstore_client._links.polling import LOOK_ANYWAY_S
from kvstore_client._links.view import Node, Place, View
from kvstore_client._links.watching import Watch
from kvstore_client.endpoints import Endpoints
from kvstore_client.errors import TRANSPORT_ERRORS, ConnectionLost, KVStoreError, Timeout
from kvstore_client.results import ClientStats

log = logging.getLogger("kvstore_client")

TURN_S: Final = 1.0  # how long one replica is asked first before it is the next one's turn
FAIL_OPEN_WAIT_S: Final = 1.0  # how long a `fail_open` client waits for the directory at the start
FIRST_NODES: Final = 3  # how many nodes of a cluster are tried at the start for a first connection


class Core:
    """The links of one client. `lanes`: how many connections it has to each shard. `transport`: how to read the
    memory of shards elsewhere. `credentials`: to log in with. `keeps_copies`: see `KVStoreClient`. Thread-safe."""

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
        self.generations = Generations()
        self._keeps_copies = keeps_copies
        self._nodes = [Node(host, port) for host, port in endpoints.nodes]
        self._cluster = endpoints.cluster  # empty: the nodes are a list
        self._members: Watch | None = None
        self._no_members = ""  # why no member was known at the start
        self._ids = itertools.count(1)
        self._phase = random.uniform(0.0, MAX_REPLICAS)  # so that clients do not all ask the same replica at once
        self._new_process_state()

    def _new_process_state(self) -> None:
        self._pid = os.getpid()
        self._leading = Leading(lambda: [*self.links, *self._retired], self.look_after)
        self.wait, self.wake = self._leading.wait, self._leading.wake
        self._map_lock = threading.Lock()
        self._lane_readers = LaneReaders(self._wake)
        self.dialer = Dialer(lambda: self.connections, self._connect_again, self._wake, self.stats)
        self._retired: dict[Link, float] = {}  # links that left the view -> when no call can need them any more
        self._looked_after = 0.0
        self._listener = Listener(self.generations, self._listened) if self._keeps_copies else None

    def _listened(self) -> Sequence[Link]:
        return self.connections

    def after_fork(self) -> None:
        """In a child process: forget everything shared with the parent, without sending on the parent's connections."""
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
    def turn(self) -> int:
        """Which replica is asked first now. It changes once a second, so that it is mostly the same for a look-up and
        the read that follows."""
        return int(time.monotonic() / TURN_S + self._phase)

    @property
    def directory_lost(self) -> str:
        """Why the cluster's directory cannot be asked, or names no node. Empty if all is well or there is no
        directory."""
        if self._members is None:
            return ""
        return self._members.lost or ("" if self.view.places else self._no_members)

    def no_shards(self) -> KVStoreError:
        """The error of a call when no shard is known."""
        if self.closed:
            return ConnectionLost("this client is closed")
        if self._cluster:
            return ConnectionLost(f"{self._cluster}: no node of the cluster is known")
        return ConnectionLost("no shard is known")

    def next_id(self) -> int:
        """A request id that no other request of this client has."""
        return next(self._ids)

    def hello(self) -> wire.Hello:
        """The HELLO of this client. Only HELLO has the request id 0."""
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
        """Have a link's new connection read."""
        if link.first is link:
            self._leading.watch(link)
        else:
            self._lane_readers.watch(link)

    @property
    def path(self) -> str:
        """How blocks come from the shards: "shared memory" if that is so for one that is on this host, else the name of
        the transport if one is read with it, else "tls" or "tcp"."""
        paths = {link.path for link in self.links}
        ways = (SHARED_MEMORY, self._transport.name if self._transport is not None else "")
        return next((way for way in ways if way in paths), "tcp" if self.tls is None else "tls")

    # ---- connections -----------------------------------------------------------------------------------------

    def connect(self, fail_open: bool) -> None:
        """Connect to every node of a list, or to one node of a cluster. Raises if that is not possible, unless
        `fail_open`; refusals are always raised."""
        try:
            if self._cluster:
                self._connect_cluster(fail_open)
            else:
                self._connect_nodes(fail_open)
        except TRANSPORT_ERRORS as error:
            if not fail_open:
                self.close()
                raise
            log.warning("%s; all blocks are misses until then", error)
        except BaseException:
            self.close()
            raise

    def _connect_nodes(self, fail_open: bool) -> None:
        for node in self._nodes:
            link = self._new_link(f"{node.host}:{node.port}", node.host, node.port)
            try:
                self._adopt(node, link, link.connect(self.timeout_s))
                self._watch(link)
                self.dialer.open_lanes(link)
            except TRANSPORT_ERRORS as error:
                if not fail_open:
                    raise
                node.links = [link]
                self._remap()
                self.dialer.break_link(link, error)

    def _connect_cluster(self, fail_open: bool) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            self._members = Watch(self._cluster, self._follow, self.tls)
        except DirectoryError as error:  # the packages needed to follow a directory are not installed
            raise ValueError(str(error)) from None
        try:
            self._members.wait(min(self.timeout_s, FAIL_OPEN_WAIT_S) if fail_open else self.timeout_s)
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
        """Have a link for each shard that the node named in its WELCOME."""
        with self._map_lock:
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

    def _remap(self) -> None:
        self.view = View(
            [
                Place(link, f"{node.host}:{node.port}", node.zone or f"{node.host}:{node.port}")
                for node in self._nodes
                for link in node.links
            ]
        )

    def _follow(self, membership: Membership) -> None:
        """Replace the view: the cluster has changed. Called by the follower's thread."""
        with self._map_lock:
            if self.closed:
                return
            known = {(link.name, link.host, link.port): link for link in self.links}
            places: dict[str, Place] = {}
            for member in membership.members:
                for shard in member.shards:
                    if shard.name in places:
                        log.error(
                            "shard %s is named by nodes %s and %s: the second is left out; is its disk folder a copy?",
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
                    places[shard.name] = Place(
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
        """Mark links that left the view. Calls that have begun may go on using their connections."""
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
                self._adopt(node, link, welcome)
            self.dialer.open_lanes(link)
        self._watch(link)
        if link.retired:  # it left the view while it connected
            self._retire([link.first])
        if self.closed:  # while it connected
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
        self._lane_readers.close()  # first: they wake the one that leads
        self._leading.close()

    # ---- requests --------------------------------------------------------------------------------------------

    def lost(self, link: Link, answer: Answer) -> None:
        """Fail an answer that its caller gave up. If the shard sent nothing for a whole timeout, its link breaks."""
        sent_at = answer.sent_at
        silent = sent_at > link.liveness.last_received and time.monotonic() - sent_at > self.timeout_s * 0.9
        link.abandon(answer)
        error = Timeout(f"{link}: no reply in time")
        answer.fail(error)
        if silent and link.sock is not None:
            self.dialer.break_link(link, error)
            link.drop(error)

    def look_after(self) -> None:
        """Send a PING to silent shards, and break the links of shards that do not answer. Waiting callers call this
        often."""
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
