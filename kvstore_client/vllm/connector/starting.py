"""Starts the scheduler's half. The half needs the descriptions of the workers, which come with their first reports.

vLLM's own handshake is not used, because under a MultiConnector it transmits the data of only one connector. So the
descriptions come with the engine's first step. Connecting to the store may take as long as a lookup. No step of the
engine may wait for that, so a thread makes the half.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore_client.engine.paged.plan import RankStore
from kvstore_client.vllm.connector.scheduler import SchedulerHalf

logger = logging.getLogger(f"vllm.{__name__}")

# How long the engine's first requests wait for the half. After that, they are computed, but not saved.
STORE_START_S: Final = 2.0
# The part of that time for which the half waits for a store that does not answer at once. It does not wait for a store
# that refuses connections.
FIRST_ANSWER_S: Final = 1.0


class SchedulerStart:
    """Makes the scheduler's half. Call every method from the engine core's thread.

    half: the scheduler's half. It is None until it is made. If it cannot be made, that is logged, and it stays None.
    """

    def __init__(self, ranks: int, make: Callable[[Sequence[RankStore]], SchedulerHalf]) -> None:
        """`ranks`: the number of workers. `make`: a function that makes the half from their descriptions. It may take
        long, and it may raise an exception."""
        self.half: SchedulerHalf | None = None
        self._ranks = ranks
        self._make = make
        self._stores: list[RankStore] = []
        self._thread: threading.Thread | None = None
        self._failed = False
        self._first_asked = 0.0

    def take(self, stores: Sequence[RankStore]) -> None:
        """Process the descriptions in the workers' first reports."""
        self._stores += stores
        if self._thread is None and len(self._stores) >= self._ranks:
            self._thread = threading.Thread(target=self._run, name="kvstore-start", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.half = self._make(self._stores)
        except Exception:
            self._failed = True
            logger.exception("kvstore: nothing will be loaded or saved")

    def is_coming(self) -> bool:
        """Return whether a request should ask again, because the half will be ready soon."""
        now = time.monotonic()
        self._first_asked = self._first_asked or now
        return self.half is None and not self._failed and now - self._first_asked < STORE_START_S

    def close(self) -> None:
        """Wait for the thread, and close the half."""
        if self._thread is not None:
            self._thread.join()
        if self.half is not None:
            self.half.close()
