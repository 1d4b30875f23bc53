"""Probing: broken links are tried again in the background, on a thread that lives only while a link is broken.

The pauses between tries grow and are jittered, so that the clients of a fleet do not all return at the same instant.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore_client._links.link import Link
from kvstore_client.errors import KVStoreError

log = logging.getLogger("kvstore_client")

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 2.0
MOST_PROBED: Final = 16  # links at a time


class Prober:
    """Probes the broken links of one client. `links()` returns the links of the present view. `reconnect(link,
    timeout_s)` connects a link or raises `KVStoreError`; it is called by the owner of the link's `connecting`.
    Thread-safe; a child process makes a new prober."""

    def __init__(self, links: Callable[[], Sequence[Link]], reconnect: Callable[[Link, float], None]) -> None:
        self._links = links
        self._reconnect = reconnect
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread unless it runs: a link is broken."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="kvstore-probe", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop for good. A try that is under way ends by itself; `join` waits for it."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended, for as long as one try may take."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PROBE_TIMEOUT_S + 0.5)

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped.wait(pause * random.uniform(0.5, 1.5)):
            broken = [link for link in self._links() if link.broken is not None]
            try:
                if len(broken) == 1:
                    self._probe(broken[0])
                elif broken:  # side by side: a shard that is back must not wait for shards that are not
                    with ThreadPoolExecutor(min(len(broken), MOST_PROBED), "kvstore-probe") as threads:
                        list(threads.map(self._probe, broken))
            except Exception:  # a defect, or the system has no more threads: links must not stay broken for that
                log.exception("probing %d broken connections failed; trying again", len(broken))
            with self._lock:
                if all(link.broken is None for link in self._links()):
                    self._thread = None
                    return
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def _probe(self, link: Link) -> None:
        me = object()
        try:
            if not link.connecting.take(me, PROBE_TIMEOUT_S):
                return  # a caller with more time is connecting it
            if link.sock is not None:  # a caller has connected it meanwhile
                link.broken = None
            elif not (self._stopped.is_set() or link.retired):
                try:
                    self._reconnect(link, PROBE_TIMEOUT_S)
                except KVStoreError as error:
                    link.broken = error
        finally:
            if link.connecting.owner is me:
                link.connecting.owner = None
                link.connecting.wake()
