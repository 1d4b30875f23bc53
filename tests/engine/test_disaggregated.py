"""The example with a store, two `vllm serve` and the proxy: what a user of the documents does first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_a_prompt_is_computed_by_one_engine_and_answered_by_another_through_the_proxy() -> None:
    command = [sys.executable, str(ROOT / "examples" / "disaggregated.py"), "--json", "--prompt-tokens", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    result = json.loads(done.stdout)
    assert result["decision"] == "split" and result["token_ids_equal"] and result["hand_overs"] == 5
    assert 0 < result["phases_s"]["prefill"] < result["seconds"]
    assert result["first_token_s"] < result["seconds"]
