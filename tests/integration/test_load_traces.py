"""Published traces through the commands that read them: what is sent, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from tests.integration.test_load import lines_of, load, report
from tests.integration.test_plan import ENGINE, QUICK, SEARCH, document, plan
from tests.support.endpoint import Endpoint
from tests.unit.test_load_traces import REQUESTS, bailian, encoded, mooncake

IGNORED = "fields that are not used: chat_id, parent_chat_id, type, turn"


def test_a_published_trace_is_sent_as_it_is(tmp_path: Path) -> None:
    rows = bailian()
    file = tmp_path / "qwen_traceA_blksz_16.jsonl.zst"
    file.write_bytes(zstandard.compress(encoded(rows)))
    with Endpoint() as endpoint:
        arguments = ["--trace", str(file), "--requests", "30", "--speed", "4", "--max-output-tokens", "3"]
        made = report(endpoint.url, *arguments, "--output", str(tmp_path / "out"))
        said = load(endpoint.url, *arguments)
        prompts = [each.body["prompt"] for each in endpoint.asked][:30]
    assert (made["requests"], made["completed"]) == (30, 30)
    assert "blocks of 16 tokens, timestamps in s" in made["source"]
    assert said.stderr.count(IGNORED) == 1
    lines = lines_of(tmp_path / "out")
    assert [line["scheduled_s"] for line in lines] == [row["timestamp"] / 4 for row in rows[:30]]
    for row, prompt in zip(rows, prompts, strict=False):
        assert len(prompt) == row["input_length"]
        if row["parent_chat_id"] >= 0:
            parent = rows[row["parent_chat_id"]]
            shared = parent["input_length"] // 16 * 16
            assert prompt[:shared] == prompts[row["parent_chat_id"]][:shared]


def test_a_trace_that_cannot_be_meant_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(encoded(mooncake(bailian())))
    with Endpoint() as endpoint:
        unit = load(endpoint.url, "--trace", str(file), status=2).stderr
        size = load(endpoint.url, "--trace", str(file), "--time-unit", "s", "--block-tokens", "512", status=2).stderr
        other = load(endpoint.url, "--trace", str(file), "--time-unit", "h", status=2).stderr
        alone = load(endpoint.url, "--rate", "1", "--block-tokens", "16", status=2).stderr
        assert not endpoint.asked
    assert "requests a second with --time-unit s" in unit
    assert "one for each 512 tokens as named" in size
    assert "--time-unit" in other and "'ms'" in other
    assert "--block-tokens and --time-unit go with --trace" in alone


def test_a_plan_takes_a_published_trace(tmp_path: Path) -> None:
    rows = bailian()
    file = tmp_path / "qwen.jsonl"
    file.write_bytes(encoded(rows))
    said = plan("search", *ENGINE, "--trace", str(file), *SEARCH, *QUICK, "--json")
    found = json.loads(said.stdout)
    assert said.stderr.count(IGNORED) == 1
    assert found["rate_rps"] == pytest.approx((REQUESTS - 1) / rows[-1]["timestamp"])
    shared = sum(rows[row["parent_chat_id"]]["input_length"] // 16 * 16 for row in rows if row["parent_chat_id"] >= 0)
    assert found["hit_rate"] == pytest.approx(shared / sum(row["input_length"] for row in rows), abs=0.01)
    file.write_bytes(encoded(mooncake(rows)))
    refused = document("search", *ENGINE, "--trace", str(file), *SEARCH, *QUICK, status=2)
    assert "--time-unit s" in refused["error"]["message"]
