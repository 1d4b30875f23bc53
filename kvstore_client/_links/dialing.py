"""Decides when a client's links are connected, and on which thread: the caller's, a separate one for each link, or one
in the background.

When a connection is lost, the next call tries to connect again, for at most `DEAD_AFTER_S`. If that fails, the link is
*broken*: calls to it fail (or miss) at once, and a thread tries to connect it in the background. This thread exists
only while a link is broken. The pauses between attempts grow and have random jitter, so that the clients of a fleet do
not all return at the same instant. Lanes that are not connected count as broken links, too. Only the owner of a link's
`connecting` connects it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore_client._links.lanes import without
from kvstore_client._links.link import Link
from kvstore_client._links.liveness import DEAD_AFTER_S
from kvstore_client.errors import ConnectionLost, KVStoreError, Timeout
from kvstore_client.results import ClientStats

log = logging.getLogger("kvstore_client")

MOST_CONNECTING: Final = 16  # how many links a call, or the background thread, connects at a time
ENOUGH_TO_CONNECT_S: Final = 0.1  # with less time than this, a call may time out although the shard is healthy
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 2.0


class Dialer:
    """Connects the links of one client. `connect(link, timeout_s)` connects a link or raises `KVStoreError`.
    `links()` returns the present links; the broken ones are probed. `wake()` wakes the threads that wait. `fail_open`:
    see `KVStoreClient`. Thread-safe. A child process makes a new dialer."""

    def __init__(
        self,
        links: Callable[[], Sequence[Link]],
        connect: Callable[[Link, float], None],
        wake: Callable[[], None],
        stats: ClientStats,
        fail_open: bool,
    ) -> None:
        self._fail_open = fail_open
        self._links = links
        self._connect = connect
        self._wake = wake
        self._stats = stats
        self._lock = threading.Lock()
        self._beside: set[Link] = set()  # links that are being connected, each on its own thread
        self._probing: threading.Thread | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Start no more attempts to connect. The attempts in progress continue until they succeed or fail. `join` waits
        for those in the background."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until nothing is being probed, but not longer than one attempt may take."""
        thread = self._probing
        if thread is not None and thread is not threading.current_thread():
            thread.join(PROBE_TIMEOUT_S + 0.5)

    # ---- for a call ------------------------------------------------------------------------------------------

    def connect(self, links: Sequence[Link], deadline: float) -> Iterator[Sequence[tuple[Link, KVStoreError | None]]]:
        """Start to connect links, several at the same time. Return an iterator over groups of links whose attempts have
        ended, each link with None or its error."""
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

    def beside(self, link: Link) -> None:
        """Start to connect a link on a thread of its own, unless it has one already or would fail at once. This never
        blocks. When the attempt ends, `is_connecting` becomes False, and the threads that wait are woken."""
        with self._lock:
            if link in self._beside or link.broken is not None or link.retired or self._stopped.is_set():
                return
            self._beside.add(link)
        try:
            threading.Thread(target=self._run_beside, args=[link], name="kvstore-connect", daemon=True).start()
        except RuntimeError:  # the system has no more threads, or the process is ending
            self._beside.discard(link)

    def _run_beside(self, link: Link) -> None:
        try:
            self.ensure_up(link, time.monotonic() + DEAD_AFTER_S)
        except KVStoreError as error:  # a call that needs the link will get the error
            log.debug("%s: %s", link, error)
        finally:
            self._beside.discard(link)
            self._wake()

    def is_connecting(self, link: Link) -> bool:
        """Return whether a thread of `beside` is still trying to connect the link."""
        return link in self._beside

    def ensure_up(self, link: Link, deadline: float) -> None:
        """Connect the link unless it is up. Raises if it is not up by `deadline`, or at once if it is broken."""
        if link.sock is not None:
            return
        if self._stopped.is_set():
            raise ConnectionLost("this client is closed")
        if link.retired:
            raise ConnectionLost(f"{link}: it left the cluster")
        if link.broken is not None:
            raise type(link.broken)(f"{link.broken} (retrying in the background)")
        # Another caller, which has more time than this one, may be connecting.
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
                self._connect(link, left_s)
            except KVStoreError as error:
                if not isinstance(error, Timeout) or left_s >= ENOUGH_TO_CONNECT_S:
                    self.break_link(link, error)
                raise
        finally:
            if link.connecting.owner is me:
                link.connecting.owner = None
                link.connecting.wake()

    # ---- broken links ----------------------------------------------------------------------------------------

    def break_link(self, link: Link, error: KVStoreError) -> None:
        """Make calls to this shard fail at once from now on, and start to probe the shard in the background."""
        if link.broken is None and link.first is link:
            if self._fail_open:
                log.warning("%s; its blocks are misses until it is back", error)
            else:
                log.warning("%s; calls that need it raise an error until it is back", error)
        elif link.broken is None:
            log.info("%s; fewer connections are used until it is back", error)
        link.broken = error
        self._stats.failures += 1
        self._probe_broken()

    def open_lanes(self, link: Link) -> None:
        """Connect the other lanes in the background, now that the first one is connected."""
        if link.by_reference:
            return
        for lane in link.lanes[1:]:
            if lane.sock is None and lane.broken is None:
                lane.fixed_name, lane.broken = True, ConnectionLost(f"{link}: not connected yet")
                self._probe_broken()

    def give_up_lane(self, lane: Link, error: KVStoreError) -> None:
        """Stop using this lane, because the shard refuses the connection."""
        with self._lock:
            left = without(lane)
        if not lane.retired:
            log.warning("%s; %d connections are used", error, left)
            lane.retired, lane.broken = True, None
            lane.drop(ConnectionLost(f"{lane}: {error}"))

    def _probe_broken(self) -> None:
        with self._lock:
            if self._probing is None and not self._stopped.is_set():
                self._probing = threading.Thread(target=self._run, name="kvstore-probe", daemon=True)
                self._probing.start()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped.wait(pause * random.uniform(0.5, 1.5)):
            broken = [link for link in self._links() if link.broken is not None]
            try:
                if len(broken) == 1:
                    self._probe(broken[0])
                elif broken:  # all at once, so that the others do not delay a shard that is back
                    with ThreadPoolExecutor(min(len(broken), MOST_CONNECTING), "kvstore-probe") as threads:
                        list(threads.map(self._probe, broken))
            except Exception:  # links must not stay broken after a defect or a lack of threads
                log.exception("probing %d broken connections failed; trying again", len(broken))
            with self._lock:
                if all(link.broken is None for link in self._links()):
                    self._probing = None
                    return
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def _probe(self, link: Link) -> None:
        me = object()
        try:
            if not link.connecting.take(me, PROBE_TIMEOUT_S):
                return  # a caller that has more time is connecting it
            if link.sock is not None:  # a caller has connected it meanwhile
                link.broken = None
            elif not (self._stopped.is_set() or link.retired):
                try:
                    self._connect(link, PROBE_TIMEOUT_S)
                except KVStoreError as error:
                    link.broken = error
        finally:
            if link.connecting.owner is me:
                link.connecting.owner = None
                link.connecting.wake()
