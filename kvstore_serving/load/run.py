"""The open loop: every request is sent at its planned time, whatever happened to earlier requests.

One task prepares request bodies in advance, another one sends them, and each request then has its own task. So a server
that stalls delays no later request, just as users do not wait for each other.

What must hold: between a request's planned time and its sending, nothing waits for the server. The remaining delay is
measured as the lateness of each request. If the generator is late, it has measured another load than the requested one.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore_serving.load.client import Client, RequestBodies
from kvstore_serving.load.prompts import Prompts
from kvstore_serving.load.records import Planned, RequestOutcome

PREPARED_AHEAD: Final = 128  # bodies, because traces have bursts; the longest bodies have about 1 MB
_PIECES_A_TURN: Final = 8  # pieces of a prompt (about 0.3 ms) before the event loop handles what has arrived


@dataclass
class RunProgress:
    """The progress of the run, as numbers of requests. `ended` includes `failed`."""

    sent: int = 0
    ended: int = 0
    failed: int = 0

    @property
    def running(self) -> int:
        return self.sent - self.ended


@dataclass
class LoadRun:
    """The result of a run. `unfinished`: the number of requests that were sent, and then cancelled because the run was
    interrupted."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    interrupted: bool = False
    unfinished: int = 0


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the maximum, because each running request has a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def body_of(
    planned: Planned, prompts: Prompts, bodies: RequestBodies, give_way: Callable[[], Awaitable[None]]
) -> bytes:
    """Return the whole body of a request. While it encodes a long prompt, it calls `give_way` at intervals."""
    before, after = bodies.around(planned.output_tokens)
    pieces = [before]
    encoded = prompts.encoded(planned.hash_ids, planned.input_tokens, bodies.api, planned.block_tokens)
    for number, piece in enumerate(encoded, start=1):
        pieces.append(piece)
        if number % _PIECES_A_TURN == 0:
            await give_way()
    pieces.append(after)
    return b"".join(pieces)


async def run_load(
    planned: Sequence[Planned],
    client: Client,
    prompts: Prompts,
    bodies: RequestBodies,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[RunProgress], None] = lambda _: None,
) -> LoadRun:
    """Send all requests, which are in the order of their times, and wait until they have ended.

    `stop`: once set, no more requests are sent, and running ones are cancelled.
    """
    loop = _OpenLoop(client, on_progress)
    working = asyncio.create_task(loop.work(planned, prompts, bodies))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not working.done()
    for task in (working, stopping):
        task.cancel()
    ended = (await asyncio.gather(working, stopping, return_exceptions=True))[0]
    unfinished = await loop.give_up()
    if isinstance(ended, Exception):
        raise ended
    outcomes = sorted(loop.outcomes, key=lambda outcome: outcome.planned.index)
    return LoadRun(outcomes, interrupted, unfinished)


class _OpenLoop:
    """The tasks of one run, and the outcomes of the requests that have ended."""

    def __init__(self, client: Client, on_progress: Callable[[RunProgress], None]) -> None:
        self._client, self._on_progress = client, on_progress
        self._start = time.perf_counter()
        self._running: set[asyncio.Task[None]] = set()
        self._defects: list[BaseException] = []
        self._idle = asyncio.Event()  # set while no request is due, so that later ones can be prepared
        self._filled = asyncio.Event()  # set when enough bodies are prepared to start
        self._progress = RunProgress()
        self.outcomes: list[RequestOutcome] = []

    def clock(self) -> float:
        """Return the seconds since the run started."""
        return time.perf_counter() - self._start

    async def work(self, planned: Sequence[Planned], prompts: Prompts, bodies: RequestBodies) -> None:
        """Send all requests and wait until they have ended."""
        ready: asyncio.Queue[tuple[Planned, bytes] | None] = asyncio.Queue(PREPARED_AHEAD)

        async def prepare() -> None:
            for each in planned:
                await ready.put((each, await body_of(each, prompts, bodies, self._give_way)))
                await self._give_way()
                if ready.full():
                    self._filled.set()
            self._filled.set()
            await ready.put(None)

        tasks = [asyncio.create_task(prepare()), asyncio.create_task(self._send_all(ready))]
        try:
            await asyncio.gather(*tasks)
            while self._running:
                await asyncio.wait(self._running)
        finally:
            for task in tasks:
                task.cancel()
        if self._defects:
            raise self._defects[0]

    async def _give_way(self) -> None:
        """Let other tasks run, and wait while requests are due."""
        await asyncio.sleep(0)
        await self._idle.wait()

    async def _send_all(self, ready: asyncio.Queue[tuple[Planned, bytes] | None]) -> None:
        self._idle.set()
        await self._filled.wait()
        self._start = time.perf_counter()  # the first request's time is 0; the bodies of the next requests are ready
        while (following := await ready.get()) is not None:
            planned, body = following
            early_s = planned.at_s - self.clock()
            if early_s > 0:
                self._idle.set()
                await asyncio.sleep(early_s)
            self._idle.clear()
            task = asyncio.create_task(self._send(planned, body))
            self._running.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)  # lets the task send now, not after the rest of a burst
            if ready.empty():
                self._idle.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._defects.append(error)

    async def _send(self, planned: Planned, body: bytes) -> None:
        self._progress.sent += 1
        self._on_progress(self._progress)
        outcome = await self._client.send(planned, body, self.clock)
        self.outcomes.append(outcome)
        self._progress.ended += 1
        self._progress.failed += bool(outcome.error)
        self._on_progress(self._progress)

    async def give_up(self) -> int:
        """Cancel the running requests. Returns their number."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)
