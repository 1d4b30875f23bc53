"""A client whose calls never raise. Every failure counts as a miss, and failures are logged at most every 10 s.

The client itself ends each call by a deadline, fails at once while a shard is out of reach, and probes that shard in
the background. This module adds two things: an engine may start before its store, and calls never raise.
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
from kvstore_client.engine.slices import SlicedStore
from kvstore_client.engine.store import Store
from kvstore_client.errors import KVStoreError, Timeout
from kvstore_client.keys import Namespace

T = TypeVar("T")

FAILURE_LOG_INTERVAL_S: Final = 10.0
# Pause before connecting again to a store that refused this client, because of its version or its rights.
REFUSED_PAUSE_S: Final = 10.0
# Pause between two checks of whether the store has answered.
AWAIT_PAUSE_S: Final = 0.01


_forkable: weakref.WeakSet[Counters | StoreGuard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Replace all locks. Another thread may have held one at the time of the fork, and no thread of the child would
    ever release it."""
    for each in list(_forkable):
        each.new_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Counters:
    """Named counters. Thread-safe. A child process may use them after a fork."""

    def __init__(self) -> None:
        self._news: dict[str, float] = {}
        self.new_locks()
        _forkable.add(self)

    def new_locks(self) -> None:
        """Replace the lock, whether or not it is held."""
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
    """Access to one namespace of a store, for one component of an engine. Thread-safe. A child process may use it after
    a fork."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        namespace: Namespace,
        options: ClientOptions = DEFAULT_OPTIONS,
        *,
        timeout_s: float,
        counters: Counters,
        local: str = "",
        slices: Sequence[range] = (),
        logger: logging.Logger | None = None,
    ) -> None:
        """Connect. If the store is out of reach or refuses this client, that is logged. Raises `ValueError` for an
        invalid endpoint or option.

        * `endpoint`: The address of the store, in the form that `KVStoreClient` takes.
        * `namespace`: The namespace of all blocks. With a block secret, the attribute `namespace` is another namespace,
          which has a mark of the secret.
        * `options`: Further options of the client.
        * `timeout_s`: The time limit of a call without a time limit of its own, in seconds.
        * `counters`: The counters to which failures are added.
        * `local`: The address of a server on this host in front of the store, empty if there is none. That server has
          one copy of each block, whatever `options.replicas` is.
        * `slices`: The slices that calls read and write, if the namespace keeps blocks in slices. With several ranges,
          the second one divides the slices of the first, and so on.
        * `logger`: The logger for failures; by default "kvstore_client".
        """
        mac = mac_of(namespace, options.block_secret)
        self.namespace = namespace if mac is None else mac.namespace
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._options = options
        self._local = local
        self._slices = slices
        self._counters = counters
        self._logger = logger or logging.getLogger("kvstore_client")
        self._client: Store | None = None
        self._closed = False
        self._refused_until = 0.0
        self._next_log = 0.0
        self._unlogged = 0
        self._unanswered = 0  # `stats.unanswered` of the client when it was last reported here
        self.new_locks()
        _forkable.add(self)
        try:
            self._connect()
        except KVStoreError as error:
            self.failed(error)

    @property
    def block_bytes(self) -> int:
        """The size in bytes of the slices of a block that calls read and write. Without slices, it is the size of a
        block."""
        return self.namespace.block_bytes * math.prod(map(len, self._slices))

    @property
    def generation(self) -> int:
        """A number that rises when the namespace is purged, either in the store or in the server on this host. Do not
        use blocks that were computed or read under a lower number. It is -1 until the store has answered."""
        client = self._client
        return client.generation if client is not None and client.reached else -1

    def new_locks(self) -> None:
        """Replace the locks, whether or not they are held."""
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()

    def call(self, operation: Callable[[Store], T], miss: T) -> T:
        """Return `operation(store)`, or `miss` if it fails. Never raises.

        If one shard fails, only that shard's blocks are misses in the result of `operation`. That failure, too, is
        counted and logged.
        """
        try:
            client = self._client or self._connect()
            result = operation(client)
        except Exception as error:
            self.failed(error)
            return miss
        self._note_unanswered(client)
        return result

    def await_store(self, timeout_s: float) -> bool:
        """Wait until the store has answered, so that `generation` is known. Return whether it has. Never raises. The
        wait ends at once if the store refuses connections.

        * `timeout_s`: The longest wait, in seconds.
        """
        deadline = time.monotonic() + timeout_s
        while self.generation < 0 and (left_s := deadline - time.monotonic()) > 0:
            self.call(functools.partial(_info, left_s), None)
            client = self._client
            if client is None or not isinstance(client.why_unanswered(), Timeout):
                break
            time.sleep(AWAIT_PAUSE_S)
        return self.generation >= 0

    def steps(self, operation: Callable[[Store], Steps[T]], miss: T) -> Steps[T]:
        """Do the same as `call`, for an operation in steps. If the store has refused this client, connecting again
        blocks; no other call to that store is then in progress."""
        try:
            client = self._client or self._connect()
            result = yield from operation(client)
        except Exception as error:
            self.failed(error)
            return miss
        self._note_unanswered(client)
        return result

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        """Return the shards to which a read sends its first requests; see `Store.first_shards`."""
        client = self._client
        return client.first_shards(keys) if client is not None else frozenset()

    def _note_unanswered(self, client: Store) -> None:
        """Count and log a failure of a shard if the client has counted new blocks without an answer."""
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
                        f"the store refused this client, which tries again every {REFUSED_PAUSE_S:.0f} s"
                    )
                self._refused_until = time.monotonic() + REFUSED_PAUSE_S
                remote = self._open(self._endpoint, self._options)
                store: Store = remote
                if self._local:
                    near = self._open(self._local, dataclasses.replace(self._options, replicas=1))
                    store = LocalFirstStore(near, remote)
                for slices in reversed(self._slices):
                    store = SlicedStore(store, slices)
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
            self._next_log = now + FAILURE_LOG_INTERVAL_S
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
    """Notices purges of the store. After a purge, do not use blocks that this engine had before the purge. Not
    thread-safe.

    Blocks are saved with the generations that were known when the blocks were computed. So a shard that knows of a
    purge refuses saves that an engine planned before the engine knew of the purge.

    * `guards`: One for each distinct namespace of the ranks.
    * `known`: The generations by namespace id at the last call of `noticed`, -1 if the store was never reached.
    """

    def __init__(self, guards: Sequence[StoreGuard] = ()) -> None:
        self._guards = guards
        self.known: Mapping[str, int] = self.now()

    def now(self) -> dict[str, int]:
        """Return the present generations by namespace id. Any thread may call this."""
        return {guard.namespace.id: guard.generation for guard in self._guards}

    def noticed(self) -> bool:
        """Return whether there was a purge since the last call."""
        now = self.now()
        if now == self.known:
            return False
        before, self.known = self.known, now
        return any(max(before[each], 0) != generation for each, generation in now.items())
