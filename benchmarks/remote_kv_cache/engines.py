"""The real vLLM engines that are measured, and a `Store` that finds out when the store has the blocks that the engines
sent.

An engine is a separate process. Without a GPU it is forked from a process that has only imported vLLM. Between orders
it waits and uses no CPU, so two engines can run at the same time and be used in turn. The scheduler, the model and the
connector of an engine share one process (there is no separate engine core). On a CPU the model computes on all cores,
so the connector's background work competes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.remote_kv_cache import engine_process
from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS, EngineModel, save_config, save_model
from benchmarks.remote_kv_cache.engine_process import (
    Arrival,
    Arrivals,
    Doubt,
    Order,
    Run,
    Served,
    Setup,
    Times,
)
from benchmarks.remote_kv_cache.processes import environment
from kvstore_client import KVStoreClient, Namespace

WITHOUT: Final = "without the connector"  # the reference in every benchmark of engines

ENGINE_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would first compile kernels, and needs a package that may be missing
    # A machine without a network has only this address.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_START_S: Final = 240.0  # vLLM compiles kernels when it first runs on a GPU
_ANSWER_S: Final = 1200.0
_STOP_S: Final = 30.0
_LOG_TAIL: Final = 4000

_STORED_S: Final = 60.0
_POLL_S: Final = 0.005
_QUIET_S: Final = 0.3


def add_cpu_bytes_option(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Add `--cpu-bytes`, the connector's option `cpu_bytes`."""
    said = "twice what the prompts need" if default is None else default
    parser.add_argument("--cpu-bytes", type=int, default=default, help=f"the CPU tier; 0: none; default: {said}")


def compute_threads() -> int:
    """The number of threads of each engine's model: all cores, unless OMP_NUM_THREADS is set."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


class Engine:
    """A vLLM engine. It starts when the object is made; the first order, or `wait_ready`, waits until it is ready."""

    def __init__(
        self,
        model: EngineModel,
        connector: dict[str, Any] | None,
        *,
        timed: bool = False,
        cores: Sequence[int] = (),
        weights: bool = True,
        **arguments: Any,
    ) -> None:
        """`connector`: the connector's options; None for an engine without it. `timed`: whether the calls to it are
        timed. `cores`: the cores that the engine may use; all if empty. `weights`: whether the weights come from a
        file; if not, they are random, which saves the time to load a large model. `arguments`: further arguments of
        `vllm.LLM`."""
        # These are read when torch and transformers are imported, before an engine's own settings apply.
        os.environ["OMP_NUM_THREADS"] = str(compute_threads())
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        context: Any
        if any(Path("/dev").glob("nvidia[0-9]*")):  # an import may open the device, which a fork cannot use
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(engine_process.PRELOAD)
        if not weights:
            arguments["load_format"] = "dummy"
        setup = Setup(
            save_model(model) if weights else save_config(model),
            connector,
            {"block_size": BLOCK_TOKENS, **arguments},
            timed,
            frozenset(cores),
        )
        settings = {**environment(), **ENGINE_ENVIRONMENT}
        descriptor, name = tempfile.mkstemp(suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=engine_process.run, args=(setup, settings, self._log, far_end))
        self._process.start()
        far_end.close()
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises RuntimeError with the end of its log if it fails to start."""
        if not self._ready:
            self._receive(_START_S)
            self._ready = True

    def generate(self, prompts: Sequence[list[int]], output_tokens: int, tops: int = 0) -> Run:
        """Send the engine all prompts at once and wait for the answers. tops: see `Order`."""
        self.wait_ready()
        self._pipe.send(Order(list(prompts), output_tokens, tops))
        run = self._receive(_ANSWER_S)
        assert isinstance(run, Run)
        return run

    def begin(self, arrivals: Sequence[Arrival], begin: float, seconds: float = 0.0) -> None:
        """Send the engine prompts that arrive at their times: see `Arrivals`. `served` waits for the answers."""
        self.wait_ready()
        self._pipe.send(Arrivals(begin, list(arrivals), seconds))

    def served(self) -> list[Served]:
        """Wait for the results of `begin`."""
        return list(self._receive(_ANSWER_S))

    def gaps(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """Return the answer to a `Doubt`. It is computed without any cache."""
        self.wait_ready()
        self._pipe.send(Doubt(prompt, continuation))
        return list(self._receive(_ANSWER_S))

    def times(self) -> dict[str, list[tuple[float, float]]]:
        """Return the answer to `Times`."""
        self.wait_ready()
        self._pipe.send(Times())
        return dict(self._receive(_ANSWER_S))

    def stop(self) -> None:
        """End the engine, by force if it does not end by itself."""
        if self._pipe.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # it ended already
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _receive(self, timeout_s: float) -> Any:
        what = f"no answer within {timeout_s:.0f} s"
        if self._pipe.poll(timeout_s):
            try:
                return self._pipe.recv()
            except EOFError:
                what = "it ended"
        log = self._log.read_text(errors="replace")[-_LOG_TAIL:]
        raise RuntimeError(f"engine: {what}; its log ends:\n{log}")


class Store:
    """The server's counts of its blocks. They are polled while waiting for sends, not while an engine computes."""

    def __init__(self, endpoint: str) -> None:
        nobody = Namespace(model="nobody", dtype="uint8", block_tokens=1, block_bytes=1)
        self._client = KVStoreClient(endpoint, nobody)

    def created(self) -> int:
        """Return how many blocks have become readable since the server started. Raises RuntimeError if some have been
        evicted."""
        shards = self._client.info().shards
        if evicted := sum(shard.evicted for shard in shards):
            raise RuntimeError(f"the server evicted {evicted} blocks: it is too small for this benchmark")
        return sum(shard.created for shard in shards)

    def read(self) -> int:
        """Return how many blocks have been sent to readers since the server started."""
        return sum(shard.hits for shard in self._client.info().shards)

    def purge(self) -> None:
        """Remove all blocks, also those that engines hold."""
        self._client.purge(all_namespaces=True, timeout_s=_STORED_S)

    def wait_created(self, blocks: int, within_s: float = _STORED_S) -> float:
        """Wait until this many blocks have been created. Return the time at which they were, on the clock of
        `time.perf_counter`. Raises RuntimeError after `within_s`."""
        deadline = time.monotonic() + within_s
        while (created := self.created()) < blocks:
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {within_s:.0f} s the store has {created} of {blocks} blocks")
            time.sleep(_POLL_S)
        return time.perf_counter()

    def settle(self, blocks: int = 0) -> int:
        """Wait until at least this many blocks have been created and no more come (for example of generated tokens).
        Return `created`."""
        self.wait_created(blocks)
        before, now = -1, self.created()
        while now != before:
            time.sleep(_QUIET_S)
            before, now = now, self.created()
        return now

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
