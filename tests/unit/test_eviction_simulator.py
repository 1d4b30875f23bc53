"""The eviction simulator: the files that it reads, what it counts, and that its policies act as in their papers."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eviction import __main__ as program
from benchmarks.eviction.baselines import Arc, Optimum, S3Fifo, Sieve
from benchmarks.eviction.simulator import POLICIES, Cache, ServerCache, replay
from benchmarks.eviction.synthetic import SYNTHETIC, make_trace
from benchmarks.eviction.tables import EVICTION_TABLES
from benchmarks.eviction.traces import Trace, read_trace
from benchmarks.results_reader import read_results
from kvstore_serving.load.trace import TraceError

GOOD = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]}
TEXTBOOK: dict[str, Callable[[Trace, int], Cache]] = {
    "S3-FIFO": lambda trace, capacity: S3Fifo(capacity),
    "ARC": lambda trace, capacity: Arc(capacity),
    "SIEVE": lambda trace, capacity: Sieve(capacity),
    "optimum": Optimum,
}


def hits(name: str, requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the number of hits of each request."""
    trace = Trace.of("by hand", requests)
    if name in TEXTBOOK:
        cache = TEXTBOOK[name](trace, capacity)
        return [cache.request(chain) for chain in trace.chains]
    with ServerCache(name, trace.keys, capacity) as server:
        return [server.request(chain) for chain in trace.chains]


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_a_trace_is_read_plain_or_compressed(compress: bool, tmp_path: Path) -> None:
    lines = [GOOD, GOOD | {"timestamp": 3000.5, "hash_ids": [7, 11]}]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / ("trace.gz" if compress else "trace")
    path.write_bytes(gzip.compress(data) if compress else data)
    trace = read_trace(path)
    assert [chain.tolist() for chain in trace.chains] == [[0, 1], [0, 2]]
    assert (trace.references, trace.distinct, trace.name) == (4, 3, path.name)
    assert trace.times_s == [0.0, 3.0005]
    assert len({key.tobytes() for key in trace.keys}) == 3
    assert [chain.tolist() for chain in trace.first(1).chains] == [[0, 1]]
    assert trace.first(1).distinct == 2


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n", gzip.compress(b""), gzip.compress(b"\n" * 50)[:-9], b"\x1f\x8b no"],
    ids=["empty", "blank lines", "empty, packed", "cut off", "not packed"],
)
def test_an_empty_or_truncated_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz"):
        read_trace(path)


# ---- policies, by hand -------------------------------------------------------------------------------------------


def test_lru_keeps_recent_blocks_and_the_heads_of_chains() -> None:
    # oldest first: 2 1 | 2 1 3 | 3 2 1 | 2 1 4 (3 evicted) | 1 4 5 (2 evicted) | 4 5 1, then 2 replaces 4
    assert hits("lru", [[1, 2], [3], [1, 2], [4], [5], [1, 2]], 3) == [0, 0, 2, 0, 0, 1]


def test_s3fifo_demotes_blocks_used_once_and_remembers_them() -> None:
    # 1 is used twice more, so it moves to the main queue when 5 needs room. 2 and 3 are evicted, and return as ghosts.
    requests = [1, 1, 1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2, 3]
    assert hits("S3-FIFO", [[block] for block in requests], 4) == [0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1]


def test_arc_moves_its_target_with_its_ghosts() -> None:
    # 3 evicts 2, and not 1, which was used twice. 2 returns as a ghost and evicts 1. 1 returns and evicts 2.
    requests = [1, 1, 2, 3, 1, 2, 3, 1, 3]
    assert hits("ARC", [[block] for block in requests], 2) == [0, 1, 0, 0, 1, 0, 1, 0, 1]


def test_sieve_spares_blocks_used_since_its_hand_passed() -> None:
    # 3 evicts 2, because 1 is marked. 4 evicts 3, because 1 is marked again. Then the hand is back at 1.
    requests = [1, 2, 1, 3, 1, 4, 3, 1, 3]
    assert hits("SIEVE", [[block] for block in requests], 2) == [0, 0, 1, 0, 1, 0, 0, 0, 1]


def test_the_optimum_evicts_blocks_not_needed_soon_and_keeps_heads() -> None:
    assert hits("optimum", [[1, 2], [3], [1, 2], [3], [1, 2]], 2) == [0, 0, 2, 0, 2]
    assert hits("optimum", [[1, 2], [1, 2], [1, 2]], 1) == [0, 1, 1]


def test_a_hit_counts_only_when_all_earlier_blocks_hit() -> None:
    # When [1, 2] is requested, 2 is cached but 1 is not. A request that begins with 1 cannot use 2.
    for name in (*POLICIES, *TEXTBOOK):
        assert hits(name, [[2], [1, 2], [1, 2]], 5) == [0, 0, 2]


def random_tree_requests(seed: int) -> list[list[int]]:
    """Return chains that begin at the root of a small random tree."""
    chance = random.Random(seed)
    chains: list[list[int]] = [[]]
    for block in range(1, 8):
        chains.append([*chance.choice(chains), block])
    return [chance.choice(chains[1:]) for _ in range(7)]


def best_by_trying_everything(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Return the most hits that are possible, by trying all choices of kept blocks after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for resident, count in states.items():
            run = next((i for i, block in enumerate(request) if block not in resident), len(request))
            everything = resident | set(request)
            for size in range(min(capacity, len(everything)) + 1):
                for kept in map(frozenset, combinations(everything, size)):
                    after[kept] = max(after.get(kept, 0), count + run)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(20))
def test_nothing_beats_the_optimum(seed: int) -> None:
    requests = random_tree_requests(seed)
    capacity = 1 + seed % 4
    best = best_by_trying_everything(requests, capacity)
    assert sum(hits("optimum", requests, capacity)) == best
    for name in (*POLICIES, *TEXTBOOK):
        assert sum(hits(name, requests, capacity)) <= best


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_holds_as_many_blocks_as_stated(policy: str) -> None:
    trace = make_trace("agents-and-conversations").first(300)
    with ServerCache(policy, trace.keys, 97, segments=3) as server:
        replay(trace, server)
        assert server.blocks == 3 * 97


def test_a_server_holds_more_blocks_than_fit_one_segment() -> None:
    trace = make_trace("new-only")
    with ServerCache.of("lru", trace.keys, 70_000) as server:
        replay(trace, server)
        assert server.blocks == 70_000
    with pytest.raises(ValueError, match="expected at most 65536"):
        ServerCache("lru", trace.keys, 70_000)


@pytest.mark.parametrize("name", [*POLICIES, *TEXTBOOK])
def test_with_room_for_everything_only_first_references_miss(name: str) -> None:
    trace = make_trace("conversations").first(200)
    total = sum(hits(name, [chain.tolist() for chain in trace.chains], trace.distinct))
    assert total == trace.references - trace.distinct


@pytest.mark.parametrize("name", [*POLICIES, *TEXTBOOK])
def test_a_replay_gives_the_same_hit_rate_each_time(name: str) -> None:
    requests = [chain.tolist() for chain in make_trace("documents").first(1500).chains]
    references = sum(map(len, requests))
    first, second = (sum(hits(name, requests, 1000)) for _ in range(2))
    # The server's policies remember blocks by hashes with a random key, so their hit rates vary a little.
    assert abs(first - second) <= (0.01 * references if name in POLICIES and name != "lru" else 0)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_synthetic_trace_is_repeatable_and_a_prefix_tree(name: str) -> None:
    trace, again = make_trace(name), make_trace(name)
    lengths = [len(chain) for chain in trace.chains]
    assert lengths == [len(chain) for chain in again.chains] and all(lengths)
    blocks = np.concatenate(trace.chains)
    assert np.array_equal(blocks, np.concatenate(again.chains)) and np.array_equal(trace.keys, again.keys)
    parents = np.roll(blocks, 1)
    parents[np.cumsum([0, *lengths[:-1]])] = trace.distinct  # offsets of heads
    pairs = np.unique(blocks.astype(np.int64) << 32 | parents)
    assert len(pairs) == len(np.unique(blocks)) == trace.distinct, "a block has one parent, everywhere"


def test_the_head_of_a_chain_longer_than_the_cache_is_kept() -> None:
    for policy in POLICIES:
        assert hits(policy, [range(20), range(20)], 8)[1] == 8


# ---- the program -------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks.eviction", *arguments])
    return program.main()


def test_its_results_make_the_tables_and_charts_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(GOOD | {"hash_ids": [n % 5, 10 + n % 7]}) + "\n" for n in range(50)))
    arguments = ("--trace", str(path), "--synthetic", "documents", "--requests", "100", "--capacities", "10,50")
    assert run(monkeypatch, *arguments, "--json", str(tmp_path / "eviction.json")) == 0
    assert "trace.jsonl: 50 requests, 100 references to 12 blocks" in capsys.readouterr().out.replace("\n", " ")
    results = read_results(tmp_path)
    first, second = results["eviction"].group("trace")
    assert (first.name, first.parameters["requests"], first.parameters["distinct"]) == ("trace.jsonl", 50, 12)
    assert second.name == "documents"
    assert first.parameters["blocks"] == [1, 6]
    for make in EVICTION_TABLES.values():
        assert make(results)
    assert "| 10 % | 1 |" in EVICTION_TABLES["eviction"](results)

    pytest.importorskip("matplotlib")
    from benchmarks.eviction.charts import EVICTION_CHARTS

    for name, draw in EVICTION_CHARTS.items():
        draw(results, tmp_path / f"{name}.svg")
        assert "optimum" in (tmp_path / f"{name}.svg").read_text()


def test_mistakes_end_with_an_error_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 2
    assert "--trace FILE" in capsys.readouterr().err
    assert run(monkeypatch, "--trace", str(tmp_path / "none.jsonl")) == 1
    assert "none.jsonl" in capsys.readouterr().err
    for wrong in (("--capacities", "0"), ("--capacities", "a"), ("--requests", "0")):
        with pytest.raises(SystemExit) as exit_:
            run(monkeypatch, "--synthetic", "scan", *wrong)
        assert exit_.value.code == 2
