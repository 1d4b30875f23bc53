"""What `kvstore load` sends: arrival times, traces, prompts, bodies; and how it reads streams."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_serving.load.arrivals import poisson, seed_of, synthetic
from kvstore_serving.load.client import BadBody, RequestBodies, error_message
from kvstore_serving.load.prompts import HASHED_TOKENS, WORDS, Prompts
from kvstore_serving.load.trace import TraceError, replay
from kvstore_serving.sse import EventError, EventReader

LINE: dict[str, Any] = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


def trace_file(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def prompt(prompts: Prompts, hash_ids: list[int], count: int) -> list[int]:
    tokens: list[int] = json.loads(b"".join(prompts.encoded(hash_ids, count, "completions")))
    return tokens


# ---- arrivals ----------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_a_poisson_processs_rate_and_spread() -> None:
    gaps = np.diff(poisson(20.0, 20_001, seed=1))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.03)
    # The numbers of arrivals in windows of one second have a variance equal to their mean.
    counts = np.bincount(np.cumsum(gaps).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


def test_sweeps_with_different_seeds_have_different_run_seeds() -> None:
    seeds = [seed_of(seed, number) for seed in range(20) for number in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert [seed_of(seed, 0) for seed in range(3)] == [0, 1, 2]


def test_arrivals_start_at_zero_and_depend_only_on_the_seed() -> None:
    assert poisson(5.0, 50, seed=3) == poisson(5.0, 50, seed=3)
    assert poisson(5.0, 50, seed=3) != poisson(5.0, 50, seed=4)
    assert poisson(5.0, 50, seed=3)[0] == 0.0
    assert poisson(5.0, 0, seed=3) == []
    # Another rate scales the same arrival times, so the runs of a sweep differ only in their rate.
    assert poisson(10.0, 9, seed=3) == pytest.approx([at / 2 for at in poisson(5.0, 9, seed=3)])


def test_synthetic_requests_share_nothing_and_warm_up_is_extra() -> None:
    planned = list(synthetic(5.0, requests=3, warmup=2, input_tokens=1025, output_tokens=7, seed=0))
    assert [each.counted for each in planned] == [False, False, True, True, True]
    assert [len(each.hash_ids) for each in planned] == [3] * 5
    assert len({hash_id for each in planned for hash_id in each.hash_ids}) == 15


# ---- traces ------------------------------------------------------------------------------------------------------


def test_a_trace_keeps_its_times_lengths_and_prefixes(tmp_path: Path) -> None:
    later = {"timestamp": 4500, "input_length": 1024, "output_length": 9, "hash_ids": [1, 3]}
    file = trace_file(tmp_path, LINE | {"timestamp": 500}, "", later)
    first, second = replay(file, speed=2.0, requests=None, warmup=0)
    assert (first.at_s, second.at_s) == (0.0, 2.0)
    assert (first.input_tokens, second.input_tokens, second.output_tokens) == (700, 1024, 9)
    prompts = Prompts(4096, seed=0)
    one, two = (prompt(prompts, list(each.hash_ids), each.input_tokens) for each in (first, second))
    assert (len(one), len(two)) == (700, 1024)
    assert one[:HASHED_TOKENS] == two[:HASHED_TOKENS] and one[HASHED_TOKENS] != two[HASHED_TOKENS]


def test_a_compressed_trace_reads_like_the_plain_one(tmp_path: Path) -> None:
    file = trace_file(tmp_path, LINE, LINE)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    options: dict[str, Any] = {"speed": 1.0, "requests": None, "warmup": 0}
    assert list(replay(packed, **options)) == list(replay(file, **options))
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz"):
        list(replay(packed, **options))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "malformed|truncated"),
        (LINE | {"input_length": 0}, "input_length"),
        (LINE | {"timestamp": -1}, "timestamp"),
        (LINE | {"output_length": "5"}, "output_length"),
        (LINE | {"hash_ids": [1]}, r"1 hash_ids for an input_length of 700: expected 2"),
        (LINE | {"hash_ids": [1, 2, 3]}, r"3 hash_ids for an input_length of 700: expected 2"),
        (LINE | {"hash_ids": [1, -2]}, "hash_ids"),
        (LINE | {"hash_ids": [1, 1 << 63]}, "hash_ids"),
        ({name: value for name, value in LINE.items() if name != "output_length"}, "output_length"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(tmp_path: Path, line: dict[str, Any] | str, why: str) -> None:
    file = trace_file(tmp_path, LINE, "", line)
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 3: .*({why})"):
        list(replay(file, speed=1.0, requests=None, warmup=0))
    # Lines that are not needed are not read.
    assert len(list(replay(file, speed=1.0, requests=1, warmup=0))) == 1


def test_a_trace_out_of_order_is_an_error(tmp_path: Path) -> None:
    file = trace_file(tmp_path, LINE | {"timestamp": 2000}, LINE | {"timestamp": 1000})
    with pytest.raises(TraceError, match=r"line 2: timestamp 1000 is earlier than .* 2000: sort"):
        list(replay(file, speed=1.0, requests=None, warmup=0))


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        list(replay(tmp_path / "none.jsonl", speed=1.0, requests=None, warmup=0))


def test_clipping_keeps_the_beginning_and_is_marked(tmp_path: Path) -> None:
    file = trace_file(tmp_path, LINE, LINE | {"input_length": 100, "hash_ids": [1]})
    options: dict[str, Any] = {"speed": 1.0, "requests": None, "warmup": 0}
    clipped, short = replay(file, max_input_tokens=512, max_output_tokens=5, **options)
    assert (clipped.input_tokens, list(clipped.hash_ids), clipped.clipped) == (512, [1], True)
    assert (short.input_tokens, short.clipped) == (100, False)
    clipped, short = replay(file, max_output_tokens=4, **options)
    assert (clipped.output_tokens, clipped.input_tokens, clipped.clipped, short.clipped) == (4, 700, True, True)


def test_the_number_of_requests_limits_a_trace(tmp_path: Path) -> None:
    file = trace_file(tmp_path, *[LINE] * 9)
    planned = list(replay(file, speed=1.0, requests=4, warmup=2))
    assert [each.counted for each in planned] == [False] * 2 + [True] * 4


# ---- prompts -----------------------------------------------------------------------------------------------------


def test_hash_ids_always_stand_for_the_same_distinct_tokens() -> None:
    prompts, again, reseeded = Prompts(4096, seed=1), Prompts(4096, seed=1), Prompts(4096, seed=2)
    ids = [0, 1, 2, 511, 512, 182_789, 1 << 40]
    blocks = {hash_id: prompts.tokens(hash_id) for hash_id in ids}
    assert all(again.tokens(hash_id) == block for hash_id, block in blocks.items())
    assert len({tuple(block) for block in blocks.values()}) == len(ids)
    assert all(reseeded.tokens(hash_id) != block for hash_id, block in blocks.items())
    assert all(len(block) == HASHED_TOKENS for block in blocks.values())


@pytest.mark.parametrize("vocabulary", [16, 1024, 150_000])
def test_tokens_come_from_the_vocabulary_without_special_ones(vocabulary: int) -> None:
    tokens = [token for hash_id in range(20) for token in Prompts(vocabulary, seed=0).tokens(hash_id)]
    assert min(100, vocabulary // 4) <= min(tokens) and max(tokens) < vocabulary
    assert len(set(tokens)) > vocabulary // 20


def test_a_too_small_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"15 tokens is too small: expected .* at least 16"):
        Prompts(15, seed=0)


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1500])
def test_prompts_have_their_exact_length_and_share_prefixes(count: int) -> None:
    prompts = Prompts(1024, seed=0)
    ids = list(range(-(-count // HASHED_TOKENS)))
    tokens = prompt(prompts, ids, count)
    assert len(tokens) == count
    assert tokens == prompt(prompts, [0, 1, 2], 1536)[:count]


def test_a_chat_prompt_has_a_word_for_each_token() -> None:
    said = json.loads(b"".join(Prompts(1024, seed=0).encoded([7, 8], 700, "chat")))
    words = said.split()
    assert len(words) == 700 and set(words) <= set(WORDS) and len(set(WORDS)) == len(WORDS)


# ---- bodies ------------------------------------------------------------------------------------------------------


def test_bodies_have_the_apis_form() -> None:
    before, after = RequestBodies("m", "completions", extra='{"top_k": 1, "temperature": 0.5}').around(9)
    assert json.loads(before + b"[1,2]" + after) == {
        "prompt": [1, 2],
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 1,
    }
    before, after = RequestBodies("m", "chat", extensions=False).around(9)
    body = json.loads(before + b'"a b"' + after)
    assert body["messages"] == [{"role": "user", "content": "a b"}]
    assert "ignore_eos" not in body and "prompt" not in body


@pytest.mark.parametrize("extra", ["[1]", "{", '{"stream": false}', '{"prompt": "x", "max_tokens": 1}'])
def test_extra_fields_must_be_an_object_without_measured_fields(extra: str) -> None:
    with pytest.raises(BadBody, match=r"expected a JSON object|cannot be replaced"):
        RequestBodies("m", "completions", extra=extra)


def test_outputs_need_their_whole_length_only_if_end_of_text_is_ignored() -> None:
    assert RequestBodies("m", "completions").whole_output
    assert not RequestBodies("m", "completions", extensions=False).whole_output
    assert not RequestBodies("m", "completions", extra='{"ignore_eos": false}').whole_output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "busy"}', "busy"),
        (b"<html>\n  Bad Gateway</html>", "<html> Bad Gateway</html>"),
        (b'{"detail": [{"loc": ["a"]}]}', '[{"loc":["a"]}]'),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_the_message_of_a_refusal_is_found(body: bytes, message: str) -> None:
    assert error_message(body) == message


# ---- streams -----------------------------------------------------------------------------------------------------

MAX_EVENT_BYTES = 1 << 20
STREAM = (
    b": a comment\r\n\r\n"
    b'data: {"a": 1}\n\n'
    b'event: token\r\nid: 4\r\ndata:{"text": "\xc3\xa4\\n"}\r\n\r\n'
    b"data: first\ndata: second\n\n"
    b"\n\n"
    b"data: [DONE]\n\n"
    b"data: not ended\n"
)
EVENTS = [b": a comment", b'{"a": 1}', b'{"text": "\xc3\xa4\\n"}', b"first\nsecond", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_stream_is_split(cuts: list[int]) -> None:
    parser = EventReader(MAX_EVENT_BYTES)
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in pairwise(places)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_events_are_returned_as_soon_as_they_end() -> None:
    parser = EventReader(MAX_EVENT_BYTES)
    given_after = [len(parser.feed(bytes([byte]))) for byte in STREAM]
    assert [at for at, count in enumerate(given_after) if count] == [
        STREAM.index(end) + len(end) - 1
        for end in (b"comment\r\n", b"1}\n\n", b'\\n"}\r\n\r\n', b"second\n\n", b"[DONE]\n\n")
    ]


@pytest.mark.parametrize("endless", [b"x" * 65536, b"data: " + b"x" * 65536 + b"\n"])
def test_an_endless_event_does_not_fill_memory(endless: bytes) -> None:
    parser = EventReader(MAX_EVENT_BYTES)
    with pytest.raises(EventError, match=str(MAX_EVENT_BYTES)):
        for _ in range(MAX_EVENT_BYTES // 65536 + 1):
            parser.feed(endless)
