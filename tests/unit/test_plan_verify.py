"""`kvstore plan verify` sends the requests that are simulated and that the plan was made for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore_serving.load.report import widest_interval, wilson
from kvstore_serving.planning.verify import planned_load, workload_of
from kvstore_serving.planning.workload import Lengths, Replayed, Synthetic


def test_a_synthetic_load_has_the_recipes_lengths_gaps_and_hits() -> None:
    recipe = Synthetic(Lengths(2000, 0.5), Lengths(50, 0.5), arrival_cv=2.0, hit_rate=0.5)
    planned = planned_load(recipe, 4.0, 3000, 1000, seed=3)
    assert len(planned) == 4000 and [each.counted for each in planned].index(True) == 1000
    gaps = np.diff([each.at_s for each in planned])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1) and gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)
    for each in planned:
        assert len(each.hash_ids) == -(-each.input_tokens // 512), "one for each piece of 512 tokens"
    own = [number for each in planned for number in each.hash_ids if number >= max(len(p.hash_ids) for p in planned)]
    assert len(set(own)) == len(own), "what is not to be found is in no other prompt"
    made = workload_of(planned, recipe)
    assert made.inputs.tolist() == [each.input_tokens for each in planned]
    late = slice(1000, None)
    assert made.hits[late].sum() / made.inputs[late].sum() == pytest.approx(0.5, abs=0.03)
    assert (made.hits < made.inputs).all()
    other = planned_load(recipe, 8.0, 3000, 1000, seed=3)
    assert [each.at_s for each in other] == pytest.approx([each.at_s / 2 for each in planned])


def test_prompts_without_hits_share_nothing() -> None:
    recipe = Synthetic(Lengths(1500), Lengths(5))
    planned = planned_load(recipe, 1.0, 20, 0, seed=0)
    assert not workload_of(planned, recipe).hits.any()
    ids = [number for each in planned for number in each.hash_ids]
    assert len(set(ids)) == len(ids) == 60


def test_a_trace_is_sent_at_the_rate_and_hits_as_planned(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 1024, "output_length": 5, "hash_ids": [number % 2, 10 + number]}
        for number in range(12)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Replayed(str(file))
    planned = planned_load(recipe, 2.0, None, 2, seed=0)
    assert [each.at_s for each in planned] == pytest.approx([number / 2 for number in range(12)])
    assert sum(each.counted for each in planned) == 10
    assert workload_of(planned, recipe).hits.tolist() == [0, 0] + [512] * 10
    small = Replayed(str(file), kept_tokens=512)
    assert not workload_of(planned, small).hits.any(), "what the other prompts brought has pushed it out"
    assert not workload_of(planned, Replayed(str(file), hits=False)).hits.any()
    assert len(planned_load(Replayed(str(file), limit=6), 2.0, None, 2, seed=0)) == 6
    assert len(planned_load(recipe, 2.0, 5, 2, seed=0)) == 7


def test_the_interval_of_correlated_requests_is_wider() -> None:
    alternating = [number % 2 == 0 for number in range(100)]
    assert widest_interval(alternating) == pytest.approx(wilson(50, 100)), "nothing says that they are not independent"
    blocks = [number < 50 for number in range(100)]
    low, high = widest_interval(blocks) or (0.0, 0.0)
    assert low < wilson(50, 100)[0] and high > wilson(50, 100)[1]  # type: ignore[index]
    assert widest_interval([]) is None
