"""Broken links are tried again in the background, on a thread that lives only as long as something is broken.

The pauses between tries grow and are jittered, so that a fleet does not return in one instant.
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
    """`links()`: those of the present view. `reconnect(link, timeout_s)` connects one or raises `KVStoreError`; it is
    called with the link's `connect_lock` held. Thread-safe; a child process makes a new one."""

    def __init__(self, links: Callable[[], Sequence[Link]], reconnect: Callable[[Link, float], None]) -> None:
        self._links = links
        self._reconnect = reconnect
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """A link is broken: see that it is tried again."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="kvstore-probe", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Try no more, for good. A try that is under way ends by itself; `join` waits for it."""
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
                elif broken:  # a shard that is back must not wait for those that are not
                    with ThreadPoolExecutor(min(len(broken), MOST_PROBED), "kvstore-probe") as threads:
                        list(threads.map(self._probe, broken))
            except Exception:  # a defect, or no thread to be had: links must not stay broken for that
                log.exception("probing %d broken connections failed; trying again", len(broken))
            with self._lock:
                if all(link.broken is None for link in self._links()):
                    self._thread = None
                    return
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def _probe(self, link: Link) -> None:
        with link.connect_lock:
            if link.sock is not None:  # a caller was faster: its connection is in use
                link.broken = None
            elif not (self._stopped.is_set() or link.retired):
                try:
                    self._reconnect(link, PROBE_TIMEOUT_S)
                except KVStoreError as error:
                    link.broken = error
