"""`kvstore plan profile` and `plan verify` with a real `vllm serve`, and a real store for the transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.served import MODEL, ServedEngine
from tests.support import forked
from tests.support.harness import Server, environment

KV_BYTES = 1024


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    options = ("--skip-tokenizer-init", "--no-enable-prefix-caching", "--max-num-batched-tokens", "1024")
    with ServedEngine(model, log, None, *options, max_model_len=1024) as server:
        yield server


def plan(*arguments: str) -> dict[str, Any]:
    done = forked.run("kvstore_cli", "plan", *arguments, "--json", env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.timeout(600)
def test_an_engine_is_profiled_planned_and_verified(engine: ServedEngine, server: Server, tmp_path: Path) -> None:
    """Other work on the machine makes measured times longer. So the test checks only what holds at any speed: the
    profile is complete, its times grow with the work, and `plan verify` compares the plan with the engine."""
    output = tmp_path / "profile.json"
    sweep = ["--lengths", "64,256,768", "--prefill-batches", "1,2", "--decode-batches", "1,4", "--rounds", "2"]
    what = ["--url", engine.url, "--model", MODEL, "--kv-bytes-per-token", str(KV_BYTES), "--output", str(output)]
    found = plan("profile", *what, *sweep, "--decode-tokens", "16", "--store", server.endpoint)
    [degree] = found["degrees"]
    assert degree["kv_tokens"]["1"] > 1024, "as its metrics say"
    for way in ("read", "write"):
        assert found["store"][way]["per_byte_s"] < 1e-6 and len(found["store"][way]["residuals"]) == 5
    prefill, [decode] = degree["prefill"], degree["decode"]
    assert prefill["per_token_s"] > 0 or prefill["per_token_squared_s"] > 0
    assert decode["fixed_s"] + decode["per_request_s"] > 0
    for error in (prefill["error"], decode["error"]):
        assert 0 <= error < 0.5
    one = prefill["fixed_s"] + prefill["per_token_s"] * 256 + prefill["per_token_squared_s"] * 256**2
    step = decode["fixed_s"] + decode["per_request_s"] + decode["per_context_token_s"] * 256
    rate = 0.6 / (one + 8 * step)
    compared = plan(
        "verify", "--profile", str(output), "--url", engine.url, "--model", MODEL,
        *(word for share in (0.6, 0.7, 0.8, 0.9, 1.0) for word in ("--rate", f"{share * rate:.3g}")),
        "--input-tokens", "256", "--output-tokens", "8", "--requests", "3", "--warmup", "1",
        "--slo-ttft", f"{20 * one + 1:.3g}", "--slo-tpot", f"{20 * step + 1:.3g}", "--chunk-tokens", "1024",
    )  # fmt: skip
    assert len(compared["compared"]) == 5
    for at_rate in compared["compared"]:
        assert at_rate["predicted"] == at_rate["measured"] == 1.0, "SLOs that two thirds of its load hold by far"
        assert at_rate["measured_ttft_s"] > 0 and at_rate["predicted_ttft_s"] > 0
    planned = plan(
        "search", "--profile", str(output), "--rate", f"{rate:.3g}", "--input-tokens", "256", "--output-tokens", "8",
        "--slo-ttft", f"{20 * one + 1:.3g}", "--slo-tpot", f"{20 * step + 1:.3g}", "--percentile", "90",
        "--nodes", "1", "--gpus-per-node", "2", "--max-batch", "8", "--seeds", "1", "--no-sensitivity",
    )  # fmt: skip
    assert planned["enough"] and planned["gpus"] == 2
