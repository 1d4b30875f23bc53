"""Runs `vllm bench serve` with a trace in Mooncake's format.

vLLM's command line needs the metadata of a distribution named `vllm`, which the builds for CPUs lack. So this module
calls the benchmark's functions: `python -m benchmarks.remote_kv_cache.vllm_bench …` takes the same arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CHUNK: Final = 512  # tokens for each hash in the trace


def bench_arguments(url: str, model: str, tokenizer: Path, trace: Path, requests: int, result: Path) -> list[str]:
    """Return the arguments with which `vllm bench serve` replays a trace and writes the file `result`."""
    options = {
        "backend": "vllm",
        "base-url": url,
        "model": model,
        "tokenizer": str(tokenizer),
        "dataset-name": "timed_trace",
        "dataset-path": str(trace),
        "num-prompts": str(requests),
        "timed-trace-chunk-hash-size": str(CHUNK),
        "timed-trace-sec-multiplier": "0.001",
        "timed-trace-label-timestamp": "timestamp",
        "timed-trace-label-input-length": "input_length",
        "timed-trace-label-output-length": "output_length",
        "timed-trace-label-hash-ids": "hash_ids",
        "result-filename": str(result),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["--save-result", "--disable-tqdm", *words]


def bench(arguments: Sequence[str]) -> None:
    """Run `vllm bench serve` with these arguments."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(list(arguments)))


if __name__ == "__main__":
    bench(sys.argv[1:])
