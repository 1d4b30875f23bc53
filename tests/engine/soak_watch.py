"""What a soak watches: nothing grows, nothing is left, and no request is held back longer than is promised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvstore_client.engine.admission import LEAST_S
from kvstore_client.engine.trace_file import read_trace
from tests.engine.engines import Engine, namespaces
from tests.support.harness import OVERHEAD_BYTES, Server, rss_bytes, wait_until

MiB = 1 << 20
# Threads and open files come and go with connections to stores that die; what leaks grows with every round.
SPARE = 24
# Of a busy machine: until a thread runs whose time has come.
BUSY_S = 0.5


@dataclass(frozen=True)
class Size:
    """What processes take."""

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
    """A request that began later than without kvstore."""

    seconds: float
    request: str
    times: dict[str, Any]  # as its trace has them


class Watch:
    """The engines and servers of a soak. growth_bytes: of each engine, after the warm-up."""

    def __init__(
        self, engines: Sequence[Engine], servers: Callable[[], list[Server]], server_bytes: int, growth_bytes: int
    ) -> None:
        self._engines = engines
        self._servers = servers
        self._server_bytes = server_bytes
        self._growth_bytes = growth_bytes
        self._warm: Size | None = None

    def look(self, *, warming_up: bool) -> str:
        """Between two rounds. -> what there is."""
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
        """After the last round: nothing is left in the engines whose core is at hand, nor in the stores."""
        for engine in self._engines:
            if engine.has_core:
                engine.settle()
            else:
                engine.generate([0], max_tokens=1)  # tells what has happened since the last step
        for server in self._servers():
            wait_until(lambda server=server: not _held_by(server), what=f"nobody holds anything of {server.endpoint}")


def _held_by(server: Server) -> dict[str, int]:
    """Blocks that somebody keeps, writes or waits for."""
    found = namespaces(server)
    held = {name: sum(getattr(each, name) for each in found) for name in ("pinned", "writing", "promised", "awaited")}
    return {name: number for name, number in held.items() if number}


class Promise:
    """No request is slower than computing it, a lookup and 50 ms: of each, what the engine's trace says of the time
    that the connector took. That does not depend on how fast the machine is, but for two steps of the engine, which
    hears of answers only between them, and `BUSY_S`."""

    def __init__(self, trace: Path, most_s: float) -> None:
        """most_s: of a lookup, and of a load that is begun without asking whether it pays."""
        self._trace = trace
        self._most_s = most_s + LEAST_S + BUSY_S
        self._seen = 0
        self._step_s = 0.0
        self.longest = Held(0.0, "", {})
        self.requests = 0

    def check(self, step_s: float) -> None:
        """Of the requests that have ended since the last call. step_s: the engine's longest step in that time."""
        parts = read_trace(self._trace)
        news, self._seen = parts[self._seen :], len(parts)
        # A request of the last round may be told now.
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
    """If the body fails, every engine tells what it is doing, into its log."""
    try:
        yield
    except BaseException:
        for number, engine in enumerate(engines):
            print(f"engine {number} when the test failed, of {engine.log}:\n{engine.witness()}", file=sys.stderr)
        raise
