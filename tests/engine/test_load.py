"""`kvstore load` against a real `vllm serve`: exact lengths, shared prefixes, and the times of vLLM's own benchmark.

vLLM's benchmark replays the same trace with token ids of its own: `vllm bench serve --dataset-name timed_trace`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.remote_kv_cache.engine_models import save_tokenizer
from benchmarks.remote_kv_cache.vllm_bench import bench, bench_arguments
from tests.engine.engines import nursery
from tests.engine.served import MODEL, ServedEngine
from tests.support import forked
from tests.support.harness import environment

REQUESTS = 16
SPACING_MS = 300
# Two runs of one benchmark on a machine that does other things mostly differ by less than this.
FACTOR = 3.0
ATTEMPTS = 4


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with ServedEngine(model, log, None, "--skip-tokenizer-init", max_model_len=2048) as server:
        yield server


def write_trace(file: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def load(server: ServedEngine, folder: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """-> the report, and the lines of all requests."""
    output = folder / "requests.jsonl"
    given = ["load", "--url", server.url, "--model", MODEL, "--slo-ttft", "30", "--slo-tpot", "10"]
    given += ["--json", "--output", str(output), *arguments]
    done = forked.run("kvstore_cli", *given, env=environment(), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in output.read_text().splitlines()]


def vllm_benchmark(server: ServedEngine, folder: Path, trace: Path, requests: int) -> dict[str, Any]:
    """-> the result file of vLLM's benchmark for the same trace."""
    # It draws token ids from the vocabulary of a tokenizer, which the model does not have.
    save_tokenizer(folder / "tokenizer", 4096)
    result = folder / "vllm.json"
    arguments = bench_arguments(server.url, MODEL, folder / "tokenizer", trace, requests, result)
    log = folder / "vllm.log"
    process = nursery().Process(target=bench_serve, args=(arguments, log))
    process.start()
    process.join(150)
    process.kill()
    assert process.exitcode == 0, log.read_text()[-4000:]
    return dict(json.loads(result.read_text()))


def bench_serve(arguments: list[str], log: Path) -> None:
    """`vllm bench serve`, in a process forked from the nursery; what it says goes to the file `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    bench(arguments)


def compared(engine: ServedEngine, folder: Path, attempt: int) -> dict[str, float]:
    """Replay one trace with both, check all that does not depend on the machine. -> our median times, of vLLM's."""
    chooser = random.Random(1)
    rows = []
    for number in range(REQUESTS):
        length = chooser.randint(100, 800)
        own = [2 * number + 100 * attempt, 2 * number + 100 * attempt + 1][: -(-length // 512)]
        rows.append((number * SPACING_MS, length, chooser.randint(4, 16), own))
    trace = write_trace(folder / "trace.jsonl", rows)
    ours, lines = load(engine, folder, "--trace", str(trace), "--seed", str(2 + attempt))
    theirs = vllm_benchmark(engine, folder, trace, REQUESTS)
    assert (ours["completed"], ours["failed"]) == (theirs["completed"], theirs["failed"]) == (REQUESTS, 0)
    assert ours["tokens"]["prompt"] == ours["tokens"]["input"] == theirs["total_input_tokens"]
    assert ours["tokens"]["completion"] == ours["tokens"]["output"] == theirs["total_output_tokens"]
    for (at_ms, input_length, output_length, _), line in zip(rows, lines, strict=True):
        assert line["scheduled_s"] == pytest.approx(at_ms / 1000)
        assert (line["prompt_tokens"], line["tokens"]) == (input_length, output_length)
        assert line["cached_tokens"] == 0  # prompts of another seed are new
    return {name: ours[f"{name}_s"]["p50"] * 1000 / theirs[f"median_{name}_ms"] for name in ("ttft", "tpot")}


@pytest.mark.timeout(900)
def test_times_agree_with_vllms_own_benchmark(engine: ServedEngine, tmp_path: Path) -> None:
    warm = write_trace(tmp_path / "warm.jsonl", [(number * SPACING_MS, 500, 8, [1000 + number]) for number in range(4)])
    load(engine, tmp_path, "--trace", str(warm), "--seed", "1")  # the first requests of all are slow
    found = []
    for attempt in range(ATTEMPTS):  # what the machine does beside one run is over by the next; a wrong clock is not
        found.append(compared(engine, tmp_path, attempt))
        if all(1 / FACTOR < ratio < FACTOR for ratio in found[-1].values()):
            return
    pytest.fail(f"median times as multiples of vLLM's, in {ATTEMPTS} attempts: {found}")


@pytest.mark.timeout(300)
def test_prompts_share_exactly_the_prefixes_of_the_trace(engine: ServedEngine, tmp_path: Path) -> None:
    first = write_trace(tmp_path / "first.jsonl", [(0, 1024, 2, [1, 2])])
    _, (line,) = load(engine, tmp_path, "--trace", str(first), "--seed", "5")
    assert line["cached_tokens"] == 0
    rows = [(0, 1500, 2, [1, 2, 3]), (10, 700, 2, [1, 9]), (20, 1024, 2, [8, 2]), (30, 300, 2, [1])]
    second = write_trace(tmp_path / "second.jsonl", rows)
    made, lines = load(engine, tmp_path, "--trace", str(second), "--seed", "5")
    # Whole blocks of 32 tokens, of which an engine computes the last one anew.
    assert [line["cached_tokens"] for line in lines] == [1024, 512, 0, 288]
    assert made["tokens"]["cached"] == 1024 + 512 + 288


@pytest.mark.timeout(300)
def test_what_does_not_fit_the_model_fails_and_is_clipped_if_asked(engine: ServedEngine, tmp_path: Path) -> None:
    """vLLM refuses a prompt that is too long, and cuts an answer for which there is no room."""
    rows = [(0, 2500, 8, list(range(5))), (10, 2042, 8, list(range(20, 24))), (20, 100, 3, [9])]
    trace = write_trace(tmp_path / "long.jsonl", rows)
    made, lines = load(engine, tmp_path, "--trace", str(trace), "--seed", "6")
    assert [line["error"] for line in lines] == ["http_400", "fewer_tokens", None]
    assert "2048" in lines[0]["message"] and "after 6 of 8 tokens" in lines[1]["message"]
    assert made["attainment"]["joint"] == pytest.approx(1 / 3)
    clipped, lines = load(engine, tmp_path, "--trace", str(trace), "--max-input-tokens", "2000", "--seed", "7")
    assert (clipped["completed"], clipped["clipped"]) == (3, 2)
    assert [line["prompt_tokens"] for line in lines] == [2000, 2000, 100]
