"""What a soak test checks: memory does not grow, nothing is left behind, and no request is delayed longer than
promised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvstore_client.engine.admission import MIN_LOOKUP_S
from kvstore_client.engine.trace_file import read_trace
from tests.engine.engines import Engine, namespaces
from tests.support.harness import OVERHEAD_BYTES, Server, rss_bytes, wait_until

MiB = 1 << 20
# Threads and open files vary with the connections to stores that die. A leak would exceed this, because it grows in
# every round.
SPARE = 24
# The time until a thread that is due runs on a busy machine.
BUSY_S = 0.5


@dataclass(frozen=True)
class Size:
    """The total memory, threads and open files of some processes."""

    bytes: int
    threads: int
    files: int

    @classmethod
    def of(cls, processes: Sequence[psutil.Process]) -> Size:
        return cls(
            sum(rss_bytes(each.pid) for each in processes),
            sum(each.num_threads() for each in processes),
            sum(each.num_fds() for each in processes),
        )

    def most(self, other: Size) -> Size:
        return Size(max(self.bytes, other.bytes), max(self.threads, other.threads), max(self.files, other.files))

    def __str__(self) -> str:
        return f"{self.bytes >> 20} MiB, {self.threads} threads, {self.files} files"


class Held(NamedTuple):
    """A request that began later than without kvstore, and by how many seconds."""

    seconds: float
    request: str
    times: dict[str, Any]  # as in the engine's trace


class Watch:
    """Measures the engines and servers of a soak test. growth_bytes: by how much each engine may grow after the
    warm-up."""

    def __init__(
        self, engines: Sequence[Engine], servers: Callable[[], list[Server]], server_bytes: int, growth_bytes: int
    ) -> None:
        self._engines = engines
        self._servers = servers
        self._server_bytes = server_bytes
        self._growth_bytes = growth_bytes
        self._warm: Size | None = None

    def look(self, *, warming_up: bool) -> str:
        """Measure between two rounds. Returns the sizes."""
        engines = Size.of([process for engine in self._engines for process in engine.processes])
        servers = [Size.of([shard]) for server in self._servers() for shard in server.shards()]
        told = f"engines {engines}; shards {', '.join(map(str, servers))}"
        if warming_up or self._warm is None:
            self._warm = engines if self._warm is None else self._warm.most(engines)
        many = len(self._engines)
        assert engines.bytes <= self._warm.bytes + many * self._growth_bytes, told
        assert engines.threads <= self._warm.threads + many * SPARE, f"{told}; warm: {self._warm}"
        assert engines.files <= self._warm.files + many * SPARE, f"{told}; warm: {self._warm}"
        for each in servers:
            assert each.bytes <= self._server_bytes + OVERHEAD_BYTES, told
        return told

    def at_rest(self) -> None:
        """After the last round, check that nothing is in progress in the stores and in the engines whose core runs in
        the driver."""
        for engine in self._engines:
            if engine.has_core:
                engine.settle()
            else:
                engine.generate([0], max_tokens=1)  # so that the engine reports what has happened since its last step
        for server in self._servers():
            wait_until(lambda server=server: not _held_by(server), what=f"nobody holds anything of {server.endpoint}")


def _held_by(server: Server) -> dict[str, int]:
    """Return the numbers of blocks that are pinned, being written, promised or waited for, without zeros."""
    found = namespaces(server)
    held = {name: sum(getattr(each, name) for each in found) for name in ("pinned", "writing", "promised", "awaited")}
    return {name: number for name, number in held.items() if number}


class Promise:
    """Checks that no request takes longer than computing it, a lookup and 50 ms. The engine's trace says how long the
    connector delayed each request, so the machine's speed hardly matters. Two steps of the engine, which gets answers
    only between steps, and `BUSY_S` are added."""

    def __init__(self, trace: Path, most_s: float) -> None:
        """most_s: the sum of two limits: that of a lookup, and that of a load that begins without a check whether it
        pays."""
        self._trace = trace
        self._most_s = most_s + MIN_LOOKUP_S + BUSY_S
        self._seen = 0
        self._step_s = 0.0
        self.longest = Held(0.0, "", {})
        self.requests = 0

    def check(self, step_s: float) -> None:
        """Check the requests that have ended since the last call. step_s: the engine's longest step in that time."""
        parts = read_trace(self._trace)
        news, self._seen = parts[self._seen :], len(parts)
        # A request of the last round may be reported only now.
        step_s, self._step_s = max(step_s, self._step_s), step_s
        for part in news:
            times = part.args
            if part.name != "queue" or "held_back_s" not in times:
                continue
            held = Held(times["held_back_s"], part.request_id, times)
            self.requests += 1
            self.longest = max(self.longest, held, key=lambda each: each.seconds)
            most_s = self._most_s + 2 * step_s
            assert held.seconds <= most_s, (
                f"request {held.request} was held back for {held.seconds:.3f} s, expected {most_s:.3f} s at most; the "
                f"longest step took {step_s:.3f} s; its times: {times}; the others' are in {self._trace}"
            )


@contextlib.contextmanager
def explained(engines: Sequence[Engine]) -> Iterator[None]:
    """If the body fails, write to every engine's log, and print, what the engine is doing."""
    try:
        yield
    except BaseException:
        for number, engine in enumerate(engines):
            print(f"engine {number} when the test failed, of {engine.log}:\n{engine.witness()}", file=sys.stderr)
        raise
