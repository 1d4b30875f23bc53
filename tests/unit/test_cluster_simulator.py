"""The cluster simulator: the cost of changes, what it counts, and that it uses the server's own parts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster_sim import __main__ as program
from benchmarks.cluster_sim.balance import on_trace, placing_keys, shards, uniform
from benchmarks.cluster_sim.batch_latency import run_blocks
from benchmarks.cluster_sim.cluster import POLICY, Cluster
from benchmarks.cluster_sim.scenarios import (
    CRASH,
    CRASH_ZONE,
    JOIN,
    JOIN_AT_ONCE,
    JOIN_FILLED,
    JOIN_MANY_FILLED,
    LEAVE,
    LEAVE_AT_ONCE,
    RESTART_FILLED,
    SCENARIOS,
    Outcome,
    drop,
    replay,
)
from benchmarks.cluster_sim.tables import CLUSTER_TABLES
from benchmarks.eviction.simulator import ServerCache
from benchmarks.eviction.simulator import replay as replay_one
from benchmarks.eviction.synthetic import make_trace
from benchmarks.eviction.traces import Trace, read_trace
from benchmarks.results_reader import read_results

REQUESTS = 1200
SECONDS = 3600.0
ZONES = 3


@pytest.fixture(scope="module")
def trace() -> Trace:
    """An hour-long trace."""
    made = make_trace("conversations").first(REQUESTS)
    return replace(made, times_s=np.linspace(0.0, SECONDS, len(made.chains)).tolist())


def outcome_of(trace: Trace, name: str, nodes: int, replicas: int, room: int | None = None) -> Outcome:
    """`room`: blocks on each node; None if everything fits on each."""
    cluster = Cluster(trace.keys, nodes, ZONES, replicas, room or trace.distinct)
    return replay(trace, cluster, SCENARIOS[name].changes(SECONDS / 2, nodes, ZONES))


@pytest.mark.parametrize("nodes", [1, 5, 40])
@pytest.mark.parametrize("replicas", [1, 3])
def test_with_room_for_everything_only_first_references_miss(trace: Trace, nodes: int, replicas: int) -> None:
    found = replay(trace, Cluster(trace.keys, nodes, ZONES, replicas, trace.distinct), [])
    assert sum(found.references) == trace.references
    assert sum(found.hits) == trace.references - trace.distinct
    assert sum(found.reads) == sum(found.hits)
    assert found.repaired == found.copied == 0


def test_a_cluster_of_one_node_equals_a_server(trace: Trace) -> None:
    room = trace.distinct // 10
    found = replay(trace, Cluster(trace.keys, 1, 1, 1, room), [])
    with ServerCache(POLICY, trace.keys, room) as server:
        assert found.hit_rate == pytest.approx(replay_one(trace, server), abs=0.01)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        (JOIN_FILLED, 1),
        (JOIN_MANY_FILLED, 1),
        (LEAVE, 1),
        (RESTART_FILLED, 1),
        (JOIN, 2),
        (JOIN_AT_ONCE, 2),
        (LEAVE_AT_ONCE, 2),
        (CRASH, 2),
        (CRASH_ZONE, 2),
    ],
)
def test_copied_or_replicated_blocks_cost_no_hit(trace: Trace, name: str, replicas: int) -> None:
    found = outcome_of(trace, name, 6, replicas)
    assert sum(found.hits) == trace.references - trace.distinct


@pytest.mark.parametrize("name", [JOIN_AT_ONCE, LEAVE_AT_ONCE, CRASH, CRASH_ZONE])
def test_changes_without_notice_or_replicas_cost_hits(trace: Trace, name: str) -> None:
    assert sum(outcome_of(trace, name, 6, 1).hits) < trace.references - trace.distinct


def test_a_grace_period_costs_fewer_hits_than_none(trace: Trace) -> None:
    with_grace, without = (outcome_of(trace, name, 6, 1) for name in (JOIN, JOIN_AT_ONCE))
    assert sum(with_grace.hits) > sum(without.hits)
    assert with_grace.repaired > 0 == without.repaired


def test_a_join_moves_only_the_joining_nodes_share(trace: Trace) -> None:
    moved = outcome_of(trace, JOIN, 9, 1).moved
    assert moved == pytest.approx([0.1, 0.0], abs=0.015), "when it joins, and when its grace period ends"


def test_a_drop_is_the_worst_minute_compared_with_no_change() -> None:
    steady = Outcome(hits=[5] * 12, references=[10] * 12)
    changed = replace(steady, hits=[0, 5, 5, 5, 5, 5, 1, 5, 5, 5, 4, 9])
    lost = drop(changed, steady, at_s=60.0)
    assert lost.minute == pytest.approx(4 / 10)
    assert lost.five_minutes == pytest.approx(5 / 50)
    assert drop(steady, steady, 60.0) == (0.0, 0.0)


# ---- balance -----------------------------------------------------------------------------------------------------


def test_uniform_keys_are_even_and_a_join_moves_its_share() -> None:
    found = uniform(16, 200_000)
    assert 1.0 <= found.max_to_mean < 1.05
    assert found.moved_by_join == pytest.approx(found.fair, abs=0.003)


def test_a_run_goes_where_its_first_key_goes() -> None:
    chains = [[1, 2, 3, 4, 5], [1, 2, 9, 8, 7, 6]]
    trace = Trace.of("by hand", chains)
    for run in (1, 2, 4, 64):
        placing = placing_keys(trace, run)
        for chain in trace.chains:
            firsts = trace.keys[chain][np.arange(len(chain)) // run * run]
            assert (placing[chain] == firsts).all()


@pytest.mark.parametrize("parts", [1, 4])
def test_runs_ask_fewer_shards_and_are_less_even(trace: Trace, parts: int) -> None:
    found = [on_trace(trace, 16, run, parts) for run in (1, 4, 64)]
    assert [each.asked_mean for each in found] == sorted((each.asked_mean for each in found), reverse=True)
    assert found[0].keys < found[-1].keys
    assert all(1 <= each.asked_mean <= each.asked_p95 * 2 <= 32 for each in found)


def test_shards_asked_by_one_prompt_are_counted() -> None:
    trace = Trace.of("by hand", [range(300)])
    assert on_trace(trace, 4, 1, 1).asked_mean == 4
    assert on_trace(trace, 4, 300, 1).asked_mean == 1
    assert on_trace(trace, 4, 300, 1).hottest_share == 1.0
    assert len(shards(4)) == 4


@pytest.mark.parametrize("run", [1, 4, 64])
def test_keys_that_emulate_runs_are_placed_in_runs(run: int) -> None:
    keys = run_blocks(run).keys
    assert len({key.tobytes() for key in keys}) == len(keys)
    owners = shards(64).owners(keys).reshape(-1, run)
    assert (owners == owners[:, :1]).all()
    assert len(np.unique(owners)) >= min(len(owners), 64) // 2


# ---- the program ---------------------------------------------------------------------------------------------------


def write_trace(path: Path) -> Path:
    lines = (
        {"timestamp": n * 4000, "input_length": 1536, "output_length": 5, "hash_ids": [0, 10 + n % 7, 20 + n % 21]}
        for n in range(300)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks.cluster_sim", *arguments])
    return program.main()


def test_a_traces_timestamps_are_read(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"))
    assert list(trace.times_s[:3]) == [0.0, 4.0, 8.0]
    assert len(trace.first(5).times_s) == 5


def test_its_results_make_the_tables_and_charts_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "RUN_SHARDS", (4,))
    path = write_trace(tmp_path / "trace.jsonl")
    arguments = ("--trace", str(path), "--nodes", "3", "--quick", "--json", str(tmp_path / "cluster_sim.json"))
    assert run(monkeypatch, *arguments) == 0
    assert "Changes, and the points of hit rate that they cost" in capsys.readouterr().out
    results = read_results(tmp_path)
    scenarios = results["cluster_sim"].group("scenario")
    assert {case.parameters["scenario"] for case in scenarios} == set(SCENARIOS)
    for make in CLUSTER_TABLES.values():
        if make.needs in results:
            assert "| --" not in make(results)
            assert make(results).startswith("| ")

    pytest.importorskip("matplotlib")
    from benchmarks.cluster_sim.charts import CLUSTER_CHARTS

    for name, draw in CLUSTER_CHARTS.items():
        if draw.needs in results:
            draw(results, tmp_path / f"{name}.svg")
            assert "</svg>" in (tmp_path / f"{name}.svg").read_text()


def test_mistakes_end_with_an_error_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--trace", str(tmp_path / "none.jsonl")) == 1
    assert "none.jsonl" in capsys.readouterr().err
    path = str(write_trace(tmp_path / "trace.jsonl"))
    for wrong in (("--nodes", "0"), ("--nodes", "a"), ("--replicas", ""), ("--zones", "0"), ()):
        with pytest.raises(SystemExit) as exit_:
            run(monkeypatch, *(("--trace", path, *wrong) if wrong else ()))
        assert exit_.value.code == 2
