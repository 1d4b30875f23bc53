"""`kvstore size`: its results, compared with numbers calculated by hand, and its errors for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore_cli.main import run
from kvstore_cli.sizing import KNOWN_SHAPES, PAYLOAD, FleetSize, Network, SizeError, Sizing, find_shape
from kvstore_cli.sizing import size as compute
from kvstore_serving.planning.model_config import KVShape
from tests.support.harness import ROOT
from tests.unit.test_sizing import ROWS

GIB = 1 << 30
MIB = 1 << 20


def size(model: str, **fleet: Any) -> Sizing:
    name, shape = find_shape(model)
    return compute(name, shape, FleetSize(**fleet))


def test_llama_8b_on_one_server() -> None:
    found = size("Llama-3.1-8B", context=8192, users=200)
    assert found.token_bytes == 2 * 32 * 8 * 128 * 2 == 131_072
    assert found.block_bytes == found.part_bytes == 16 * 131_072 == 2 * MIB
    assert found.context_blocks == 8192 // 16 == 512 and found.context_bytes == GIB
    assert found.blocks == 200 * 512 == 102_400 and found.blocks_bytes == 200 * GIB
    # 16 blocks of 2 MiB fill a segment of 32 MiB, and there are no other shards: nothing is lost.
    assert found.memory_bytes == 200 * GIB and found.command == "kvstore-server --memory 200GiB"
    assert found.resident_bytes == 200 * GIB + 256 * MIB and found.limit_bytes == 201 * GIB + 256 * MIB
    assert found.network.link is None and found.network.read_bytes_per_s is None


def test_qwen_32b_on_four_servers_with_two_copies() -> None:
    found = size(
        "Qwen/Qwen2.5-32B-Instruct",
        **{"context": 16_384, "users": 500, "shared_tokens": 2048, "nodes": 4, "replicas": 2, "shards": 2, "tp": 4},
        **{"turns_per_hour": 12.0, "new_tokens": 400, "ttft_s": 0.5},
    )
    assert found.token_bytes == 2 * 64 * 8 * 128 * 2 == 262_144
    assert (found.parts, found.part_bytes, found.block_bytes) == (4, MIB, 4 * MIB)
    assert found.context_blocks == 1024 and found.context_bytes == 4 * GIB
    assert found.blocks == 128 + 500 * (1024 - 128) == 448_128
    assert found.blocks_bytes == 448_128 * 4 * MIB
    # 448 128 blocks x 2 copies / (4 servers x 2 shards) = 112 032 for each shard; 4 x the square root of that is
    # 1338.8, which gives 113 371 blocks. A segment has 32 parts of 1 MiB, so each of the 4 ranks needs 3543 segments.
    segments = 4 * 3543
    # Their index is 4 x 3543 x 32 slots x 185 bytes = 83.9 MB, less than the 96 MiB that cost nothing.
    assert segments * 32 * 185 < 96 * MIB
    assert 2 * segments * 32 * MIB / GIB == 885.75 and found.memory_bytes == 886 * GIB
    assert found.command == "kvstore-server --memory 886GiB --shards 2"
    assert found.resident_bytes == 886 * GIB + 2 * 256 * MIB
    # 500 users x 12 turns per hour = 5/3 turns per second.
    network = found.network
    assert network.read_bytes_per_s == pytest.approx(5 / 3 * 4 * GIB)  # 7.16 GB/s
    assert network.write_bytes_per_s == pytest.approx(5 / 3 * 400 * 262_144 * 2)  # 0.35 GB/s
    assert network.context_bytes_per_s == pytest.approx(8 * GIB)  # 8.59 GB/s = 68.7 Gb/s: more than 25
    assert network.link is not None and network.link.gbits == 100
    assert network.link.context_s == pytest.approx(4 * GIB / (12.5e9 * 1448 / 1538))
    assert network.link.read_share == pytest.approx(7.158278e9 / 4 / (12.5e9 * PAYLOAD), rel=1e-6)


def test_mla_is_stored_once_for_any_number_of_ranks() -> None:
    one, eight = (size("deepseek-ai/DeepSeek-V3", context=1024, users=10, tp=tp) for tp in (1, 8))
    assert one == eight and one.token_bytes == 61 * 576 * 2 == 70_272 and one.parts == 1
    # A context has 64 blocks of 1 124 352 bytes, and a segment has room for 29 (976 832 bytes are lost): 640 blocks, 23
    # segments.
    assert one.blocks == 640 and one.memory_bytes == 23 * 32 * MIB


def test_ranks_with_the_same_heads_share_a_part() -> None:
    found = size("Qwen2.5-7B", context=1024, users=1, tp=8)
    assert found.parts == 4 and found.part_bytes * 4 == found.block_bytes == 16 * 57_344


def test_only_full_blocks_count() -> None:
    found = compute("m", KVShape(1, 1, 128), FleetSize(context=47, users=3, shared_tokens=31))
    assert found.context_blocks == 2 and found.blocks == 1 + 3 * 1


def test_the_index_of_small_blocks_takes_part_of_the_memory() -> None:
    found = compute("m", KVShape(1, 1, 128), FleetSize(context=1 << 20, users=32))  # blocks of 8 KiB, 4096 to a segment
    segments = 32 * 65_536 // 4096
    index = segments * 4096 * (33 + 152) - (96 << 20)
    assert segments * 32 * MIB == 16 * GIB and index > 0
    assert found.memory_bytes == -(-(16 * GIB + index) // GIB) * GIB == 17 * GIB


def test_a_block_larger_than_any_segment_gets_a_larger_segment() -> None:
    found = size("Llama-3.1-405B", context=8192, users=10, block_tokens=128)
    assert found.part_bytes == 63 * MIB and found.segment_bytes == 64 * MIB
    assert found.command == "kvstore-server --memory 40GiB --segment 64MiB"  # 640 blocks, one to a segment


@pytest.mark.parametrize(
    ("turns", "ttft_s", "gbits"),
    [(None, 1.0, 10), (None, 0.5, 25), (None, 0.1, 100), (None, 0.05, None), (1.0, None, 10), (40.0, None, 25)],
)
def test_the_slowest_sufficient_link_is_named(turns: float | None, ttft_s: float | None, gbits: int | None) -> None:
    """A context has 1.07 GB. 200 users that return once an hour read 0.06 GB/s on average; 40 times as often, they read
    2.4 GB/s."""
    turns = turns and turns / 2
    found = size("Llama-3.1-8B", context=8192, users=200, turns_per_hour=turns, ttft_s=ttft_s).network
    assert (found.link and found.link.gbits) == gbits


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen3-32B-FP8", "Qwen3-32B"),
    ],
)
def test_a_model_name_may_have_an_owner_and_a_variant(given: str, known: str) -> None:
    assert find_shape(given) == (known, KNOWN_SHAPES[known])


@pytest.mark.parametrize("given", ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "phi-4-mini-instruct", "Llama-3.1-80B"])
def test_a_model_of_another_shape_is_not_mistaken_for_a_known_one(given: str) -> None:
    with pytest.raises(SizeError, match="expected a model") as caught:
        find_shape(given)
    assert all(name in str(caught.value) for name in KNOWN_SHAPES)


def test_the_shapes_match_the_manual() -> None:
    seen = 0
    for row in ROWS:
        name = row["model"].partition(" ")[0].removesuffix("-v0.3")
        shape = KNOWN_SHAPES[name]
        assert (shape.layers, shape.kv_heads, shape.head_size) == (
            int(row["layers"]),
            int(row["heads"]),
            int(row["size"]),
        )
        assert shape.once == bool(row["once"])
        seen += 1
    assert seen >= 10


def test_a_config_or_its_folder_provides_the_shape(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert find_shape(str(path)) == (str(path), KVShape(24, 8, 64))
    with pytest.raises(SizeError, match="No such file"):
        find_shape(str(tmp_path / "other.json"))


# ---- the command -------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert run(["size", *arguments]) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


def test_it_prints_text_for_people_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("--model", "Llama-3.1-8B", "--context", "8192", "--users", "200", "--ttft", "0.5", "--turns-per-hour", "6")
    shown = printed(capsys, *ask)
    assert "128.0 KiB" in shown and "200.0 GiB" in shown and "\n  kvstore-server --memory 200GiB\n" in shown
    assert "One link of 25 Gb/s a host suffices" in shown
    found = json.loads(printed(capsys, *ask, "--json"))
    assert found["command"] == "kvstore-server --memory 200GiB" and found["network"]["link"]["gbits"] == 25
    assert found == json.loads(json.dumps(found)) and set(found) == set(Sizing.__struct_fields__)
    halved = json.loads(printed(capsys, *ask, "--json", "--dtype", "fp8"))
    assert halved["token_bytes"] * 2 == found["token_bytes"] and halved["memory_bytes"] == 100 * GIB
    slow = printed(capsys, *ask[:-4], "--ttft", "0.01")
    assert "100 Gb/s a host are not enough" in slow and "--ttft" in slow


def test_the_manual_shows_real_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    (found,) = re.finditer(r"```shell\nkvstore size (.+)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    shown = printed(capsys, *found[1].split())
    assert [line.rstrip() for line in shown.splitlines()] == found[2].splitlines()


def test_the_manual_lists_every_field_of_the_json() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    table = text[text.index("| field |") :]
    names = {*Sizing.__struct_fields__, *(f"network.{name}" for name in Network.__struct_fields__)} - {"network"}
    listed = set(re.findall(r"`([\w.]+)`", "\n".join(line.split("|")[1] for line in table.splitlines())))
    assert names <= listed, names - listed
    assert {"network.link.gbits"} <= listed
    assert {f".{name}" for name in ("context_s", "read_share", "write_share")} <= listed


LLAMA = ("--model", "Llama-3.1-8B")
LOAD = ("--context", "8192", "--users", "200")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (LLAMA, "--context and --users not given; for example"),
        ((*LLAMA, "--context", "8"), "--users not given"),
        (LOAD, "--layers, --kv-heads, --head-size not given; expected --model NAME"),
        ((*LOAD, "--layers", "3", "--head-size", "64"), "--kv-heads not given"),
        ((*LLAMA, *LOAD, "--layers", "3"), "--model and --layers were given: expected either"),
        (("--model", "GPT-9", *LOAD), "--model 'GPT-9': expected a model's config.json"),
        ((*LLAMA, *LOAD, "--dtype", "float3"), "--dtype 'float3': expected one of float64, "),
        ((*LLAMA, "--users", "3", "--context", "15"), "--context 15: expected at least one block of 16 tokens"),
        ((*LLAMA, *LOAD, "--shared-tokens", "8193"), "--shared-tokens 8193: expected at most --context 8192"),
        ((*LLAMA, *LOAD, "--replicas", "2"), "--replicas 2: expected at most --nodes 1"),
        (
            (*LLAMA, *LOAD, "--tp", "3"),
            "--tp 3: expected a divisor or a multiple of 8, the number of the model's KV heads",
        ),
        ((*LLAMA, *LOAD, "--new-tokens", "9"), "--new-tokens 9: expected --turns-per-hour, too"),
        ((*LLAMA, *LOAD, "--block-tokens", "8192"), "--block-tokens 8192: a block would have"),
        ((*LLAMA, *LOAD, "--turns-per-hour", "nan"), "--turns-per-hour nan: expected a number"),
        ((*LLAMA, *LOAD, "--ttft", "inf"), "--ttft inf: expected a number of seconds above 0"),
        ((*LLAMA, *LOAD, "--ttft", "0"), "--ttft"),
        ((*LLAMA, "--context", "8192", "--users", "9" * 18), "expected less than 1 EiB"),
    ],
)
def test_wrong_input_is_named_with_the_expected_form(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in printed(capsys, *arguments, status=2)
