"""Runs examples/demo.py, in which two real vLLM engines share a prompt through the store, and keeps its result with
those of the other benchmarks.

The first engine computes the prompt, and the second one, which starts later, loads it. Needs vLLM; without it nothing
is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from rich.table import Table

from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import ROOT, environment
from benchmarks.remote_kv_cache.report import Case, console

FIRST = "first token, computed"
SECOND = "first token, from the store"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, help="default: 7800; --quick: 512")
    parser.add_argument("--model", choices=("smollm2", "mid", "tiny"), help="default: smollm2; --quick: tiny")


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=3, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm")):
        return
    tokens = benchmark.options.prompt_tokens or (512 if benchmark.quick else 7800)
    model = benchmark.options.model or ("tiny" if benchmark.quick else "smollm2")
    command = [sys.executable, "examples/demo.py", "--json", "--prompt-tokens", str(tokens), "--model", model]
    results = []
    for _ in range(1 if benchmark.quick else benchmark.rounds):
        demo = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(demo.stdout))
    seconds = {
        FIRST: [result["without_cache"]["ttft_s"] for result in results],
        SECOND: [result["remote_cache"]["ttft_s"] for result in results],
    }
    case = Case(f"{tokens} tokens, {model} model", seconds, references=(SECOND,))
    benchmark.cases.append(case)
    equal = all(result["token_ids_equal"] for result in results)
    table = Table("", "seconds", title=case.name, title_justify="left")
    for name, values in seconds.items():
        table.add_row(name, ", ".join(f"{value:.3f}" for value in values))
    table.add_row("times shorter", f"{case.ratio(FIRST, SECOND):.1f}")
    table.add_row("tokens are equal", "yes" if equal else "NO")
    console().print(table)
    benchmark.finish(prompt_tokens=tokens, model=model, token_ids_equal=equal)


if __name__ == "__main__":
    main()
