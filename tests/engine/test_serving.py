"""The example with two `vllm serve` processes on one store: what a user of the documents does first."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_two_vllm_servers_continue_each_others_conversation_and_a_router_finds_it() -> None:
    command = [sys.executable, str(ROOT / "examples" / "two_engines.py"), "--json", "--prompt-tokens", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    turns = result["turns"]
    assert turns[0]["cached_tokens"] == 0
    for before, turn in pairwise(turns):
        # All of the turn before, its answer's last block perhaps excepted, was saved by the other engine.
        assert turn["cached_tokens"] >= before["prompt_tokens"] // 32 * 32
    # The router sends a conversation where it is.
    routed = result["routed"]
    assert len({turn["engine"] for turn in routed}) == 1
    for before, turn in pairwise(routed):
        assert turn["cached_tokens"] >= turn["routed_tokens"] >= before["prompt_tokens"] // 32 * 32
    for metrics in result["metrics"].values():
        assert any(name.startswith("vllm:kvstore_hit_tokens_total") and 'tier="store"' in name for name in metrics)
        assert not any(name.startswith(("vllm:kvstore_failed", "vllm:kvstore_defects")) for name in metrics)
