"""The example with two `vllm serve` processes and one store, which readers of the documents run first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.examples import run_example


@pytest.mark.timeout(400)
def test_two_vllm_servers_continue_each_others_conversation_and_a_router_finds_it(tmp_path: Path) -> None:
    result = run_example("two_engines.py", "--json", "--prompt-tokens", "600", folder=tmp_path, cold=1)
    turns = result["turns"]
    assert turns[0]["cached_tokens"] == 0
    for before, turn in pairwise(turns):
        # The other engine saved the blocks of the previous turn, except perhaps the answer's last block.
        assert turn["cached_tokens"] >= before["prompt_tokens"] // 32 * 32
    # The router sends a conversation to the engine that has its blocks.
    routed = result["routed"]
    assert len({turn["engine"] for turn in routed}) == 1
    for before, turn in pairwise(routed):
        assert turn["cached_tokens"] >= turn["routed_tokens"] >= before["prompt_tokens"] // 32 * 32
    for metrics in result["metrics"].values():
        assert any(name.startswith("vllm:kvstore_hit_tokens_total") and 'tier="store"' in name for name in metrics)
        assert not any(name.startswith(("vllm:kvstore_failed", "vllm:kvstore_defects")) for name in metrics)
