"""`AsyncKVStoreClient`: the calls of `KVStoreClient` for asyncio.

Each call runs on a thread of the client's own pool and waits in system calls that release the GIL, so the event loop
never waits for the network. At most `concurrency` calls are in flight, and further calls wait in a queue. If a call is
cancelled, its task ends at once, but its request may continue until its deadline. So memory that was given to a
cancelled `get_into` or `set` must not be used again before `wait_s` + `timeout_s` have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from kvstore_client import _arguments
from kvstore_client.client import DEFAULT_TIMEOUT_S, ClientKeywords, KVStoreClient
from kvstore_client.errors import ConnectionLost, KVStoreError
from kvstore_client.keys import Keys, Namespace
from kvstore_client.promises import Promise
from kvstore_client.results import ClientStats

if TYPE_CHECKING:
    from typing import Unpack  # since Python 3.11

_P = ParamSpec("_P")
_R = TypeVar("_R")

DEFAULT_CONCURRENCY: Final = 16


def _awaited(
    call: Callable[Concatenate[KVStoreClient, _P], _R],
) -> Callable[Concatenate[AsyncKVStoreClient, _P], Coroutine[Any, Any, _R]]:
    """Return a coroutine function that runs `call`, with the same options, result, errors and docstring."""

    @functools.wraps(call)
    async def run(self: AsyncKVStoreClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        client = await self._connected()
        return await self._run(call, client, *args, **kwargs)

    return run


class AsyncPromise:
    """`Promise` with `await`: see `KVStoreClient.promise`.

    Use it in an `async with` statement, or await `withdraw`. Its methods run on the threads of `asyncio.to_thread` and
    not on those of the client. So they do not wait for calls in the client's queue, and a promise can be renewed while
    all the client's threads wait for blocks.

    * `mine`: As in `Promise`.
    * `present`: As in `Promise`.
    * `others`: As in `Promise`.
    """

    def __init__(self, promise: Promise) -> None:
        self._promise = promise
        self.mine = promise.mine
        self.present = promise.present
        self.others = promise.others

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because a promise cannot be pickled or copied."""
        raise TypeError(
            f"an {type(self).__name__} cannot be pickled or copied, because it belongs to its client's connections: "
            "make it in the process that computes the blocks"
        )

    async def renew(self, ttl_s: float | None = None) -> None:
        """See `Promise.renew`."""
        await asyncio.to_thread(self._promise.renew, ttl_s)

    async def withdraw(self) -> None:
        """See `Promise.withdraw`. If this call is cancelled, the promise still ends."""
        await asyncio.shield(asyncio.to_thread(self._promise.withdraw))

    async def __aenter__(self) -> AsyncPromise:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.withdraw()


class AsyncKVStoreClient:
    """`KVStoreClient` with `await`. It connects on `async with` or `await client.connect()`. Its options and errors are
    those of `KVStoreClient`.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        namespace: Namespace | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        **options: Unpack[ClientKeywords],
    ) -> None:
        """* `concurrency`: The largest number of calls in flight; at least 1. Further calls wait in a queue.
        * `options`: The options that `KVStoreClient` takes by keyword.
        """
        concurrency = _arguments.whole_number("concurrency", concurrency, 1)
        unknown = options.keys() - ClientKeywords.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"unknown options {', '.join(sorted(unknown))}: expected options of KVStoreClient, or concurrency"
            )
        self._make = functools.partial(KVStoreClient, endpoint, namespace, **options)
        self._timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        self._namespace = namespace
        self._fail_open = options.get("fail_open", False)
        self._replicas = options.get("replicas", 1)
        self._client: KVStoreClient | None = None
        self._closed = False
        self._connecting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvstore-aio")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>" if self._client else f"<{type(self).__name__}>"

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because connections cannot be pickled or copied."""
        raise TypeError(
            f"an {type(self).__name__} cannot be pickled or copied: make one in each process, with the same endpoint "
            "and namespace (a Namespace can be pickled)"
        )

    async def __aenter__(self) -> AsyncKVStoreClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, unless this client is connected already. Every other call does this first."""
        await self._connected()

    async def _connected(self) -> KVStoreClient:
        if self._client is None:
            if self._closed:
                raise ConnectionLost("this client is closed")
            async with self._connecting:
                if self._client is None:
                    self._client = await self._run(self._make)
        return self._client

    async def _run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._closed:  # then no call waits for anything, and there are no threads
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))

    async def close(self) -> None:
        """Disconnect and end the pool's threads."""
        if self._client is not None:
            await self._run(self._client.close)
        self._closed = True
        self._threads.shutdown(wait=False)

    @property
    def namespace(self) -> Namespace | None:
        """See `KVStoreClient`. Before the client has connected, this is the namespace that was given."""
        return self._client.namespace if self._client is not None else self._namespace

    @property
    def fail_open(self) -> bool:
        """See `KVStoreClient`."""
        return self._fail_open

    @property
    def replicas(self) -> int:
        """See `KVStoreClient`."""
        return self._replicas

    @property
    def stats(self) -> ClientStats:
        """Counters since the client connected."""
        return self._client.stats if self._client is not None else ClientStats()

    @property
    def timeout_s(self) -> float:
        """See `KVStoreClient.timeout_s`."""
        return self._timeout_s

    @property
    def generation(self) -> int:
        """See `KVStoreClient.generation`. It is 0 before the client has connected."""
        return self._client.generation if self._client is not None else 0

    @property
    def reached(self) -> bool:
        """See `KVStoreClient.reached`."""
        return self._client is not None and self._client.reached

    @property
    def shard_count(self) -> int:
        """See `KVStoreClient.shard_count`. It is 0 before the client has connected."""
        return self._client.shard_count if self._client is not None else 0

    @property
    def epoch(self) -> int:
        """See `KVStoreClient.epoch`. It is 0 before the client has connected."""
        return self._client.epoch if self._client is not None else 0

    @property
    def directory_error(self) -> str:
        """See `KVStoreClient.directory_error`. It is empty before the client has connected."""
        return self._client.directory_error if self._client is not None else ""

    def why_unanswered(self) -> KVStoreError:
        """See `KVStoreClient.why_unanswered`."""
        return self._client.why_unanswered() if self._client is not None else ConnectionLost("not connected yet")

    set = _awaited(KVStoreClient.set)
    contains = _awaited(KVStoreClient.contains)
    match_prefix = _awaited(KVStoreClient.match_prefix)
    lookup = _awaited(KVStoreClient.lookup)
    expire = _awaited(KVStoreClient.expire)
    load_prefix = _awaited(KVStoreClient.load_prefix)
    get = _awaited(KVStoreClient.get)
    get_into = _awaited(KVStoreClient.get_into)  # with `wait_s`, it occupies a thread of the pool while it waits
    delete = _awaited(KVStoreClient.delete)
    purge = _awaited(KVStoreClient.purge)
    purge_shards = _awaited(KVStoreClient.purge_shards)
    sync = _awaited(KVStoreClient.sync)
    ping = _awaited(KVStoreClient.ping)
    info = _awaited(KVStoreClient.info)
    scrub = _awaited(KVStoreClient.scrub)
    config_get = _awaited(KVStoreClient.config_get)
    config_set = _awaited(KVStoreClient.config_set)
    shards = _awaited(KVStoreClient.shards)
    clients = _awaited(KVStoreClient.clients)
    hottest = _awaited(KVStoreClient.hottest)
    slow_requests = _awaited(KVStoreClient.slow_requests)
    locate = _awaited(KVStoreClient.locate)

    async def promise(self, keys: Keys, *, ttl_s: float = 30.0, timeout_s: float | None = None) -> AsyncPromise:
        """See `KVStoreClient.promise`. The result is an `AsyncPromise`, for an `async with` statement."""
        client = await self._connected()
        making = asyncio.ensure_future(self._run(client.promise, keys, ttl_s=ttl_s, timeout_s=timeout_s))

        def withdraw_after(making: asyncio.Future[Promise]) -> None:
            if not making.cancelled() and making.exception() is None:  # the caller does not receive the promise
                with contextlib.suppress(RuntimeError):  # the client is closed, which has ended the promise
                    self._threads.submit(making.result().withdraw)

        try:
            return AsyncPromise(await asyncio.shield(making))
        except asyncio.CancelledError:
            making.add_done_callback(withdraw_after)
            raise

    @contextlib.asynccontextmanager
    async def borrow(
        self, keys: Keys, *, verify: bool = False, timeout_s: float | None = None
    ) -> AsyncGenerator[list[memoryview | None], None]:
        """See `KVStoreClient.borrow`. Use it in an `async with` statement."""
        client = await self._connected()
        borrowed = client.borrow(keys, verify=verify, timeout_s=timeout_s)
        blocks = await self._run(borrowed.__enter__)  # if cancelled, deleting `borrowed` gives the blocks back
        try:
            yield blocks
        finally:
            await self._run(borrowed.__exit__, None, None, None)

    async def stream_get(
        self, keys: Keys, *, timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[int, memoryview], None]:
        """See `KVStoreClient.stream_get`. Use it in an `async for` statement."""
        client = await self._connected()
        blocks = client.stream_get(keys, timeout_s=timeout_s)
        step: asyncio.Future[tuple[int, memoryview] | None] | None = None

        def close_after(step: asyncio.Future[tuple[int, memoryview] | None]) -> None:
            step.exception()  # retrieve the error, because no caller waits for it any more
            with contextlib.suppress(RuntimeError):  # the client is closed, which has ended the stream
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
            else:  # cancelled: a thread runs the generator for at most `timeout_s` more, and then closes it
                step.add_done_callback(close_after)


# `help` shows these parameters instead of `options`.
_own = inspect.signature(KVStoreClient.__init__)
_shown = [*_own.parameters.values(), inspect.signature(AsyncKVStoreClient.__init__).parameters["concurrency"]]
AsyncKVStoreClient.__init__.__signature__ = _own.replace(parameters=_shown)  # type: ignore[attr-defined]
