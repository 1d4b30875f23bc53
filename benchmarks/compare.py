"""Finds out whether one checkout is slower than another. Run it with `python -m benchmarks.compare OLD NEW`, where OLD
and NEW are the folders of the checkouts. Both must have a built extension (`scripts/run.sh full true`).

Each checkout runs its own server and client processes, which live for the whole run. The calls of both checkouts
alternate, in an order that is shuffled for each round, so a disturbance of the machine affects both. The ratio of a
round is NEW's seconds divided by OLD's. The median of the ratios is reported, with its 95 % confidence interval from
order statistics, which assumes no distribution. The exit status is 1 if a median is above `--at-most`. After the clock
has stopped, the bytes read are compared with the bytes written.

With `--engine-tokens N`, each side also has a vLLM engine, which loads a prompt of N tokens from its server before the
first token. The engine's answer is compared with its answer when it computed the prompt itself.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

LARGE_BYTES: Final = 917_504
SMALL_BYTES: Final = 16 << 10
LARGE_BLOCKS: Final = 256
SMALL_BLOCKS: Final = 8192
LARGE_CALL: Final = 64
SMALL_CALL: Final = 1024
LOOKUP_KEYS: Final = 512
LOOKUPS: Final = 200
ENGINE_OUTPUT: Final = 8  # tokens
READY: Final = re.compile(r"kvstore-server ready (tcp://\S+)")


# ---- one side ------------------------------------------------------------------------------------------------------


def _operations(endpoint: str) -> dict[str, Callable[[], float]]:
    """The operations of this checkout's client by name. Each returns its time in seconds."""
    from kvstore_client import KVStoreClient, Namespace

    operations: dict[str, Callable[[], float]] = {}
    for name, size, count, per_call in (
        ("917504 B", LARGE_BYTES, LARGE_BLOCKS, LARGE_CALL),
        ("16 KiB", SMALL_BYTES, SMALL_BLOCKS, SMALL_CALL),
    ):
        draw = np.random.default_rng(size)
        keys = draw.integers(0, 256, (count, 32), dtype=np.uint8)
        source = draw.integers(0, 256, (count, size), dtype=np.uint8)
        out = np.zeros_like(source)
        namespace = Namespace(model=f"compare {name}", dtype="bfloat16", block_tokens=16, block_bytes=size)
        # Both sides use TCP. A checkout that is older than shared memory lacks the option.
        options: dict[str, Any] = (
            {"shared_memory": False} if "shared_memory" in inspect.signature(KVStoreClient).parameters else {}
        )
        client = KVStoreClient(endpoint, namespace, timeout_s=60.0, **options)
        spans = [slice(at, min(at + per_call, count)) for at in range(0, count, per_call)]

        def write(client: Any = client, keys: Any = keys, source: Any = source, spans: Any = spans) -> float:
            client.delete(keys)
            began = time.perf_counter()
            created = sum(client.set(keys[span], source[span]).created for span in spans)
            elapsed = time.perf_counter() - began
            assert created == len(keys), f"{created} of {len(keys)} blocks were created"
            return elapsed

        def read(
            client: Any = client, keys: Any = keys, source: Any = source, out: Any = out, spans: Any = spans
        ) -> float:
            out.fill(0)
            began = time.perf_counter()
            for span in spans:
                client.get_into(keys[span], out[span])
            elapsed = time.perf_counter() - began
            assert np.array_equal(out, source), "the bytes read differ from those written"
            return elapsed

        def stream(
            client: Any = client, keys: Any = keys, source: Any = source, out: Any = out, spans: Any = spans
        ) -> float:
            out.fill(0)
            began = time.perf_counter()
            for span in spans:
                rows = out[span]
                for position, block in client.stream_get(keys[span]):
                    rows[position] = np.frombuffer(block, dtype=np.uint8)
            elapsed = time.perf_counter() - began
            assert np.array_equal(out, source), "the bytes read differ from those written"
            return elapsed

        def look(client: Any = client, keys: Any = keys) -> float:
            some = keys[:LOOKUP_KEYS]
            began = time.perf_counter()
            for _ in range(LOOKUPS):
                client.contains(some)
            return (time.perf_counter() - began) / LOOKUPS

        operations |= {f"set {name}": write, f"get_into {name}": read, f"stream_get {name}": stream}
        if size == SMALL_BYTES:
            operations[f"contains {LOOKUP_KEYS} keys"] = look
    return operations


def _load_in_engine(endpoint: str, tokens: int, stack: contextlib.ExitStack) -> Callable[[], float]:
    """Return an operation that measures the seconds to the first token of a prompt which only the store has."""
    from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, full_blocks
    from benchmarks.remote_kv_cache.engines import Engine, Store

    model = ENGINE_MODELS["mid"]
    [prompt] = model.prompts(0, 1, tokens)
    engine = Engine(
        model,
        {"endpoint": endpoint, "cpu_bytes": 0},
        enable_prefix_caching=False,
        max_model_len=tokens + 2 * ENGINE_OUTPUT,
        kv_cache_memory_bytes=(full_blocks(tokens) + 4) * model.block_bytes + (64 << 20),
    )
    store = stack.enter_context(Store(endpoint))
    stack.enter_context(engine)
    before = store.created()
    [computed] = engine.generate([prompt], ENGINE_OUTPUT).answers
    store.wait_created(before + full_blocks(tokens))

    def load() -> float:
        [loaded] = engine.generate([prompt], ENGINE_OUTPUT).answers
        assert loaded.cached_tokens >= tokens - 64, f"{loaded.cached_tokens} of {tokens} tokens came from the store"
        assert loaded.token_ids == computed.token_ids, "the answer differs from that to the computed prompt"
        return float(loaded.first_token_s)

    return load


def side(endpoint: str, engine_tokens: int) -> None:
    """Run the client process: for each line of standard input, run the operation that it names, and print its
    seconds."""
    with contextlib.ExitStack() as stack:
        operations = _operations(endpoint)
        if engine_tokens:
            operations[f"load {engine_tokens} tokens"] = _load_in_engine(endpoint, engine_tokens, stack)
        print(json.dumps(list(operations)), flush=True)
        for line in sys.stdin:
            print(operations[line.strip()](), flush=True)


class Side:
    """One checkout, with its own server and client process."""

    def __init__(self, tree: Path, engine_tokens: int, log: IO[str], stack: contextlib.ExitStack) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "kvstore", "--port", "0", "--memory", "2GiB"]
        server = self._start(command, environment, log, stack)
        assert server.stdout is not None
        ready = READY.match(server.stdout.readline())
        if ready is None:
            raise SystemExit(f"error: the server of {tree} did not start; is its extension built?")
        command = [
            sys.executable,
            __file__,
            "--side",
            ready[1],
            str(engine_tokens),
        ]  # this file runs with the checkout's own packages
        self._client = self._start(command, environment, log, stack)
        assert self._client.stdout is not None
        self.operations: list[str] = json.loads(self._client.stdout.readline())

    @staticmethod
    def _start(
        command: list[str], environment: dict[str, str], log: IO[str], stack: contextlib.ExitStack
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=tempfile.gettempdir(),
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        return process

    def run(self, operation: str) -> float:
        """Run one operation, and return its seconds."""
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.write(f"{operation}\n")
        self._client.stdin.flush()
        return float(self._client.stdout.readline())


@contextlib.contextmanager
def sides(old: Path, new: Path, engine_tokens: int) -> Iterator[tuple[Side, Side]]:
    """Start both checkouts. They run until the body ends."""
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        try:
            yield Side(old, engine_tokens, log, stack), Side(new, engine_tokens, log, stack)
        except (ValueError, json.JSONDecodeError, AssertionError):
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the confidence interval of the median, from at least 6 values. It is the narrowest pair of order
    statistics, equally far from both ends, that encloses the true median with a probability of at least 95 %."""
    ordered, count = sorted(values), len(values)
    outside, rank = 2 / 2**count, 0  # the probability that all values lie on one side of the median
    while outside + 2 * math.comb(count, rank + 1) / 2**count <= 0.05:
        rank += 1
        outside += 2 * math.comb(count, rank) / 2**count
    return ordered[rank], ordered[-1 - rank]


def main() -> int:
    if sys.argv[1:2] == ["--side"]:
        side(sys.argv[2], int(sys.argv[3]))
        return 0
    from benchmarks.remote_kv_cache.rig import busy_share, load_average

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=15, help="at least 6; default: 15")
    parser.add_argument("--engine-tokens", type=int, default=0, help="tokens of a prompt to load; default: none")
    parser.add_argument("--at-most", type=float, default=1.03, help="the largest accepted ratio; default: 1.03")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.rounds < 6:
        parser.error(f"--rounds {options.rounds}: expected at least 6, because fewer give no 95 % confidence interval")
    load, busy = load_average(), busy_share()
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    with sides(options.old.resolve(), options.new.resolve(), options.engine_tokens) as (old, new):
        for number in range(options.rounds + 1):  # the first round only warms up
            draw = random.Random(number)
            for operation in old.operations:  # an operation that reads blocks follows the one that writes them
                pair = [(0, old), (1, new)]
                draw.shuffle(pair)
                taken = {which: each.run(operation) for which, each in pair}
                if number:
                    for which, kept in enumerate(seconds.setdefault(operation, ([], []))):
                        kept.append(taken[which])
    table = Table(
        "operation",
        "old, ms",
        "new, ms",
        "new ÷ old, median",
        "95 % interval",
        "min … max",
        title=f"{options.rounds} rounds",
    )
    slower, ratios, intervals = [], {}, {}
    for operation, (olds, news) in seconds.items():
        each = [mine / theirs for theirs, mine in zip(olds, news, strict=True)]
        ratios[operation], intervals[operation] = median(each), median_interval(each)
        if ratios[operation] > options.at_most:
            slower.append(operation)
        table.add_row(
            operation,
            f"{median(olds) * 1e3:.3f}",
            f"{median(news) * 1e3:.3f}",
            f"{ratios[operation]:.3f}",
            "{:.3f} … {:.3f}".format(*intervals[operation]),
            f"{min(each):.2f} … {max(each):.2f}",
        )
    Console(width=120).print(table)
    print(f"load average before: {load}, busy before: {busy}")
    if options.json is not None:
        found = {
            "ratios": ratios,
            "intervals": intervals,
            "seconds": seconds,
            "rounds": options.rounds,
            "load": {"average": load, "busy": busy},
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if slower:
        print(f"slower by more than {options.at_most:.2f} x: {', '.join(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
