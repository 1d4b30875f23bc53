"""The links of one client to all shards of a store, and what happens when a link breaks or leaves.

Normally only the thread of a cluster's `Watch` runs. A caller sends its requests itself, and the caller that waits
first reads for all (`leading`). When a connection is lost, the next call connects again, on the caller's time, for at
most `DEAD_AFTER_S`. If that fails, or if a shard owes an answer and is silent for too long, the link is *broken*: calls
to it fail (or miss) at once, and it is tried again in the background (`probing`).

The nodes are a fixed list, whose WELCOME tells their shards, or members of a cluster, which a `Watch` reports. A view
is replaced as a whole. A link that left it is closed when no call can be using it. Thread-safe, also after a fork.

Over 400 lines because connecting, adopting shards and closing share one lock and one set of links.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore import __version__, wire
from kvstore.cluster.members import DirectoryError, Membership
from kvstore.wire import MAX_REPLICAS
from kvstore.wire.dealer import Answer
from kvstore.wire.remote_memory import Sharing
from kvstore_client._links.credentials import Credentials
from kvstore_client._links.lanes import LaneReaders, without
from kvstore_client._links.leading import Leading
from kvstore_client._links.link import DEAD_AFTER_S, Link, SharedMemory
from kvstore_client._links.polling import LOOK_ANYWAY_S
from kvstore_client._links.probing import Prober
from kvstore_client._links.view import Node, Place, View
from kvstore_client._links.watching import Watch
from kvstore_client.endpoints import Endpoints
from kvstore_client.errors import TRANSPORT_ERRORS, ConnectionLost, KVStoreError, Timeout
from kvstore_client.results import ClientStats

log = logging.getLogger("kvstore_client")

MOST_CONNECTING: Final = 16  # links that a call connects at a time
ENOUGH_TO_CONNECT_S: Final = 0.1  # if a caller with less time than this times out, that says nothing about the shard
TURN_S: Final = 1.0  # how long one replica is asked first before it is the next one's turn
FAIL_OPEN_WAIT_S: Final = 1.0  # how long a `fail_open` client waits for the directory at the start
FIRST_NODES: Final = 3  # how many nodes of a cluster are tried at the start for a first connection


class Core:
    """The links of one client. `lanes`: how many connections it has to each shard. `nixl`: how to read the memory of
    shards elsewhere. `credentials`: with which it logs in. Thread-safe."""

    def __init__(
        self,
        endpoints: Endpoints,
        namespace: bytes,
        timeout_s: float,
        replicas: int,
        shared_memory: SharedMemory = "auto",
        lanes: int = 1,
        nixl: Sharing | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.tls = endpoints.tls
        self.stats = ClientStats()
        self.timeout_s = timeout_s
        self.closed = False
        self.view = View([])
        self._namespace = namespace
        self._shared_memory = shared_memory
        self._nixl = nixl
        self._credentials = credentials
        self._lanes = lanes
        self.replicas = replicas
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
        self._prober = Prober(lambda: self.connections, self._connect_again)
        self._connecting: set[Link] = set()  # on threads of their own
        self._retired: dict[Link, float] = {}  # links that left the view -> when no call can need them any more
        self._looked_after = 0.0

    def after_fork(self) -> None:
        """In a child process: forget everything shared with the parent, without sending on the parent's connections."""
        if self.closed:
            return
        self._leading.forget()
        self._lane_readers.forget()
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
        )

    def _new_link(self, name: str, host: str, port: int) -> Link:
        first = Link(name, host, port, self.hello, self._wake, self._shared_memory, self._nixl, self.tls)
        others = range(1, self._lanes)
        lanes = [first, *(Link(name, host, port, self.hello, self._wake, False, tls=self.tls) for _ in others)]
        for lane in lanes:
            lane.lanes = lanes
        return first

    def _watch(self, link: Link) -> None:
        """Have a link's new connection read."""
        if link.first is link:
            self._leading.watch(link)
        else:
            self._lane_readers.watch(link)

    def _open_lanes(self, link: Link) -> None:
        """The first lane is connected: have those that are not connected in the background."""
        if link.by_reference:
            return
        for lane in link.lanes[1:]:
            if lane.sock is None and lane.broken is None:
                lane.fixed_name, lane.broken = True, ConnectionLost(f"{link}: not connected yet")
                self._prober.start()

    def give_up_lane(self, lane: Link, error: KVStoreError) -> None:
        """The shard refuses this connection, so do without it."""
        with self._map_lock:
            left = without(lane)
        if not lane.retired:
            log.warning("%s; %d connections are used", error, left)
            lane.retired, lane.broken = True, None
            lane.drop(ConnectionLost(f"{lane}: {error}"))

    @property
    def path(self) -> str:
        """How blocks come from the shards: "shared memory" if that is so for one that is on this host, else "nixl" if
        that is so for one, else "tls" or "tcp"."""
        paths = {link.path for link in self.links}
        return next((path for path in ("shared memory", "nixl") if path in paths), "tcp" if self.tls is None else "tls")

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
                self._open_lanes(link)
            except TRANSPORT_ERRORS as error:
                if not fail_open:
                    raise
                node.links = [link]
                self._remap()
                self.break_link(link, error)

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
                return self.ensure_up(link, now + (deadline - now) / left)
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

    def connect_links(
        self, links: Sequence[Link], deadline: float
    ) -> Iterator[Sequence[tuple[Link, KVStoreError | None]]]:
        """Start to connect links, several side by side. -> an iterator over groups of links as they are done, each link
        with None or the error."""
        connected_by = min(deadline, time.monotonic() + DEAD_AFTER_S)

        def connect(link: Link) -> tuple[Link, KVStoreError | None]:
            try:
                self.ensure_up(link, connected_by)
            except KVStoreError as error:
                return link, error
            return link, None

        quick = [connect(link) for link in links if link.broken is not None or link.retired]  # these fail at once
        links = [link for link in links if link.broken is None and not link.retired]
        if len(links) < 2:
            return iter([quick + [connect(link) for link in links]])
        threads = ThreadPoolExecutor(min(len(links), MOST_CONNECTING), "kvstore-connect")
        connecting = {threads.submit(connect, link) for link in links}

        def results() -> Iterator[Sequence[tuple[Link, KVStoreError | None]]]:
            yield quick
            left = connecting
            while left:
                done, left = futures.wait(left, return_when=futures.FIRST_COMPLETED)
                yield [each.result() for each in done]
            threads.shutdown()

        return results()

    def connect_beside(self, link: Link) -> None:
        """Start to connect a link on a thread of its own, unless one does already, or it would fail at once. Never
        blocks; `is_connecting` tells when it is over, and who waits is woken then."""
        with self._map_lock:
            if link in self._connecting or link.broken is not None or link.retired or self.closed:
                return
            self._connecting.add(link)
        try:
            threading.Thread(target=self._connect_beside, args=[link], name="kvstore-connect", daemon=True).start()
        except RuntimeError:  # the system has no more threads, or the process ends
            self._connecting.discard(link)

    def _connect_beside(self, link: Link) -> None:
        try:
            self.ensure_up(link, time.monotonic() + DEAD_AFTER_S)
        except KVStoreError as error:  # who needs the link finds out
            log.debug("%s: %s", link, error)
        finally:
            self._connecting.discard(link)
            self._wake()

    def is_connecting(self, link: Link) -> bool:
        """Whether a thread of `connect_beside` still tries to."""
        return link in self._connecting

    def ensure_up(self, link: Link, deadline: float) -> None:
        """Connect the link unless it is up. Raises at once if it is broken; also if it is not up by `deadline`."""
        if link.sock is not None:
            return
        if self.closed:
            raise ConnectionLost("this client is closed")
        if link.retired:
            raise ConnectionLost(f"{link}: it left the cluster")
        if link.broken is not None:
            raise type(link.broken)(f"{link.broken} (retrying in the background)")
        # Another caller may be connecting, with more time than this one has.
        me = object()
        try:
            mine = link.connecting.take(me, max(0.0, deadline - time.monotonic()))
            if link.sock is not None:
                return
            if link.broken is not None:
                raise type(link.broken)(f"{link.broken} (retrying in the background)")
            left_s = deadline - time.monotonic()
            if not mine or left_s <= 0:
                raise Timeout(f"{link}: no connection by the deadline")
            try:
                self._connect_again(link, left_s)
            except KVStoreError as error:
                if not isinstance(error, Timeout) or left_s >= ENOUGH_TO_CONNECT_S:
                    self.break_link(link, error)
                raise
        finally:
            if link.connecting.owner is me:
                link.connecting.owner = None
                link.connecting.wake()

    def _connect_again(self, link: Link, timeout_s: float) -> None:
        before = link.connections
        try:
            welcome = link.connect(timeout_s)
        except KVStoreError as refusal:
            if link.first is not link and not isinstance(refusal, TRANSPORT_ERRORS):
                self.give_up_lane(link, refusal)
            raise
        if link.first is link:
            node = next((node for node in self._nodes if link in node.links), None)
            if node is not None:
                self._adopt(node, link, welcome)
            self._open_lanes(link)
        self._watch(link)
        if link.retired:  # it left the view while it connected
            self._retire([link.first])
        if self.closed:  # while it connected
            link.drop(error := ConnectionLost("this client is closed"))
            raise error
        if before:
            self.stats.reconnects += 1
            log.info("%s: connected again", link)

    def break_link(self, link: Link, error: KVStoreError) -> None:
        """Make calls to this shard fail at once from now on, and have it probed in the background."""
        if link.broken is None and link.first is link:
            log.warning("%s; its blocks are misses until it is back", error)
        elif link.broken is None:
            log.info("%s; fewer connections are used until it is back", error)
        link.broken = error
        self.stats.failures += 1
        self._prober.start()

    def close(self) -> None:
        """Disconnect. Calls in progress fail with `ConnectionLost`."""
        if self.closed:
            return
        self.closed = True
        self._prober.stop()
        if self._members is not None:
            self._members.close()
        for link in [*self.connections, *self._retired]:
            link.interrupt()
        self._prober.join()
        for link in [*self.connections, *self._retired]:
            link.drop(ConnectionLost("this client is closed"))
        self._lane_readers.close()  # first: they wake the one that leads
        self._leading.close()

    # ---- requests --------------------------------------------------------------------------------------------

    def lost(self, link: Link, answer: Answer) -> None:
        """Fail an answer that its caller gave up. If the shard sent nothing for a whole timeout, its link breaks."""
        sent_at = answer.sent_at
        silent = sent_at > link.last_received and time.monotonic() - sent_at > self.timeout_s * 0.9
        link.abandon(answer)
        error = Timeout(f"{link}: no reply in time")
        answer.fail(error)
        if silent and link.sock is not None:
            self.break_link(link, error)
            link.drop(error)

    def look_after(self) -> None:
        """Send a PING to silent shards, and break the links of shards that do not answer. Waiting callers call this
        often."""
        now = time.monotonic()
        if now < self._looked_after + LOOK_ANYWAY_S:
            return
        self._looked_after = now
        for link in [*self.connections, *self._retired]:
            if link.pending and not link.look_after(now):
                error = Timeout(f"{link}: it owes an answer and has been silent for {DEAD_AFTER_S:g} s")
                self.break_link(link, error)
                link.drop(error)
        for link in self.links if self._lanes > 1 else ():
            if link.sock is not None:
                self._open_lanes(link)
        if self._retired:
            self._close_retired(now)
