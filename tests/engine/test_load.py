"""`kvstore load` against a real `vllm serve`: exact lengths, shared prefixes, and the times that vLLM's own benchmark
measures.

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
from tests.engine.served import MODEL, ServedEngine, save_served_model
from tests.support import forked
from tests.support.harness import environment

REQUESTS = 16
SPACING_MS = 300
# On a busy machine, the results of two runs of one benchmark mostly differ by less than this factor.
FACTOR = 3.0
ATTEMPTS = 4
POISSON = ["--rate", "4", "--requests", "4", "--input-tokens", "40"]


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with ServedEngine(model, log, None, "--skip-tokenizer-init", max_model_len=2048) as server:
        yield server


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """An engine with a tokenizer, a chat template and tool calls."""
    folder = tmp_path_factory.mktemp("talking")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with ServedEngine(save_served_model(folder / "model"), folder / "server.log", None, *tools) as server:
        yield server


def write_trace(file: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def load(server: ServedEngine, folder: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `kvstore load`. Returns its report, and the record of each request."""
    output = folder / "requests.jsonl"
    given = ["load", "--url", server.url, "--model", MODEL, "--slo-ttft", "30", "--slo-tpot", "10"]
    given += ["--json", "--output", str(output), *arguments]
    done = forked.run("kvstore_cli", *given, env=environment(), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in output.read_text().splitlines()]


def vllm_benchmark(server: ServedEngine, folder: Path, trace: Path, requests: int) -> dict[str, Any]:
    """Run vLLM's benchmark with the same trace, and return its result file."""
    # The benchmark draws token ids from a tokenizer's vocabulary; the model has no tokenizer.
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
    """Run `vllm bench serve` in this process, with its output in the file `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    bench(arguments)


def compared(engine: ServedEngine, folder: Path, attempt: int) -> dict[str, float]:
    """Replay one trace with `kvstore load` and with vLLM's benchmark, and check everything that does not depend on the
    machine's speed. Returns the ratios of our median times to vLLM's."""
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
        assert line["cached_tokens"] == 0  # another seed makes new prompts
    return {name: ours[f"{name}_s"]["p50"] * 1000 / theirs[f"median_{name}_ms"] for name in ("ttft", "tpot")}


@pytest.mark.timeout(900)
def test_measured_times_agree_with_vllms_own_benchmark(engine: ServedEngine, tmp_path: Path) -> None:
    warm = write_trace(tmp_path / "warm.jsonl", [(number * SPACING_MS, 500, 8, [1000 + number]) for number in range(4)])
    load(engine, tmp_path, "--trace", str(warm), "--seed", "1")  # the engine's first requests are slow
    found = []
    for attempt in range(ATTEMPTS):  # other load on the machine may end before the next attempt
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
    # Whole blocks of 32 tokens are cached; the engine always computes a prompt's last token itself.
    assert [line["cached_tokens"] for line in lines] == [1024, 512, 0, 288]
    assert made["tokens"]["cached"] == 1024 + 512 + 288


@pytest.mark.timeout(300)
def test_requests_beyond_the_models_length_fail_or_are_clipped(engine: ServedEngine, tmp_path: Path) -> None:
    """vLLM refuses a prompt that is too long, and cuts off an answer that exceeds the model's length."""
    rows = [(0, 2500, 8, list(range(5))), (10, 2042, 8, list(range(20, 24))), (20, 100, 3, [9])]
    trace = write_trace(tmp_path / "long.jsonl", rows)
    made, lines = load(engine, tmp_path, "--trace", str(trace), "--seed", "6")
    assert [line["error"] for line in lines] == ["http_400", "fewer_tokens", None]
    assert "2048" in lines[0]["message"] and "after 6 of 8 tokens" in lines[1]["message"]
    assert made["attainment"]["joint"] == pytest.approx(1 / 3)
    clipped, lines = load(engine, tmp_path, "--trace", str(trace), "--max-input-tokens", "2000", "--seed", "7")
    assert (clipped["completed"], clipped["clipped"]) == (3, 2)
    assert [line["prompt_tokens"] for line in lines] == [2000, 2000, 100]


HALF = 127  # the tokenizer's token of the byte C3, which is half a character
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("api", "extra", "tokens", "answers"),
    [
        ("chat", {}, 1, 1),
        ("chat", {}, 12, 1),
        ("chat", {"allowed_token_ids": [HALF]}, 12, 1),
        ("chat", {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}, 24, 1),
        ("chat", {**TOOLS, "tool_choice": "required"}, 24, 1),
        ("chat", {"n": 2, "temperature": 1}, 12, 2),
        ("completions", {"n": 3, "temperature": 1}, 12, 3),
        ("completions", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, 12, 1),
        ("completions", {"stream_options": {}}, 12, 1),
    ],
    ids=[
        "one token",
        "chat",
        "halves",
        "named tool",
        "required tool",
        "two answers",
        "three",
        "usage each",
        "no usage",
    ],
)
def test_every_form_of_answer_is_complete_and_begins_with_its_first_token(
    talking: ServedEngine, api: str, extra: dict[str, Any], tokens: int, answers: int, tmp_path: Path
) -> None:
    load(talking, tmp_path, *POISSON, "--output-tokens", "2", "--api", api, "--seed", "90")  # the first ones are slow
    given = [*POISSON, "--output-tokens", str(tokens), "--api", api, "--extra-body", json.dumps(extra)]
    made, lines = load(talking, tmp_path, *given, "--seed", "91")
    assert (made["completed"], made["failed"], made["whole"]) == (4, 0, 0), made["errors"]
    for line in lines:
        # Without reported usage, chunks count as tokens, and an engine that is faster than its reader puts two tokens
        # into one chunk.
        assert line["tokens"] == tokens * answers or ("stream_options" in extra and not line["tokens_reported"])
        assert 0 < line["ttft_s"] < line["latency_s"]
        if tokens > 1:
            assert line["tpot_s"] > 0, "the first one came before the last one, also where a parser held it back"
            assert line["ttft_s"] + line["tpot_s"] * (line["tokens"] / answers - 1) <= line["latency_s"] + 1e-6


@pytest.mark.timeout(300)
def test_an_answer_that_ends_with_its_first_token_is_complete(talking: ServedEngine, tmp_path: Path) -> None:
    """Only the token that ends the text is allowed."""
    for api in ("chat", "completions"):
        given = [*POISSON, "--output-tokens", "9", "--api", api, "--extra-body", '{"allowed_token_ids": [4095]}']
        made, lines = load(talking, tmp_path, *given, "--no-extensions")
        assert (made["completed"], [line["tokens"] for line in lines]) == (4, [1] * 4), made["errors"]
        assert all(0 < line["ttft_s"] <= line["latency_s"] for line in lines)
