"""The example with a store, two `vllm serve` and the proxy: what a user of the documents does first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.examples import run_example


@pytest.mark.timeout(400)
def test_a_prompt_is_computed_by_one_engine_and_answered_by_another_through_the_proxy(tmp_path: Path) -> None:
    result = run_example("disaggregated.py", "--json", "--prompt-tokens", "1000", folder=tmp_path)
    assert result["decision"] == "split" and result["token_ids_equal"] and result["hand_overs"] == 5
    assert 0 < result["phases_s"]["prefill"] < result["seconds"]
    assert result["first_token_s"] < result["seconds"]
