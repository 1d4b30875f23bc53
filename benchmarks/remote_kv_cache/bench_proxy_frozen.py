"""Measures how long users of `kvstore proxy` wait when an engine freezes: it accepts requests and answers /health, but
computes nothing.

There are two prefill and two decode engines that need 50 ms to the first token (`capacity_engine`), and the proxy with
its default time-outs, which splits every prompt. Four users send one short prompt after another and read the stream.
After some seconds an engine freezes, and some seconds later it continues. The results are the TTFT of requests that
began before the freeze, and of those that began within 5 s after it. Other results are the longest wait of all
requests, even those at the frozen engine, and the time from the engine's recovery until it gets requests again.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.bench_proxy_capacity import Connection
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.processes import child, free_port, kvstore_server
from benchmarks.remote_kv_cache.served import proxy

KINDS: Final = ("frozen prefill engine", "frozen decode engine")
BEFORE_P50: Final = "before, median"
BEFORE_P99: Final = "before, p99"
AFTER_P50: Final = "within 5 s after, median"
AFTER_P99: Final = "within 5 s after, p99"
LONGEST: Final = "the longest that anybody waited"
BACK: Final = "until the engine has requests again"
FIGURES: Final = (BEFORE_P50, BEFORE_P99, AFTER_P50, AFTER_P99, LONGEST, BACK)
_USERS: Final = 4
_FIRST_MS: Final = 50
_AFTER_S: Final = 5.0
_FROZEN_S: Final = 8.0
_WARM_S: Final = 3.0  # the time in which the proxy learns the usual times
_BACK_S: Final = 60.0


def get(url: str, path: str) -> str:
    with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:
        return str(answer.read().decode())


async def _ask_on(url: str, seeds: itertools.count[int], over: asyncio.Event, found: list[tuple[float, float]]) -> None:
    """One user. `found`: the start of each request, and the seconds to its first token."""
    while not over.is_set():
        connection = await Connection.to(url)
        try:
            began = time.monotonic()
            first, _ = await connection.stream(next(seeds), 3)
            found.append((began, first))
        finally:
            connection.close()


async def _round(url: str, engine: str, before_s: float, seeds: itertools.count[int]) -> dict[str, float]:
    """Run one freeze. Return its figures in seconds."""
    over, found = asyncio.Event(), []
    users = [asyncio.create_task(_ask_on(url, seeds, over, found)) for _ in range(_USERS)]
    try:
        await asyncio.sleep(before_s)
        frozen = time.monotonic()
        await asyncio.to_thread(get, engine, "/freeze")
        await asyncio.sleep(_FROZEN_S)
        await asyncio.to_thread(get, engine, "/thaw")
        taken, thawed = await asyncio.to_thread(get, engine, "/taken"), time.monotonic()
        while int(await asyncio.to_thread(get, engine, "/taken")) < int(taken) + 3:
            if time.monotonic() - thawed > _BACK_S:
                raise RuntimeError("the engine was not used again")
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - thawed
    finally:
        over.set()
        await asyncio.gather(*users)
    before = [first for began, first in found if frozen - before_s / 2 < began < frozen - 1]
    after = [first for began, first in found if frozen + 0.1 < began < frozen + _AFTER_S]
    return {
        BEFORE_P50: float(np.percentile(before, 50)), BEFORE_P99: float(np.percentile(before, 99)),
        AFTER_P50: float(np.percentile(after, 50)), AFTER_P99: float(np.percentile(after, 99)),
        LONGEST: max(first for began, first in found if began < frozen + _FROZEN_S and began > frozen - 1),
        BACK: back_s,
    }  # fmt: skip


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    command = [sys.executable, "-m", "benchmarks.remote_kv_cache.capacity_engine", "--first-ms", str(_FIRST_MS)]
    with ExitStack() as stack:
        store = stack.enter_context(kvstore_server(16 << 20))
        engines = [
            stack.enter_context(child([*command, "--port", str(free_port())], "capacity engine ready ", "an engine"))
            for _ in range(4)
        ]
        url = stack.enter_context(proxy(store, engines[:2], engines[2:], "split"))
        seeds = itertools.count()
        with benchmark.steps("frozen engines", benchmark.rounds * len(KINDS)) as step:
            for _, (kind, engine) in itertools.product(
                range(benchmark.rounds), zip(KINDS, (engines[0], engines[2]), strict=True)
            ):
                step(kind, 0)
                before_s = _WARM_S + 2 if benchmark.quick else _WARM_S + 5
                for figure, value in asyncio.run(_round(url, engine, before_s, seeds)).items():
                    seconds[kind][figure].append(value)
                step()
    for kind in KINDS:
        benchmark.add(kind, seconds[kind])
        told = ", ".join(f"{figure}: {np.median(seconds[kind][figure]):.3f} s" for figure in FIGURES)
        benchmark.say(f"{kind}: {told}")
    benchmark.finish(users=_USERS, first_ms=_FIRST_MS, frozen_s=_FROZEN_S)


if __name__ == "__main__":
    main()
