"""Measures the cost of `kvstore proxy` itself: its requests a second, the time that it adds to each, and the streams
that it can carry.

An engine that computes nothing (`capacity_engine`) and a client without a framework share one core; the proxy has the
other. In each round, requests go directly to the engine and through the proxy. Whole answers of 16 tokens are
requested on 32 connections and on one, which send the next request at once. Streams are requested on one connection, on
16 at full speed, and on 200 at 20 tokens a second each, where every event has the time at which it was sent.

Prompts are 64 token ids, too short to be split, so nothing is handed over. `bench_proxy_links` measures the time that a
split adds. Needs two cores.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.remote_kv_cache.capacity_engine import MODEL
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores
from benchmarks.remote_kv_cache.processes import child, free_port, kvstore_server
from benchmarks.remote_kv_cache.served import proxy

DIRECT: Final = "the engine directly"
THROUGH: Final = "through the proxy"
RATE: Final = "32 connections, whole answers: a request"
ONE_P50: Final = "one connection, whole answers: median"
ONE_P99: Final = "one connection, whole answers: p99"
FIRST_P50: Final = "one connection, streams: first event, median"
FIRST_P99: Final = "one connection, streams: first event, p99"
EVENT: Final = "16 streams at once: an event"
LATE_P50: Final = "200 streams of 20 events/s: an event is on its way for, median"
LATE_P99: Final = "200 streams of 20 events/s: an event is on its way for, p99"
FIGURES: Final = (RATE, ONE_P50, ONE_P99, FIRST_P50, FIRST_P99, EVENT, LATE_P50, LATE_P99)
_TOKENS: Final = 16
_PROMPT: Final = 64
_SETTLE_S: Final = 3.0  # the time in which the proxy learns which models the engine serves


class Connection:
    """One connection of a client, which sends one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def to(cls, url: str) -> Connection:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        return cls(reader, writer, parts.netloc)

    def close(self) -> None:
        self._writer.close()

    async def _ask(self, seed: int, tokens: int, **more: object) -> None:
        prompt = [seed % 1000, *range(_PROMPT - 1)]
        body = msgspec.json.encode({"model": MODEL, "prompt": prompt, "max_tokens": tokens, **more})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await self._reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the answer is {status!r}; expected status 200")

    async def _headers(self) -> int:
        length = 0
        while (line := await self._reader.readline()) != b"\r\n":
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
        return length

    async def whole(self, seed: int) -> float:
        """Request a whole answer. Return its seconds."""
        began = time.perf_counter()
        await self._ask(seed, _TOKENS)
        await self._reader.readexactly(await self._headers())
        return time.perf_counter() - began

    async def stream(self, seed: int, tokens: int, events_per_s: int = 0) -> tuple[float, list[float]]:
        """Request a stream. Return the seconds to the first event, and the travel time of each event in seconds."""
        began, first, late = time.perf_counter(), 0.0, []
        await self._ask(seed, tokens, stream=True, **({"user": str(events_per_s)} if events_per_s else {}))
        await self._headers()
        while True:
            size = int(await self._reader.readline(), 16)
            piece = (await self._reader.readexactly(size + 2))[:-2]
            now = time.monotonic()
            first = first or time.perf_counter() - began
            for event in piece.split(b"\n\n"):
                if b'"sent":' in event:
                    late.append(now - float(event.partition(b'"sent":')[2].split(b"}")[0].split(b",")[0]))
            if not size:
                if len(late) != tokens:
                    raise RuntimeError(f"a stream had {len(late)} events; expected {tokens}")
                return first, late


async def _connections(url: str, count: int, use: Callable[[Connection, int], Awaitable[None]]) -> float:
    """Open `count` connections and call `use` on all of them at once. Return the seconds until the last call
    returned."""
    found = await asyncio.gather(*(Connection.to(url) for _ in range(count)))
    began = time.perf_counter()
    try:
        await asyncio.gather(*(use(each, number) for number, each in enumerate(found)))
        return time.perf_counter() - began
    finally:
        for each in found:
            each.close()


async def measured(url: str, scale: float) -> dict[str, float]:
    """Measure all figures. Return them in seconds. scale: a factor for the numbers of requests."""
    many, one, streamed = (max(8, round(scale * count)) for count in (100, 500, 300))

    async def ask(connection: Connection, number: int) -> None:
        for at in range(many):
            await connection.whole(number * many + at)

    found = {RATE: await _connections(url, 32, ask) / (32 * many)}
    alone = await Connection.to(url)
    whole = [await alone.whole(number) for number in range(one)]
    first = [(await alone.stream(number, 2))[0] for number in range(streamed)]
    alone.close()
    for name, values in ((ONE_P50, whole), (FIRST_P50, first)):
        found[name] = float(np.percentile(values, 50))
    for name, values in ((ONE_P99, whole), (FIRST_P99, first)):
        found[name] = float(np.percentile(values, 99))
    events = max(20, round(scale * 500))

    async def listen(connection: Connection, number: int) -> None:
        await connection.stream(number, events)

    found[EVENT] = await _connections(url, 16, listen) / (16 * events)
    late: list[float] = []

    async def follow(connection: Connection, number: int) -> None:
        await asyncio.sleep(number / 4000)  # not all at the same moment
        late.extend((await connection.stream(number, max(20, round(scale * 60)), 20))[1])

    await _connections(url, 200, follow)
    found[LATE_P50], found[LATE_P99] = (float(np.percentile(late, each)) for each in (50, 99))
    return found


@contextmanager
def _fleet() -> Iterator[dict[str, str]]:
    """Start the engine and the proxy, which has its own core. Yield the URL of each way."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.remote_kv_cache.capacity_engine", "--port", str(port)]
    with kvstore_server(16 << 20) as store, child(command, "capacity engine ready ", "the engine") as engine:
        os.sched_setaffinity(0, {cores[1]})
        try:
            with proxy(store, [], [engine], "auto") as url:
                time.sleep(_SETTLE_S)
                os.sched_setaffinity(0, {cores[0]})
                yield {DIRECT: engine, THROUGH: url}
        finally:
            os.sched_setaffinity(0, cores)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    if not benchmark.lacks(missing_cores()):
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        with _fleet() as urls, benchmark.steps("proxy capacity", (benchmark.rounds + 1) * len(urls)) as step:
            for number in range(benchmark.rounds + 1):
                ways = list(urls)
                random.Random(number).shuffle(ways)
                for way in ways:
                    step(f"proxy capacity: {way}", 0)
                    for figure, value in asyncio.run(measured(urls[way], 0.1 if benchmark.quick else 1.0)).items():
                        if number:
                            seconds[figure][way].append(value)
                    step()
        for figure in FIGURES:
            benchmark.add(figure, seconds[figure], limits={THROUGH: DIRECT})
            direct, through = (float(np.median(seconds[figure][way])) for way in (DIRECT, THROUGH))
            benchmark.say(f"{figure}: {direct * 1e6:.0f} µs directly, {through * 1e6:.0f} µs through the proxy")
    benchmark.finish(engine_tokens=_TOKENS)


if __name__ == "__main__":
    main()
