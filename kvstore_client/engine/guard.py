"""A client that cannot hurt the engine it serves: every failure is a miss, counted, and said at most every 10 s.

The client itself bounds each call by a deadline and fails at once while a shard is out of reach, probing it in the
background. What is added here: an engine may start before its store, and no exception comes out.
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
# A store that refuses us (its version, our rights) is asked again this often.
REFUSED_PAUSE_S: Final = 10.0


class Counters:
    """Numbers by name, added to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count; an amount of 0 leaves no trace."""
        if amount:
            with self._lock:
                self._news[name] = self._news.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last time."""
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
        """Connects. A store out of reach or one that refuses us is logged; an endpoint that can never work raises
        ValueError. timeout_s: the longest a call takes that is not given a time of its own."""
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
        """``operation(client)``, or ``miss`` when it fails. Never raises. A shard that fails costs its own blocks: they
        are misses in what ``operation`` returns, and the failure is counted and logged all the same."""
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
        """Disconnect; calls are misses from now on. Never raises."""
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
                    raise KVStoreError("the store refused this client; it is asked again soon")
                self._refused_until = time.monotonic() + REFUSED_PAUSE_S
                self._client = KVStoreClient(
                    self._endpoint, self.namespace, timeout_s=self.timeout_s, fail_open=True, replicas=self._replicas
                )
            return self._client

    def failed(self, error: Exception) -> None:
        """Count and log a failure that happened on the store's behalf."""
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
            exc_info=not isinstance(error, KVStoreError),  # anything else is a defect of ours
        )
