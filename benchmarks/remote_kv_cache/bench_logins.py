"""Measures the cost of logins, and the effect on a tenant when another tenant floods the store.

Clients get 512 blocks (8192 tokens of Qwen2.5-7B) with get_into, in calls of 64, alternately from a server to which
they log in and from one without logins. Then one tenant reads its own blocks, 16 blocks of 64 KiB in each call, alone
and while another tenant sets blocks as fast as it can. The results are the share of its blocks that the tenant still
finds, and the 99th percentile of the time of its calls.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import environment, kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, random_keys, random_rows
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, Blocks, connect, get_into_operation, plain_operations
from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, Namespace

OPEN: Final = "get_into, no logins"
LOGGED_IN: Final = "get_into, logged in"
ALONE: Final = "p99 alone"
BESIDE: Final = "p99 beside a flood"
SMALL_BYTES: Final = 64 << 10
OWN_BLOCKS: Final = 256
CALLS: Final = 400
_FLOOD: Final = """
import sys, numpy as np
from kvstore_client import KVStoreClient, Namespace
namespace = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=int(sys.argv[2]))
rows = np.random.default_rng(1).integers(0, 255, (64, int(sys.argv[2])), dtype=np.uint8)
number = 0
with KVStoreClient(sys.argv[1], namespace, shared_memory=False) as client:
    while True:
        keys = [(number + at).to_bytes(16, "little") for at in range(64)]
        client.set(keys, rows)
        number += 64
        if number == 6400:
            print("flooding", flush=True)
"""


def _principals(folder: Path) -> tuple[Path, dict[str, str]]:
    file = folder / "auth.toml"
    tokens = {name: add(file, name, name, ["read", "write"]) for name in ("quiet", "noisy")}
    file.write_text(file.read_text() + '\n[tenants.quiet]\nmemory_guaranteed = "64MiB"\n')
    return file, tokens


def _cost(benchmark: Benchmark, folder: Path) -> None:
    file, tokens = _principals(folder)
    blocks = Blocks(benchmark.batch, HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(plain_socket(benchmark.batch.blocks, HEADLINE.block_bytes))
        operations: list[Operation] = []
        for name, flags, token in ((OPEN, (), None), (LOGGED_IN, ("--auth", str(file)), tokens["noisy"])):
            endpoint = stack.enter_context(kvstore_server(blocks.total_bytes, flags=flags))
            client = stack.enter_context(connect(endpoint, "logins", HEADLINE.block_bytes, token=token))
            client.set(blocks.keys, blocks.source)
            operations.append(get_into_operation(client, blocks, name, PLAIN_GET))
        benchmark.measure("logins", [*plain_operations(plain, blocks), *operations], block_bytes=HEADLINE.block_bytes)


def _beside(benchmark: Benchmark, folder: Path) -> None:
    file, tokens = _principals(folder)
    namespace = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=SMALL_BYTES)
    keys, rows = random_keys(OWN_BLOCKS, 7), random_rows(OWN_BLOCKS, SMALL_BYTES, 7)
    out = np.zeros((16, SMALL_BYTES), dtype=np.uint8)
    hits: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    flags = ("--auth", str(file), "--segment", "4MiB")
    with (
        kvstore_server(128 << 20, spare_bytes=0, flags=flags) as endpoint,
        KVStoreClient(endpoint, namespace, token=tokens["quiet"], shared_memory=False) as quiet,
    ):
        quiet.set(keys, rows)

        def read(name: str) -> float:
            seconds, found = [], 0
            for number in range(CALLS if not benchmark.quick else 40):
                at = 16 * (number % (OWN_BLOCKS // 16))
                began = time.perf_counter()
                found += int(quiet.get_into(keys[at : at + 16], out).sum())
                seconds.append(time.perf_counter() - began)
            hits[name].append(found / (16 * len(seconds)))
            return float(np.percentile(seconds, 99))

        def beside() -> float:
            command = [sys.executable, "-c", _FLOOD, endpoint, str(SMALL_BYTES)]
            flood = subprocess.Popen(
                command, stdout=subprocess.PIPE, env={**environment(), "KVSTORE_TOKEN": tokens["noisy"]}
            )
            try:
                assert flood.stdout is not None and flood.stdout.readline() == b"flooding\n"
                return read(BESIDE)
            finally:
                flood.kill()
                flood.wait()
                flood.stdout.close()

        found: dict[str, float] = {}
        operations = [Operation(ALONE, lambda: read(ALONE)), Operation(BESIDE, beside, limit=ALONE)]
        benchmark.measure("tenants", operations, found=found)
        found.update((name, float(np.median(shares))) for name, shares in hits.items())
        benchmark.say(f"share of its blocks that were found: {found}")


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cost").mkdir()
        (Path(folder) / "beside").mkdir()
        _cost(benchmark, Path(folder) / "cost")
        _beside(benchmark, Path(folder) / "beside")
    benchmark.finish(shards=1)


if __name__ == "__main__":
    main()
