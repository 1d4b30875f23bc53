"""`AsyncKVStoreClient`: the calls of `KVStoreClient` for asyncio.

Each call runs on a thread of the client's own pool, in system calls that release the GIL, so the event loop never waits
for the network. At most `concurrency` calls are in flight; further calls queue. If a call is cancelled, its task ends
at once, but its request runs on until its deadline at the latest. So memory given to a cancelled `get_into` or `set`
must not be used again before `timeout_s` has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore_client import _arguments
from kvstore_client._calls.chains import Parent
from kvstore_client._links.link import SharedMemory
from kvstore_client.client import DEFAULT_CONNECTIONS, DEFAULT_TIMEOUT_S, KVStoreClient
from kvstore_client.errors import ConnectionLost, KVStoreError
from kvstore_client.keys import Keys, Namespace
from kvstore_client.promises import Promise
from kvstore_client.results import ClientStats, GetResult, Location, Lookup, SetResult, ShardStatus, StoreInfo

_P = ParamSpec("_P")
_R = TypeVar("_R")

DEFAULT_CONCURRENCY: Final = 16


class AsyncKVStoreClient:
    """`KVStoreClient` with `await`. Connects on `async with` or `await client.connect()`; same options and errors."""

    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        namespace: Namespace | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        fail_open: bool = False,
        checksum: bool = True,
        replicas: int = 1,
        min_copies: int = 1,
        shared_memory: SharedMemory = "auto",
        connections: int = DEFAULT_CONNECTIONS,
        nixl: bool = False,
        token: str | os.PathLike[str] | None = None,
        block_secret: bytes | str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        concurrency = _arguments.whole_number("concurrency", concurrency, 1)
        self._make = functools.partial(
            KVStoreClient,
            endpoint,
            namespace,
            timeout_s=timeout_s,
            fail_open=fail_open,
            checksum=checksum,
            replicas=replicas,
            min_copies=min_copies,
            shared_memory=shared_memory,
            connections=connections,
            nixl=nixl,
            token=token,
            block_secret=block_secret,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self._timeout_s = timeout_s
        self._client: KVStoreClient | None = None
        self._connecting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvstore-aio")

    async def __aenter__(self) -> AsyncKVStoreClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, unless that was done already. Every other call does it too."""
        await self._connected()

    async def _connected(self) -> KVStoreClient:
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    self._client = await self._run(self._make)
        return self._client

    async def _run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))

    async def close(self) -> None:
        """Disconnect and end the pool's threads."""
        if self._client is not None:
            await self._run(self._client.close)
        self._threads.shutdown(wait=False)

    @property
    def stats(self) -> ClientStats:
        """Counters since the client connected."""
        return self._client.stats if self._client is not None else ClientStats()

    @property
    def timeout_s(self) -> float:
        """See `KVStoreClient.timeout_s`."""
        return self._timeout_s

    @property
    def epoch(self) -> int:
        """See `KVStoreClient.epoch`. 0 before the client has connected."""
        return self._client.epoch if self._client is not None else 0

    @property
    def directory_error(self) -> str:
        """See `KVStoreClient.directory_error`. Empty before the client has connected."""
        return self._client.directory_error if self._client is not None else ""

    def why_unanswered(self) -> KVStoreError:
        """See `KVStoreClient.why_unanswered`."""
        return self._client.why_unanswered() if self._client is not None else ConnectionLost("not connected yet")

    async def set(
        self,
        keys: Keys,
        blocks: Any,
        *,
        force: bool = False,
        deferred: bool = True,
        parent: Parent = None,
        position: int = 0,
        priority: int = 0,
        ttl_s: float | None = None,
        reads: int | None = None,
        timeout_s: float | None = None,
    ) -> SetResult:
        """See `KVStoreClient.set`."""
        client = await self._connected()
        return await self._run(
            client.set,
            keys,
            blocks,
            force=force,
            deferred=deferred,
            parent=parent,
            position=position,
            priority=priority,
            ttl_s=ttl_s,
            reads=reads,
            timeout_s=timeout_s,
        )

    async def contains(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """See `KVStoreClient.contains`."""
        client = await self._connected()
        return await self._run(client.contains, keys, refresh=refresh, pin_s=pin_s, timeout_s=timeout_s)

    async def match_prefix(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        """See `KVStoreClient.match_prefix`."""
        client = await self._connected()
        return await self._run(client.match_prefix, keys, refresh=refresh, pin_s=pin_s, timeout_s=timeout_s)

    async def lookup(
        self, keys: Keys, *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Lookup:
        """See `KVStoreClient.lookup`."""
        client = await self._connected()
        return await self._run(client.lookup, keys, refresh=refresh, pin_s=pin_s, timeout_s=timeout_s)

    async def expire(
        self, keys: Keys, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """See `KVStoreClient.expire`."""
        client = await self._connected()
        return await self._run(client.expire, keys, ttl_s=ttl_s, timeout_s=timeout_s)

    async def promise(self, keys: Keys, *, ttl_s: float = 30.0, timeout_s: float | None = None) -> Promise:
        """See `KVStoreClient.promise`. Use what it returns in an `async with` statement."""
        client = await self._connected()
        making = asyncio.ensure_future(self._run(client.promise, keys, ttl_s=ttl_s, timeout_s=timeout_s))

        def withdraw_after(making: asyncio.Future[Promise]) -> None:
            if not making.cancelled() and making.exception() is None:  # nobody gets it any more
                with contextlib.suppress(RuntimeError):  # the client is closed, and the promise ended
                    self._threads.submit(making.result().withdraw)

        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(withdraw_after)
            raise

    async def load_prefix(self, keys: Keys, out: Any, *, timeout_s: float | None = None) -> int:
        """See `KVStoreClient.load_prefix`."""
        client = await self._connected()
        return await self._run(client.load_prefix, keys, out, timeout_s=timeout_s)

    async def get(self, keys: Keys, *, timeout_s: float | None = None) -> GetResult:
        """See `KVStoreClient.get`."""
        client = await self._connected()
        return await self._run(client.get, keys, timeout_s=timeout_s)

    async def get_into(
        self,
        keys: Keys,
        out: Any,
        slots: Iterable[int] | None = None,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> npt.NDArray[np.bool_]:
        """See `KVStoreClient.get_into`. A call that waits keeps one of the pool's threads."""
        client = await self._connected()
        return await self._run(client.get_into, keys, out, slots, wait_s=wait_s, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def borrow(
        self, keys: Keys, *, verify: bool = False, timeout_s: float | None = None
    ) -> AsyncGenerator[list[memoryview | None], None]:
        """See `KVStoreClient.borrow`."""
        client = await self._connected()
        borrowed = client.borrow(keys, verify=verify, timeout_s=timeout_s)
        blocks = await self._run(borrowed.__enter__)  # cancelled: the end of `borrowed` gives them back
        try:
            yield blocks
        finally:
            await self._run(borrowed.__exit__, None, None, None)

    async def stream_get(
        self, keys: Keys, *, timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[int, memoryview], None]:
        """See `KVStoreClient.stream_get`."""
        client = await self._connected()
        blocks = client.stream_get(keys, timeout_s=timeout_s)
        step: asyncio.Future[tuple[int, memoryview] | None] | None = None

        def close_after(step: asyncio.Future[tuple[int, memoryview] | None]) -> None:
            step.exception()  # nobody waits for it any more
            with contextlib.suppress(RuntimeError):  # the client is closed, and the stream with it
                self._threads.submit(blocks.close)

        try:
            while True:
                step = asyncio.ensure_future(self._run(next, blocks, None))
                if (item := await asyncio.shield(step)) is None:
                    return
                yield item
        finally:
            if step is None or step.done():
                await self._run(blocks.close)
            else:  # cancelled: a thread is still in the generator, for `timeout_s` at most, and then closes it
                step.add_done_callback(close_after)

    async def delete(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """See `KVStoreClient.delete`."""
        client = await self._connected()
        return await self._run(client.delete, keys, timeout_s=timeout_s)

    async def purge(self, *, all_namespaces: bool = False, timeout_s: float | None = None) -> int:
        """See `KVStoreClient.purge`."""
        client = await self._connected()
        return await self._run(client.purge, all_namespaces=all_namespaces, timeout_s=timeout_s)

    async def sync(self, *, timeout_s: float | None = None) -> None:
        """See `KVStoreClient.sync`."""
        client = await self._connected()
        await self._run(client.sync, timeout_s=timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> float:
        """See `KVStoreClient.ping`."""
        client = await self._connected()
        return await self._run(client.ping, timeout_s=timeout_s)

    async def info(self, *, timeout_s: float | None = None) -> StoreInfo:
        """See `KVStoreClient.info`."""
        client = await self._connected()
        return await self._run(client.info, timeout_s=timeout_s)

    async def scrub(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """See `KVStoreClient.scrub`."""
        client = await self._connected()
        return await self._run(client.scrub, timeout_s=timeout_s)

    async def shards(self, *, timeout_s: float | None = None) -> list[ShardStatus]:
        """See `KVStoreClient.shards`."""
        client = await self._connected()
        return await self._run(client.shards, timeout_s=timeout_s)

    async def locate(
        self, key: bytes, *, replicas: int | None = None, ask: bool = True, timeout_s: float | None = None
    ) -> list[Location]:
        """See `KVStoreClient.locate`."""
        client = await self._connected()
        return await self._run(client.locate, key, replicas=replicas, ask=ask, timeout_s=timeout_s)
