"""The rates between two samples of a shard, the times of its requests, and the problems that are reported."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from kvstore import wire
from kvstore.node.diagnosis import _SLOW_STAGE, Seen, findings
from kvstore.node.metrics import process_use
from kvstore.node.rates import change, counts_of, hit_rate, quantile_s, table_of, total
from kvstore.shard.timing import Timing
from kvstore.shard.turns import STAGES
from kvstore.wire import DiskInfo, RequestTimes, ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S, TenantInfo
from kvstore_cli.top_state import TopRow, sorted_rows
from tests.support.info import zeros


def shard(**known: Any) -> ShardInfo:
    return zeros(ShardInfo, **known)


def disk(**known: Any) -> DiskInfo:
    return zeros(DiskInfo, **{"state": "on", **known})


def tenant(name: str, memory_bytes: int, limit: int = -1) -> TenantInfo:
    return zeros(TenantInfo, tenant=name, memory_bytes=memory_bytes, memory_limit_bytes=limit)


# ---- the times of requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("took_s", "bucket"), [(0.0, 0), (31e-6, 0), (33e-6, 1), (100e-6, 2), (1e-3, 5), (100.0, 20)])
def test_a_request_counts_in_the_bucket_below_its_bound(
    took_s: float, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + took_s)
    timing = Timing()
    timing.add(wire.Get, 1000.0)
    (row,) = timing.rows()
    assert (row.verb, row.tier) == ("get", "memory")
    assert [at for at, count in enumerate(row.counts) if count] == [bucket]
    assert row.seconds == pytest.approx(took_s, abs=2e-6)
    assert took_s < [*REQUEST_BOUNDS_S, float("inf")][bucket]


def test_every_verb_has_a_row_and_tiers_are_separate() -> None:
    timing = Timing()
    timed = [verb for verb in wire.VERBS.values() if verb.timed]
    for verb in timed:
        timing.add(verb.request, time.monotonic())
    timing.add(wire.Get, time.monotonic(), disk=True)
    rows = [(row.verb, row.tier) for row in timing.rows()]
    assert rows == [*((verb.name, "memory") for verb in timed), ("get", "disk")]


def test_a_quantile_lies_within_its_bucket() -> None:
    counts = [0] * (len(REQUEST_BOUNDS_S) + 1)
    assert quantile_s(counts, 0.5) is None
    counts[3] = 100  # 128 to 256 us
    assert quantile_s(counts, 0.5) == pytest.approx(192e-6)
    counts[-1] = 100
    assert quantile_s(counts, 0.99) == REQUEST_BOUNDS_S[-1]  # the highest known bound


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_a_change_is_the_difference_of_two_counts() -> None:
    before = shard(
        hits=5, misses=1, bytes_in=100, slow_turns={"disk": 1}, requests=[RequestTimes("get", "disk", 1, [4])]
    )
    after = shard(
        hits=9,
        misses=1,
        bytes_in=300,
        slow_turns={"disk": 1, "replies": 2},
        requests=[RequestTimes("get", "disk", 2, [7])],
    )
    changed = change(table_of(before), table_of(after))
    assert changed == {
        ("hits",): 4,
        ("bytes_in",): 200,
        ("slow_turns", "replies"): 2,
        ("took", "get", "disk", "0"): 3,
    }
    assert total([changed, changed])["hits",] == 8
    assert counts_of(changed, "get", "disk")[0] == 3
    assert hit_rate(changed["hits",], 0) == 1.0 and hit_rate(0, 0) is None


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "recent", "said"),
    [
        (shard(), {}, []),
        ("no answer within 2 s", {}, ["bad: No shard answers", "bad: A does not answer: no answer within 2 s."]),
        (
            shard(),
            {("evicted",): 7},
            ["note: Memory is full: the least useful blocks are evicted, 7 in the last minute."],
        ),
        (
            shard(
                room_bytes=100, segment_bytes=10, tenants=[tenant("a", 95, 100), tenant("b", 90, 100), tenant("c", 5)]
            ),
            {("evicted",): 7},
            [
                "note: Memory has room, but blocks are evicted, 7 in the last minute. Tenants at their memory quota, "
                "which evict their own blocks: a."
            ],
        ),
        (
            shard(room_bytes=0, segment_bytes=10, tenants=[tenant("a", 95, 100)]),
            {("evicted",): 7},
            ["note: Memory is full: the least useful blocks are evicted, 7 in the last minute. See --memory. Tenants"],
        ),
        (
            shard(disk=disk()),
            {("evicted",): 7, ("disk", "evicted"): 3},
            [
                "note: The disk is full: the oldest blocks are evicted, 3",
                "note: Memory is full: blocks are evicted from it, 7",
            ],
        ),
        (shard(disk=disk(state="off", reason="no space left")), {}, ["bad: A: its disk tier is off: no space left."]),
        (
            shard(disk=disk(state="out of space", reason="no space left")),
            {},
            ["warning: A: its disk tier is out of space: no space left."],
        ),
        (shard(disk=disk(state="recovering")), {}, ["note: A reads the index of its disk."]),
        (shard(disk=disk(behind=True)), {}, ["warning: A: the disk is slower than the sets."]),
        (
            shard(disk=disk()),
            {("disk", "corrupt_blocks"): 2},
            ["bad: A found damaged blocks on its disk, and dropped them: 2"],
        ),
        (
            shard(refused={"jobs": 9}),
            {("refused", "jobs"): 2},
            ["warning: A refused requests at its limit jobs: 2 in the"],
        ),
        (
            shard(),
            {("slow_turns", "disk"): 1, ("slow_turns", "replies"): 13},
            [
                "warning: A kept clients waiting for over 50 ms: 14 times in the last minute, mostly in: replies. "
                "It sends blocks to clients; the processor is probably busy with other work."
            ],
        ),
        (
            shard(),
            {("slow_requests", "disk"): 3, ("slow_requests", "replies"): 1},
            ["note: Slow requests: 4 in the last minute, mostly in: disk. `kvstore slowlog` shows the last ones."],
        ),
        (shard(), {("slow_turns", "disk"): 1}, ["note: A kept clients waiting for over 50 ms: once"]),
        (
            shard(transient_bytes=95, transient_limit_bytes=100),
            {},
            ["warning: A: the memory of transient blocks is full."],
        ),
        (shard(), {("misses",): 500}, ["warning: None of the 500 blocks requested in the last minute was found."]),
        (shard(draining=True), {}, ["note: The server is stopping"]),
    ],
)
def test_only_existing_problems_are_reported(
    state: ShardInfo | str, recent: dict[tuple[str, ...], int], said: list[str]
) -> None:
    found = [f"{message.severity}: {message.text}" for message in findings([Seen("A", state, recent)])]
    assert len(found) == len(said)
    for text, beginning in zip(found, said, strict=True):
        assert text.startswith(beginning)


def test_the_worst_problem_comes_first() -> None:
    seen = [
        Seen("A", shard(disk=disk(warming=True)), {("evicted",): 1}),
        Seen("B", shard(), {}, restarted_s=12.4),
        Seen("C", "Connection refused", {}),
    ]
    found = findings(seen)
    assert [message.severity for message in found] == ["bad", "warning", "note", "note"]
    assert "B died and was restarted 12 s ago" in found[1].text


# ---- processes, and `kvstore top` ------------------------------------------------------------------------------------


def test_a_living_process_is_measured_and_a_dead_one_is_not() -> None:
    use = process_use(os.getpid())
    assert use is not None and use.cpu_s > 0 and 0 < use.open_fds <= use.max_fds
    assert process_use(2**30) is None


def test_rows_without_a_number_come_last() -> None:
    rows = [
        zeros(TopRow, name=name, hit_rate=rate, get_p99_s=None) for name, rate in (("a", None), ("b", 0.5), ("c", 0.9))
    ]
    assert [row.name for row in sorted_rows(rows, "hit_rate", False)] == ["c", "b", "a"]
    assert [row.name for row in sorted_rows(rows, "hit_rate", True)] == ["b", "c", "a"]
    assert [row.name for row in sorted_rows(rows, "name", True)] == ["c", "b", "a"]


def test_each_stage_of_a_slow_turn_has_an_explanation() -> None:
    assert set(_SLOW_STAGE) == set(STAGES)
