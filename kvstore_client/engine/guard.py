"""A client that never raises into its engine: every failure counts as a miss and is logged at most every 10 s.

The client itself ends each call by a deadline, fails at once while a shard is out of reach, and probes that shard in
the background. This module adds two things: an engine may start before its store, and a call never raises.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final, TypeVar

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.block_mac import mac_of
from kvstore_client._links.link import Link
from kvstore_client.engine.client_store import DEFAULT_OPTIONS, ClientOptions, ClientStore
from kvstore_client.engine.local_first import LocalFirstStore
from kvstore_client.engine.parts import SlicedStore
from kvstore_client.engine.store import Store
from kvstore_client.errors import KVStoreError, Timeout
from kvstore_client.keys import Namespace

T = TypeVar("T")

LOG_INTERVAL_S: Final = 10.0
# Pause before connecting again to a store that refused this client (another version, no rights).
REFUSED_PAUSE_S: Final = 10.0
# Pause between looks at whether the store has answered.
AWAIT_PAUSE_S: Final = 0.01


_forkable: weakref.WeakSet[Counters | StoreGuard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Another thread may have held a lock at the fork; in the child nobody would ever release it."""
    for each in list(_forkable):
        each.new_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Counters:
    """Named counters. Thread-safe; usable in a child after a fork."""

    def __init__(self) -> None:
        self._news: dict[str, float] = {}
        self.new_locks()
        _forkable.add(self)

    def new_locks(self) -> None:
        """Forget who holds the locks."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter. An amount of 0 does not create the counter."""
        if amount:
            with self._lock:
                self._news[name] = self._news.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return what was added since the last call, and start again from 0."""
        with self._lock:
            news, self._news = self._news, {}
        return news


class StoreGuard:
    """Access to one namespace of a store, for one component of an engine. Thread-safe; usable after a fork."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        namespace: Namespace,
        options: ClientOptions = DEFAULT_OPTIONS,
        *,
        timeout_s: float,
        counters: Counters,
        local: str = "",
        parts: Sequence[range] = (),
        logger: logging.Logger | None = None,
    ) -> None:
        """Connects. If the store is out of reach or refuses this client, that is logged. Raises ValueError for an
        invalid endpoint or option. timeout_s: the deadline of each call that sets none of its own. local: the address
        of a server on this host, in front of the store; empty: there is none. It has one copy of each block, whatever
        `options.replicas` is. parts: those parts of blocks that calls are about, if the namespace has blocks in parts;
        and those of these parts."""
        mac = mac_of(namespace, options.block_secret)
        self.namespace = namespace if mac is None else mac.namespace
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._options = options
        self._local = local
        self._parts = parts
        self._counters = counters
        self._logger = logger or logging.getLogger("kvstore_client")
        self._client: Store | None = None
        self._closed = False
        self._refused_until = 0.0
        self._next_log = 0.0
        self._unlogged = 0
        self._unanswered = 0  # what the client has counted of blocks that a shard did not answer for, and was told
        self.new_locks()
        _forkable.add(self)
        try:
            self._connect()
        except KVStoreError as error:
            self.failed(error)

    @property
    def block_bytes(self) -> int:
        """The size of a block, or of those parts of it that calls are about."""
        return self.namespace.block_bytes * math.prod(map(len, self._parts))

    @property
    def generation(self) -> int:
        """A number that rises when somebody purges the namespace, in the store or in the server on this host. What was
        made or read under another one is of no use any more. -1: the store was never reached."""
        client = self._client
        return client.generation if client is not None and client.reached else -1

    def new_locks(self) -> None:
        """Forget who holds the locks."""
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()

    def call(self, operation: Callable[[Store], T], miss: T) -> T:
        """Return ``operation(client)``, or ``miss`` when it fails. Never raises. If one shard fails, only its own
        blocks are misses in the result of ``operation``; the failure of the shard is counted and logged as well."""
        try:
            client = self._client or self._connect()
            result = operation(client)
        except Exception as error:
            self.failed(error)
            return miss
        self._note_unanswered(client)
        return result

    def await_store(self, timeout_s: float) -> bool:
        """Wait until the store has answered, so that `generation` is known: for at most `timeout_s`, and not if it
        refuses connections. -> whether it has. Never raises."""
        deadline = time.monotonic() + timeout_s
        while self.generation < 0 and (left_s := deadline - time.monotonic()) > 0:
            self.call(functools.partial(_info, left_s), None)
            client = self._client
            if client is None or not isinstance(client.why_unanswered(), Timeout):
                break
            time.sleep(AWAIT_PAUSE_S)
        return self.generation >= 0

    def steps(self, operation: Callable[[Store], Steps[T]], miss: T) -> Steps[T]:
        """The same for an operation in steps. Connecting to a store that has refused this client blocks; then it has no
        call under way."""
        try:
            client = self._client or self._connect()
            result = yield from operation(client)
        except Exception as error:
            self.failed(error)
            return miss
        self._note_unanswered(client)
        return result

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        """See `Store`."""
        client = self._client
        return client.first_shards(keys) if client is not None else frozenset()

    def _note_unanswered(self, client: Store) -> None:
        """Count and log that a shard has failed, once for each time that the client counted it."""
        unanswered = client.stats.unanswered
        with self._log_lock:
            news, self._unanswered = unanswered > self._unanswered, max(unanswered, self._unanswered)
        if news:
            self.failed(client.why_unanswered())

    def close(self) -> None:
        """Disconnect. Every later call is a miss. Never raises."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except Exception as error:
                self._logger.warning("kvstore: closing the client failed: %r", error)

    def _connect(self) -> Store:
        with self._lock:
            if self._closed:
                raise KVStoreError("this engine is shutting down")
            if self._client is None:
                if time.monotonic() < self._refused_until:
                    raise KVStoreError(
                        f"the store refused this client; it is asked again every {REFUSED_PAUSE_S:.0f} s"
                    )
                self._refused_until = time.monotonic() + REFUSED_PAUSE_S
                remote = self._open(self._endpoint, self._options)
                store: Store = remote
                if self._local:
                    near = self._open(self._local, dataclasses.replace(self._options, replicas=1))
                    store = LocalFirstStore(near, remote)
                for parts in reversed(self._parts):
                    store = SlicedStore(store, parts)
                self._client = store
            return self._client

    def _open(self, endpoint: str | Sequence[str], options: ClientOptions) -> ClientStore:
        return ClientStore(
            endpoint,
            self.namespace,
            timeout_s=self.timeout_s,
            fail_open=True,
            keeps_copies=True,
            **options.keywords,
        )

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


def _info(timeout_s: float, store: Store) -> None:
    store.info(timeout_s=timeout_s)


class Purges:
    """Whether somebody has purged the store: then what this engine holds of before is of no use any more.

    Blocks are saved with the generations that were known when they were computed, so a shard that knows of a purge
    refuses what was planned before the engine did. Not thread-safe.

    guards: one for each distinct namespace of the ranks. known: their generations, by the namespaces' ids, as `noticed`
    saw them last; -1: the store was never reached."""

    def __init__(self, guards: Sequence[StoreGuard] = ()) -> None:
        self._guards = guards
        self.known: Mapping[str, int] = self.now()

    def now(self) -> dict[str, int]:
        """-> the generations at this moment. Any thread may ask."""
        return {guard.namespace.id: guard.generation for guard in self._guards}

    def noticed(self) -> bool:
        """Whether there was a purge since the last call."""
        now = self.now()
        if now == self.known:
            return False
        before, self.known = self.known, now
        return any(max(before[each], 0) != generation for each, generation in now.items())
