"""Measures how fast the keys of token chains are computed, in tokens a second on one thread. It also compares gather
and scatter with NumPy's row copies.

The limit of hashing is one memcpy of the tokens. For comparison, Python code makes the same kind of chain with the
xxhash package and with SHA-256, one call for each block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from rich.table import Table

from benchmarks.remote_kv_cache.copies import NAIVE, NAIVE_WRITE, Copies
from benchmarks.remote_kv_cache.harness import Benchmark, Operation, add_model_option, chosen_models
from benchmarks.remote_kv_cache.report import Case, console
from kvstore_client import prefix_keys

TOKENS: Final = 1 << 22
QUICK_TOKENS: Final = 1 << 16
VOCABULARY: Final = 152_064
HASHING: Final = "prefix_keys"
MEMCPY: Final = "memcpy of the tokens"


def chain(tokens: npt.NDArray[Any], block_tokens: int, digest: Callable[[bytes], bytes]) -> bytes:
    """Return the last key of a chain, made with one call per block. A key is the digest of the previous block's key and
    the block's tokens."""
    data = memoryview(tokens).cast("B")
    size = block_tokens * tokens.itemsize
    key = b""
    for start in range(0, len(data), size):
        key = digest(key + data[start : start + size])
    return key


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def measure_hashing(benchmark: Benchmark, tokens: npt.NDArray[Any], block_tokens: int) -> Case:
    """Measure one dtype and block size."""
    copy = np.zeros_like(tokens)

    def operation(name: str, call: Callable[[], object], limit: str = MEMCPY) -> Operation:
        def run() -> None:
            call()

        return Operation(name, run, tokens.nbytes, limit)

    return benchmark.measure(
        f"{tokens.dtype} tokens, {block_tokens} a block",
        [
            operation(MEMCPY, lambda: np.copyto(copy, tokens), limit=""),
            operation(HASHING, lambda: prefix_keys(tokens, block_tokens)),
            operation("python xxh3-128 chain", lambda: chain(tokens, block_tokens, xxhash.xxh3_128_digest)),
            operation("python sha-256 chain", lambda: chain(tokens, block_tokens, _sha256)),
        ],
        group="hashing",
        tokens=len(tokens),
        token_dtype=str(tokens.dtype),
        block_tokens=block_tokens,
    )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    count = QUICK_TOKENS if benchmark.quick else TOKENS
    table = Table("", title="Tokens a second, one thread", title_justify="left")
    for heading in ("M tokens/s", "min … max"):
        table.add_column(heading, justify="right")
    for dtype in (np.int32, np.int64):
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, count, dtype=dtype)
        for block_tokens in (16, 64, 256):
            case = measure_hashing(benchmark, tokens, block_tokens)
            rates = [count / seconds / 1e6 for seconds in case.seconds[HASHING]]
            table.add_row(case.name, f"{np.median(rates):.0f}", f"{min(rates):.0f} … {max(rates):.0f}")
    console().print(table)
    for model in chosen_models(benchmark.options):
        copies = Copies(model, benchmark.batch)
        benchmark.measure(
            model.name,
            copies.block_operations(),
            references=(NAIVE, NAIVE_WRITE),
            group="copying",
            **benchmark.batch.described(model.block_bytes),
        )
    benchmark.finish()


if __name__ == "__main__":
    main()
