"""The example with a store, two `vllm serve` processes and the proxy, which readers of the documents run first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.examples import run_example


@pytest.mark.timeout(400)
def test_one_engine_prefills_and_another_answers_through_the_proxy(tmp_path: Path) -> None:
    result = run_example("disaggregated.py", "--json", "--model", "tiny", "--prompt-tokens", "1000", folder=tmp_path)
    assert result["decision"] == "split" and result["token_ids_equal"] and result["hand_overs"] == 5
    for answers in (result["alone"], result["apart"]):
        assert len(answers) == 3 and all(0 < each["first_token_s"] < each["seconds"] for each in answers)
        assert all(0 < each["longest_pause_s"] < each["seconds"] for each in answers)
    assert 0 < result["phases_s"]["prefill"] < max(each["seconds"] for each in result["apart"])
