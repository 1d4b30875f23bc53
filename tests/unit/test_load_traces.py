"""Traces in the formats of their publishers: their fields, blocks, units of time and files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvstore_serving.load.prompts import Prompts
from kvstore_serving.load.trace import TraceError, planned_of, read_trace
from kvstore_serving.planning.workload import Replayed

REQUESTS = 60


def bailian(block_tokens: int = 16, per_s: float = 6.0, unit: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """Return conversations as in Qwen-Bailian's traces: the prompt of a turn begins with the prompt of the turn before.
    unit: the number of time units in a second."""
    chooser = random.Random(1)
    rows: list[dict[str, Any]] = []
    at, fresh = 0.0, 0
    for number in range(REQUESTS):
        before = rows[chooser.randrange(number)] if number and number % 3 else None
        begin = [] if before is None else before["hash_ids"][: before["input_length"] // block_tokens]
        length = len(begin) * block_tokens + chooser.randint(1, 900)
        own = -(-length // block_tokens) - len(begin)
        rows.append(
            {
                "chat_id": number,
                "parent_chat_id": -1 if before is None else before["chat_id"],
                "timestamp": round(at * unit, 3),
                "input_length": length,
                "output_length": chooser.randint(1, 400),
                "type": "text",
                "turn": 1 if before is None else before["turn"] + 1,
                "hash_ids": [*begin, *range(fresh, fresh + own)],
                **more,
            }
        )
        at, fresh = at + chooser.expovariate(per_s), fresh + own
    return rows


def mooncake(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with only the fields that our code uses."""
    return [{name: row[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")} for row in rows]


def encoded(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_bytes(encoded(rows))
    return file


# ---- fields, blocks ----------------------------------------------------------------------------------------------


def test_bailian_traces_have_seconds_small_blocks_and_ignored_fields(tmp_path: Path) -> None:
    rows = bailian()
    trace = read_trace(written(tmp_path, rows))
    assert (trace.block_tokens, trace.time_unit, len(trace)) == (16, "s", REQUESTS)
    assert list(trace.ignored) == ["chat_id", "parent_chat_id", "type", "turn"]
    assert list(trace.at_s) == [row["timestamp"] for row in rows]
    assert list(trace.input_tokens) == [row["input_length"] for row in rows]


def test_prompts_share_exactly_the_blocks_of_the_trace(tmp_path: Path) -> None:
    prompts = Prompts(4096, seed=0)
    for size in (16, 64, 512):
        rows = bailian(size)
        planned = list(planned_of(read_trace(written(tmp_path, rows)), speed=1.0, warmup=0))
        made: list[list[int]] = [
            json.loads(b"".join(prompts.encoded(each.hash_ids, each.input_tokens, "completions", each.block_tokens)))
            for each in planned
        ]
        assert [len(tokens) for tokens in made] == [row["input_length"] for row in rows]
        for number in (1, 2, 4, 31, 59):
            parent = rows[number]["parent_chat_id"]
            if parent < 0:
                continue
            shared = rows[parent]["input_length"] // size * size
            assert made[number][:shared] == made[parent][:shared]
            assert made[number][shared : shared + 4] != made[parent][shared : shared + 4]


def test_clipping_cuts_at_the_traces_blocks(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, bailian()))
    for each in planned_of(trace, speed=1.0, warmup=0, max_input_tokens=100):
        assert len(each.hash_ids) == -(-each.input_tokens // 16) <= 7 and each.input_tokens <= 100


def test_a_block_size_is_detected_or_given_and_checked_against_lines(tmp_path: Path) -> None:
    file = written(tmp_path, bailian(128))
    assert read_trace(file).block_tokens == 128
    with pytest.raises(TraceError, match=r"line 1: .* expected \d+, one for each 512 tokens, as given"):
        read_trace(file, block_tokens=512)
    odd = written(tmp_path, bailian(100))
    with pytest.raises(TraceError, match=r"line \d+: .* give it with --block-tokens"):
        read_trace(odd)
    assert read_trace(odd, block_tokens=100).block_tokens == 100
    rows = bailian()
    rows[7]["hash_ids"].pop()
    with pytest.raises(TraceError, match=r"line 8: \d+ hash_ids for an input_length of \d+: expected \d+"):
        read_trace(written(tmp_path, rows))


def test_a_prompts_tail_without_a_hash_id_is_unique(tmp_path: Path) -> None:
    rows = mooncake(bailian())
    for row in rows:
        row["hash_ids"] = row["hash_ids"][: row["input_length"] // 16]
    trace = read_trace(written(tmp_path, rows), time_unit="s")
    assert trace.block_tokens == 16
    tails = [ids[-1] for ids, row in zip(trace.hash_ids, rows, strict=True) if row["input_length"] % 16]
    assert len(set(tails)) == len(tails) > 40, "nobody shares them"
    assert all(len(ids) == -(-row["input_length"] // 16) for ids, row in zip(trace.hash_ids, rows, strict=True))


def test_a_plans_store_counts_blocks_of_the_traces_size(tmp_path: Path) -> None:
    rows = bailian()
    file = written(tmp_path, rows)
    made = Replayed(str(file)).make(REQUESTS, 0)
    parents = [row["parent_chat_id"] for row in rows]
    shared = [0 if parent < 0 else rows[parent]["input_length"] // 16 * 16 for parent in parents]
    least = [min(found, row["input_length"] - 1) for found, row in zip(shared, rows, strict=True)]
    assert made.hits.tolist() == least
    assert made.kept_tokens == 16 * len({number for row in rows for number in row["hash_ids"]})


# ---- units of time -----------------------------------------------------------------------------------------------


def test_an_implausible_time_unit_is_refused_with_plausible_ones(tmp_path: Path) -> None:
    seconds = written(tmp_path, mooncake(bailian()))  # nothing in this file shows that it is not Mooncake's
    with pytest.raises(TraceError, match=r"in ms, the trace has \d+\.?\d*e?\+?\d* requests a second") as caught:
        read_trace(seconds)
    assert "requests a second with --time-unit s" in str(caught.value)
    assert "If ms is right, give --time-unit ms" in str(caught.value)
    assert read_trace(seconds, time_unit="s").time_unit == "s"
    named = read_trace(seconds, time_unit="ms")
    assert named.at_s[-1] < 0.1 and "timestamps in ms" in named.unusual, (
        "a unit that the user names is used, and reported"
    )
    assert not read_trace(seconds, time_unit="s").unusual
    thousandths = written(tmp_path, bailian(unit=1000.0))
    with pytest.raises(TraceError, match=r"in s, the trace has one request in \d+ s.* with --time-unit ms"):
        read_trace(thousandths)
    hourly = written(tmp_path, mooncake(bailian(per_s=1 / 3600, unit=1000.0)))
    with pytest.raises(TraceError, match=r"in ms, the trace has one request in [\d.e+]+ s.*, give --time-unit ms"):
        read_trace(hourly)
    for unit, many in (("us", 1e6), ("ns", 1e9)):
        file = written(tmp_path, mooncake(bailian(unit=many)))
        with pytest.raises(TraceError, match=f"with --time-unit {unit}"):
            read_trace(file)


@pytest.mark.parametrize("per_s", [0.1, 3.4, 24.0, 100.0])
def test_realistic_rates_are_not_refused(per_s: float, tmp_path: Path) -> None:
    read_trace(written(tmp_path, bailian(per_s=per_s)))
    read_trace(written(tmp_path, mooncake(bailian(per_s=per_s, unit=1000.0))))


def test_a_few_requests_are_too_few_to_judge_the_unit(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    for at_ms in ([0, 60_000], [0, 60_000, 120_000], [0, 1], [0, 2, 3], [0, 0, 0]):
        assert len(read_trace(written(tmp_path, [row | {"timestamp": at} for at in at_ms]))) == len(at_ms)
    with pytest.raises(TraceError, match="timestamps in ms"):
        read_trace(written(tmp_path, [row | {"timestamp": at} for at in (0.0, 0.5, 1.1, 1.9, 2.2)]))
    with pytest.raises(TraceError, match="timestamps in ms"):
        read_trace(written(tmp_path, [row | {"timestamp": at * 3_600_000} for at in range(4)]))


# ---- files -------------------------------------------------------------------------------------------------------


def skipped(data: bytes) -> bytes:
    """Compress the data in pzstd's form: each frame follows a skippable frame."""
    half = len(data) // 2
    packed = [zstandard.compress(part) for part in (data[:half], data[half:])]
    return b"".join(b"\x50\x2a\x4d\x18\x04\x00\x00\x00" + len(each).to_bytes(4, "little") + each for each in packed)


@pytest.mark.parametrize(
    "pack",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n\r\n"),
        lambda data: data[:-1],
        gzip.compress,
        lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]) + b"\0" * 512,
        lambda data: gzip.compress(b"\xef\xbb\xbf" + data),
        zstandard.compress,
        lambda data: zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(data),
        skipped,
    ],
    ids=["mark", "empty lines", "no last end", "gzip", "members", "mark in gzip", "zstd", "no size", "zstd frames"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst"])
def test_a_file_is_read_under_any_name(name: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    plain = read_trace(written(tmp_path, bailian()))
    file = tmp_path / name
    file.write_bytes(pack(encoded(bailian())))
    assert read_trace(file) == plain


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (zstandard.compress(encoded(bailian()))[:-20], "it is cut off"),
        (gzip.compress(encoded(bailian()))[:-9], "it is cut off"),
        (zstandard.compress(encoded(bailian())) + b"x" * 900, "cannot be decompressed .zstd: "),
        (gzip.compress(encoded(bailian()))[:60] + b"x" * 900, "cannot be decompressed .gzip: "),
        (lzma.compress(encoded(bailian())), "compressed with xz: decompress it; expected JSON lines"),
        (bz2.compress(encoded(bailian())), "compressed with bzip2: decompress it"),
        (encoded(bailian()).decode().encode("utf-16"), "text in UTF-16: convert it to UTF-8"),
        (b"PAR1\x15\x04", "a Parquet file: convert it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:41\nsize 9\n", "git lfs pull"),
        (json.dumps(bailian()).encode(), "a JSON array: make one line of each object"),
        (b"timestamp,input_length\n0,5\n", "line 1: .*; expected a JSON object with timestamp, input_length"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": 5}\n', "line 1: .*hash_ids"),
        (b"\xff\xfd\n", "line 1: "),
        (b"", "the trace has no requests"),
        (zstandard.compress(b"\n\n"), "the trace has no requests"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_a_remedy(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(data)
    with pytest.raises(TraceError, match=rf"trace\.jsonl[:,] .*{why}"):
        read_trace(file)


def test_a_folder_is_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_a_zstd_file_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.jsonl.zst"
    file.write_bytes(zstandard.compress(encoded(bailian())))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match=r'but zstandard is not installed: pip install "llm-kvstore\[serving\]"'):
        read_trace(file)
