"""A client that cannot hurt the engine it serves: every failure is a miss, counted, and logged at most every 10 s.

The client itself ends each call by a deadline, fails at once while a shard is out of reach, and probes that shard in
the background. This module adds two things: an engine may start before its store, and no exception comes out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore_client.client import KVStoreClient
from kvstore_client.errors import KVStoreError
from kvstore_client.keys import Namespace

T = TypeVar("T")

LOG_INTERVAL_S: Final = 10.0
# A store that refused this client (another version, no rights) is asked again this often.
REFUSED_PAUSE_S: Final = 10.0


class Counters:
    """Numbers by name, added to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a number; an amount of 0 changes nothing."""
        if amount:
            with self._lock:
                self._news[name] = self._news.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last call."""
        with self._lock:
            news, self._news = self._news, {}
        return news


class StoreGuard:
    """One namespace of a store, for one component of an engine. Thread-safe."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        namespace: Namespace,
        *,
        timeout_s: float,
        counters: Counters,
        replicas: int = 1,
        logger: logging.Logger | None = None,
    ) -> None:
        """Connects. A store that is out of reach or refuses this client is logged. Raises ValueError for an endpoint
        that is not one. timeout_s: the deadline of each call that is given none of its own."""
        self.namespace = namespace
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._replicas = replicas
        self._counters = counters
        self._logger = logger or logging.getLogger("kvstore_client")
        self._lock = threading.Lock()
        self._client: KVStoreClient | None = None
        self._closed = False
        self._refused_until = 0.0
        self._log_lock = threading.Lock()
        self._next_log = 0.0
        self._unlogged = 0
        try:
            self._connect()
        except KVStoreError as error:
            self.failed(error)

    def call(self, operation: Callable[[KVStoreClient], T], miss: T) -> T:
        """``operation(client)``, or ``miss`` when it fails. Never raises. If one shard fails, only its own blocks are
        misses in what ``operation`` returns; that failure, too, is counted and logged."""
        try:
            client = self._client or self._connect()
            before = client.stats.unanswered
            result = operation(client)
        except Exception as error:
            self.failed(error)
            return miss
        if client.stats.unanswered > before:
            self.failed(client.why_unanswered())
        return result

    def close(self) -> None:
        """Disconnect. From now on every call is a miss. Never raises."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except Exception as error:
                self._logger.warning("kvstore: closing the client failed: %r", error)

    def _connect(self) -> KVStoreClient:
        with self._lock:
            if self._closed:
                raise KVStoreError("this engine is shutting down")
            if self._client is None:
                if time.monotonic() < self._refused_until:
                    raise KVStoreError(
                        f"the store refused this client; it is asked again every {REFUSED_PAUSE_S:.0f} s"
                    )
                self._refused_until = time.monotonic() + REFUSED_PAUSE_S
                self._client = KVStoreClient(
                    self._endpoint, self.namespace, timeout_s=self.timeout_s, fail_open=True, replicas=self._replicas
                )
            return self._client

    def failed(self, error: Exception) -> None:
        """Count and log a failure of the store."""
        self._counters.add("failed_calls")
        if self._closed:
            return
        now = time.monotonic()
        with self._log_lock:
            if now < self._next_log:
                self._unlogged += 1
                return
            self._next_log = now + LOG_INTERVAL_S
            unlogged, self._unlogged = self._unlogged, 0
        self._logger.warning(
            "kvstore: a call to %s (rank %d) failed and counts as a miss (%d more since the last message): %s: %s",
            self._endpoint,
            self.namespace.rank,
            unlogged,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, KVStoreError),  # anything else is an error in our own code
        )
