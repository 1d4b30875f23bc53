"""Ranks that have the same part of every block, like tensor-parallel workers with MLA, each in a process of its own.
The connector's worker halves, the shared memory and the store are real; there are tensors, but no model. Tests use
``Ranks``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvstore_client import Namespace
from tests.engine.engines import nursery

LAYERS, BLOCK_TOKENS, CONTENT = 2, 16, 64
BLOCK_BYTES = LAYERS * BLOCK_TOKENS * CONTENT * 4
ANSWER_S = 60.0


class Spec(NamedTuple):
    endpoint: str
    namespace: Namespace
    ranks: int
    slots: int = 32
    blocks: int = 256  # of the cache
    chunk_blocks: int = 1024  # fetched at once
    slices: int = 1
    late: bool = False  # copies into the cache are made as late as a device may make them


def run(spec: Spec, rank: int, pipe: Connection) -> None:
    """Run one rank. It receives orders through the pipe; each is the name of a method of `Rank`, with its arguments."""
    rank_half = Rank(spec, rank, pipe)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, arguments = order
        pipe.send(getattr(rank_half, name)(*arguments))
    rank_half.worker.close()
    os._exit(0)


class Rank:
    """One rank, in its own process. Its methods are called in the model's thread."""

    def __init__(self, spec: Spec, rank: int, pipe: Connection) -> None:
        import torch

        from kvstore_client.engine import transfer_in
        from kvstore_client.engine.guard import Counters, StoreGuard
        from kvstore_client.engine.paged import shared_pool
        from kvstore_client.engine.paged.layout import BlockLayout
        from kvstore_client.engine.paged.plan import RankStore
        from kvstore_client.engine.paged.worker import WorkerHalf
        from kvstore_client.engine.shared_rows import share_rows
        from tests.engine.late_layout import LateLayout

        chunk_bytes = spec.chunk_blocks * BLOCK_BYTES
        for module in (transfer_in, shared_pool):
            module.CHUNK_BYTES = module.WAITED_CHUNK_BYTES = chunk_bytes  # type: ignore[attr-defined]
        self.cache = torch.zeros((LAYERS, spec.blocks, 1, BLOCK_TOKENS, CONTENT), dtype=torch.float32)
        layout = (LateLayout if spec.late else BlockLayout)(
            {f"layers.{layer}": self.cache[layer] for layer in range(LAYERS)}, spec.blocks, slices=spec.slices
        )

        def exchange(mine: object) -> Sequence[object]:
            pipe.send(mine)
            of_all: Sequence[object] = pipe.recv()
            return of_all

        rows = shared_pool.passages(spec.slots, layout.block_bytes)[-1].stop * layout.slices
        shared = share_rows(rows, layout.slice_bytes, rank, spec.ranks, exchange)
        assert shared is not None
        self.counters = Counters()
        guard = StoreGuard(spec.endpoint, spec.namespace, timeout_s=5, counters=self.counters)
        self.worker = WorkerHalf(
            guard,
            layout,
            store=RankStore(guard.namespace, spec.slots, None, layout.slices, True),
            timeout_s=5,
            replica=(rank, spec.ranks),
            counters=self.counters,
            shared=shared_pool.SharedPool(shared, spec.slots, layout),
        )

    def load(self, load: Any) -> None:
        self.worker.loads.load(load)

    def save(self, saves: Any) -> None:
        from kvstore_client.engine.paged.plan import StepPlan

        self.worker.begin_step(StepPlan(saves=saves))
        self.worker.saves.save()
        self.worker.saves.order_copies()

    def take_loaded(self) -> tuple[set[str], set[int]]:
        return self.worker.loads.take_loaded(), self.worker.loads.take_failed_block_ids()

    def take_report(self) -> Any:
        return self.worker.take_report()

    def take_counters(self) -> dict[str, float]:
        return self.counters.take()

    def fill(self, block_ids: Sequence[int], rows: Sequence[bytes]) -> None:
        for block_id, row in zip(block_ids, rows, strict=True):
            self._pages(block_id)[...] = np.frombuffer(row, dtype=np.uint8).reshape(LAYERS, -1)

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        return [self._pages(block_id).tobytes() for block_id in block_ids]

    def _pages(self, block_id: int) -> Any:
        return self.cache.numpy().view(np.uint8).reshape(LAYERS, self.cache.shape[1], -1)[:, block_id]


class Ranks:
    """Several ranks. An order goes to all of them or to some."""

    def __init__(self, spec: Spec) -> None:
        context = nursery()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(spec.ranks):
            pipe, far_end = context.Pipe()
            process = context.Process(target=run, args=(spec, rank, far_end), daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        for _ in range(2):  # two exchanges
            given = self.answers()
            for pipe in self._pipes:
                pipe.send(given)
        assert self.answers() == ["ready"] * spec.ranks

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def order(self, name: str, *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        """Send an order without waiting for its result."""
        for rank in range(len(self._pipes)) if ranks is None else ranks:
            self._pipes[rank].send((name, arguments))

    def answers(self, ranks: Sequence[int] | None = None) -> list[Any]:
        found = []
        for rank in range(len(self._pipes)) if ranks is None else ranks:
            assert self._pipes[rank].poll(ANSWER_S), f"rank {rank} does not answer"
            found.append(self._pipes[rank].recv())
        return found

    def all(self, name: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        self.order(name, *arguments, ranks=ranks)
        return self.answers(ranks)

    def loaded(self, *names: str, ranks: Sequence[int] | None = None, within_s: float = 30.0) -> list[set[int]]:
        """Wait until these loads have ended. Returns for each rank the missing blocks of all loads that have ended."""
        ranks = list(range(len(self._pipes))) if ranks is None else ranks
        ended: dict[int, set[str]] = {rank: set() for rank in ranks}
        missing: dict[int, set[int]] = {rank: set() for rank in ranks}
        until = time.monotonic() + within_s
        while any(not ended[rank].issuperset(names) for rank in ranks):
            assert time.monotonic() < until, f"of {names} ended: {ended}"
            for rank, (finished, failed) in zip(ranks, self.all("take_loaded", ranks=ranks), strict=True):
                ended[rank] |= finished
                missing[rank] |= failed
            time.sleep(0.002)
        return [missing[rank] for rank in ranks]

    def count(self, name: str, ranks: Sequence[int] | None = None) -> list[float]:
        return [counters.get(name, 0) for counters in self.all("take_counters", ranks=ranks)]

    @contextlib.contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Stop a rank (SIGSTOP) while the body runs."""
        os.kill(self.pids[rank], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[rank], signal.SIGCONT)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
