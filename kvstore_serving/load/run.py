"""The open loop: every request is sent at its time, whatever became of the ones before.

One task prepares bodies a few requests ahead, another one sends them, and each request then lives in a task of its own.
So a server that stalls delays nothing that is sent later, as users would not wait for each other either.

What must hold: between the time of a request and its sending, nothing waits for the server. What is left is measured as
the lateness of each request; a late generator has measured another load than it was asked for.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore_serving.load.client import Bodies, Client
from kvstore_serving.load.prompts import Prompts
from kvstore_serving.load.records import Outcome, Planned

PREPARED_AHEAD: Final = 128  # bodies: traces have bursts. The longest have about 1 MB
_PIECES_A_TURN: Final = 8  # of a prompt, about 0.3 ms; then the event loop looks at what has arrived


@dataclass
class Progress:
    """How far the run is. `failed` is a part of `ended`."""

    sent: int = 0
    ended: int = 0
    failed: int = 0

    @property
    def running(self) -> int:
        return self.sent - self.ended


@dataclass
class Run:
    """What a run gave. `unfinished`: requests that were sent and then given up, because the run was interrupted."""

    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False
    unfinished: int = 0


def raise_file_limit() -> None:
    """Let this process have as many sockets as it may: each running request has one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def body_of(planned: Planned, prompts: Prompts, bodies: Bodies, give_way: Callable[[], Awaitable[None]]) -> bytes:
    """The whole body of a request. Calls `give_way` now and then while it encodes a long prompt."""
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
    bodies: Bodies,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Run:
    """Send all requests, which are in the order of their times, and wait for their ends.

    `stop`: once set, nothing more is sent, and running requests are given up.
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
    return Run(outcomes, interrupted, unfinished)


class _OpenLoop:
    """The tasks of one run, and the outcomes of those that have ended."""

    def __init__(self, client: Client, on_progress: Callable[[Progress], None]) -> None:
        self._client, self._on_progress = client, on_progress
        self._start = time.perf_counter()
        self._running: set[asyncio.Task[None]] = set()
        self._defects: list[BaseException] = []
        self._idle = asyncio.Event()  # no request is due: the time to prepare later ones
        self._filled = asyncio.Event()  # as much is prepared before the start as there is room for
        self._progress = Progress()
        self.outcomes: list[Outcome] = []

    def clock(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self._start

    async def work(self, planned: Sequence[Planned], prompts: Prompts, bodies: Bodies) -> None:
        """Send everything and wait until it has ended."""
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
        """Let others run, and wait while requests are due."""
        await asyncio.sleep(0)
        await self._idle.wait()

    async def _send_all(self, ready: asyncio.Queue[tuple[Planned, bytes] | None]) -> None:
        self._idle.set()
        await self._filled.wait()
        self._start = time.perf_counter()  # the first request's time is 0, and those right after it are prepared too
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
            await asyncio.sleep(0)  # it is sent now, not after the rest of a burst
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
        """Cancel what still runs. -> how many requests"""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)
