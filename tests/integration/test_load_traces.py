"""Published traces in the commands that read them: what is sent, what is printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from tests.integration.test_load import lines_of, load, report
from tests.integration.test_plan import NODE, QUICK, SEARCH, document, plan
from tests.support.endpoint import Endpoint
from tests.support.profiles import on_one_gpu
from tests.unit.test_load_traces import REQUESTS, bailian, encoded, mooncake

IGNORED = "fields that are not used: chat_id, parent_chat_id, type, turn"


def test_a_published_trace_is_sent_unchanged(tmp_path: Path) -> None:
    rows = bailian()
    file = tmp_path / "qwen_traceA_blksz_16.jsonl.zst"
    file.write_bytes(zstandard.compress(encoded(rows)))
    with Endpoint() as endpoint:
        arguments = ["--trace", str(file), "--requests", "30", "--speed", "4", "--max-output-tokens", "3"]
        made = report(endpoint.url, *arguments, "--output", str(tmp_path / "out"))
        said = load(endpoint.url, *arguments)
        prompts = {len(each.body["prompt"]): each.body["prompt"] for each in endpoint.asked[:30]}
    assert (made["requests"], made["completed"]) == (30, 30)
    assert "blocks of 16 tokens, timestamps in s" in made["source"]
    assert said.stderr.count(IGNORED) == 1
    lines = lines_of(tmp_path / "out")
    assert [line["scheduled_s"] for line in lines] == [row["timestamp"] / 4 for row in rows[:30]]
    # Requests that are due within a few milliseconds may arrive in another order, so the test identifies them by their
    # lengths.
    assert sorted(prompts) == sorted(row["input_length"] for row in rows[:30])
    for row in rows[:30]:
        if row["parent_chat_id"] >= 0:
            parent = rows[row["parent_chat_id"]]["input_length"]
            shared = parent // 16 * 16
            assert prompts[row["input_length"]][:shared] == prompts[parent][:shared]


def test_an_implausible_trace_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(encoded(mooncake(bailian())))
    with Endpoint() as endpoint:
        unit = load(endpoint.url, "--trace", str(file), status=2).stderr
        size = load(endpoint.url, "--trace", str(file), "--time-unit", "s", "--block-tokens", "512", status=2).stderr
        other = load(endpoint.url, "--trace", str(file), "--time-unit", "h", status=2).stderr
        alone = load(endpoint.url, "--rate", "1", "--block-tokens", "16", status=2).stderr
        assert not endpoint.asked
    assert "requests a second with --time-unit s" in unit
    assert "one for each 512 tokens, as given" in size
    assert "--time-unit" in other and "'ms'" in other
    assert "--block-tokens and --time-unit need --trace" in alone


def test_a_plan_accepts_a_published_trace(tmp_path: Path) -> None:
    rows = bailian()
    file = tmp_path / "qwen.jsonl"
    file.write_bytes(encoded(rows))
    given = ["--profile", on_one_gpu(tmp_path), *NODE, "--trace", str(file), *SEARCH, *QUICK]
    said = plan("search", *given, "--json")
    found = json.loads(said.stdout)
    assert said.stderr.count(IGNORED) == 1
    assert found["rate_rps"] == pytest.approx((REQUESTS - 1) / rows[-1]["timestamp"])
    shared = sum(rows[row["parent_chat_id"]]["input_length"] // 16 * 16 for row in rows if row["parent_chat_id"] >= 0)
    assert found["hit_rate"] == pytest.approx(shared / sum(row["input_length"] for row in rows), abs=0.01)
    file.write_bytes(encoded(mooncake(rows)))
    refused = document("search", *given, status=2)
    assert "--time-unit s" in refused["error"]["message"]
