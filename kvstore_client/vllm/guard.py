"""Every call of the store goes through a guard, which turns any failure into a miss within a deadline.

A cache must never break its engine, nor slow it down for long when the store is gone: after a failure the guard
stops asking for a while (1 s, doubling to 30 s), because otherwise every step of the engine would wait for one more
timeout. The first call after the pause is the probe. Failures are counted always and logged at most every 10 s.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvstore_client import KVStoreClient, KVStoreError

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only the loggers below its own

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LOG_INTERVAL_S = 10.0


class StoreGuard:
    """One namespace of the store, as seen by one half of the connector.

    Used by one thread only: the scheduler's or the worker's. ``counters`` may be shared by several guards.
    """

    def __init__(self, connect: Callable[[], KVStoreClient], name: str, counters: Counter[str]) -> None:
        """connect: opens the client. Called again when it failed, so that an engine may start before its store."""
        self._connect = connect
        self._name = name
        self._counters = counters
        self._client: KVStoreClient | None = None
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._next_log = 0.0
        self._unlogged = 0

    def probe(self) -> None:
        """Connect while the engine starts, so that a store out of reach is reported then. Raises ValueError for an
        endpoint that can never work."""
        try:
            self._client = self._connect()
        except KVStoreError as error:
            self._failed(error)

    def call(self, operation: Callable[[KVStoreClient], T], miss: T) -> T:
        """``operation(client)``, or ``miss`` when it fails or the guard is paused. Never raises."""
        if time.monotonic() < self._paused_until:
            self._counters["skipped_calls"] += 1
            return miss
        try:
            if self._client is None:
                self._client = self._connect()
            result = operation(self._client)
        except Exception as error:
            self._failed(error)
            return miss
        self._pause_s = 0.0
        return result

    def close(self) -> None:
        """Close the client. Never raises."""
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except Exception as error:
                logger.warning("kvstore: closing the client failed: %r", error)

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        self._counters["failed_calls"] += 1
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._paused_until = now + self._pause_s
        if now < self._next_log:
            self._unlogged += 1
            return
        logger.warning(
            "kvstore: %s failed, counted as a miss; asking again in %.0f s (%d more failures since the last "
            "message): %s: %s",
            self._name,
            self._pause_s,
            self._unlogged,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, KVStoreError),  # anything else is a defect of ours
        )
        self._next_log = now + LOG_INTERVAL_S
        self._unlogged = 0
