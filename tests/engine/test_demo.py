"""`make demo`: two engines with a real model, a page of the documentation and a question about it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT, environment


@pytest.mark.timeout(910)
def test_a_restarted_engine_gives_the_same_readable_answer_sooner(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", "--json", "--prompt-tokens", "1500"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["model"] == "smollm2" and 1400 < result["prompt_tokens"] <= 1500
    assert result["token_ids_equal"] and result["remote_cache"]["cached_tokens"] >= 1400
    assert result["without_cache"]["cached_tokens"] < 64  # the first tokens of every chat are alike
    assert result["ratio"] > 2, result
    words = re.findall(r"[A-Za-z]{2,}", result["answer"])
    assert len(words) >= 8 and len(set(words)) >= 6, result["answer"]
    first = done.stderr.splitlines()[0]
    assert first.startswith("two engines, one after the other"), "it says at once what it does"
