"""Every form in which OpenAI-compatible engines answer: which chunks have tokens, when they arrived, and what is a
failure.

The streams have the forms of vLLM, SGLang, OpenAI and others. The tests set the time at which each event arrives.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvstore_serving.load.answer import AnswerReader
from kvstore_serving.load.records import Planned, RequestOutcome
from kvstore_serving.load.report import Slo, attains
from kvstore_serving.sse import EventError

Event = dict[str, Any] | str
ROLE: Event = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def chat(finish: str | None = None, /, index: int = 0, **delta: Any) -> Event:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def text(said: str, finish: str | None = None, index: int = 0) -> Event:
    return {"choices": [{"index": index, "text": said, "finish_reason": finish}]}


def call(**function: str) -> list[dict[str, Any]]:
    return [{"index": 0, "function": function}]


def usage(tokens: int) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}


def read(*events: Event, asked: int, answers: int = 1, whole_output: bool = True, done: bool = True) -> RequestOutcome:
    """Return the outcome of a stream whose events arrive after 1, 2, 3, … s."""
    outcome = RequestOutcome(Planned(0, 0.0, [0], 9, asked), answers=answers)
    answer = AnswerReader(outcome)
    for at_s, event in enumerate(events, start=1):
        sent = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
        answer.add(sent.encode(), float(at_s))
    if done:
        answer.add(b"data: [DONE]\n\n", len(events) + 1.0)
    answer.end(whole_output)
    outcome.ended_s = len(events) + 1.0
    return outcome


@pytest.mark.parametrize(
    ("events", "came_s"),
    [
        ([text("a"), text("b"), text("c", "length"), usage(3)], [1, 2, 3]),
        ([text("a"), text(""), text("", "length"), usage(3)], [1, 2, 3]),  # an engine without a tokenizer
        ([text("a"), text("b"), text("", "stop"), usage(2)], [1, 2]),
        ([text("", "length"), usage(1)], [1]),
        ([ROLE, chat(content="a"), chat("length", content="b"), usage(2)], [2, 3]),
        ([ROLE, chat(content="a"), chat(content="b"), chat("stop"), usage(2)], [2, 3]),  # OpenAI, SGLang
        ([ROLE, chat("length", content="a"), usage(1)], [2]),
        ([ROLE, chat("length", content=""), usage(1)], [2]),  # in vLLM, one token without a text
        ([ROLE, chat(content=""), chat(content="é"), chat("length", content=""), usage(3)], [2, 3, 4]),
        ([ROLE, chat(content=""), chat(content="é"), chat("length", content=""), usage(2)], [2, 3]),
        ([chat(content=""), chat(content="a"), chat(content="b"), usage(2)], [2, 3]),
        ([ROLE, chat(reasoning="a"), chat(reasoning="b"), chat("length", content="c"), usage(3)], [2, 3, 4]),
        ([ROLE, chat(reasoning_content="a", content=None), chat("length", content="b"), usage(2)], [2, 3]),
        ([ROLE, chat(refusal="no"), chat("stop"), usage(1)], [2]),
        ([chat(role="assistant", content="a"), chat(role="assistant", content="b"), usage(2)], [1, 2]),  # TGI, Ollama
        ([chat(content=[{"type": "thinking"}]), chat("length", content="b"), usage(2)], [1, 2]),  # Mistral
        ([ROLE, {"choices": [{"delta": {}, "token_ids": [5]}]}, chat("length", content="a"), usage(2)], [2, 3]),
        ([ROLE, {"choices": [{"delta": {"content": ""}, "token_ids": []}]}, chat(content="a"), usage(1)], [3]),
        ([": keep-alive\n\n", ROLE, ": keep-alive\n\n", "data:\n\n", chat("length", content="a"), usage(1)], [5]),
        ([{"choices": [], "prompt_filter_results": []}, ROLE, chat("length", content="a"), usage(1)], [3]),  # Azure
        ([text("a"), text("b", "length")], [1, 2]),  # no usage
        ([ROLE, chat(content="a"), chat(content=""), chat("stop")], [2, 3]),
        ([ROLE, usage(1)], [2]),  # the token has no visible text
        ([text("abc"), text("def", "length"), usage(9)], [1, 2]),  # several tokens in a chunk
    ],
)  # fmt: skip
def test_chunks_with_tokens_are_found(events: list[Event], came_s: list[float]) -> None:
    outcome = read(*events, asked=1)
    assert outcome.arrivals_s == came_s and not outcome.error, outcome
    counted = next((event["usage"]["completion_tokens"] for event in events if "usage" in event), len(came_s))  # type: ignore[index]
    assert outcome.tokens == counted


def test_tool_calls_count_as_tokens_and_may_end_an_answer() -> None:
    parts = [
        chat(role="assistant", tool_calls=call(name="look", arguments="")),
        chat(tool_calls=call(arguments='{"a"')),
        chat(tool_calls=call(arguments=": 1}")),
        chat("tool_calls"),
    ]
    outcome = read(*parts, usage(9), asked=50)
    assert (outcome.error, outcome.tokens) == ("", 9)
    assert outcome.arrivals_s == [1, 2, 3, 4], "the last token has no text"
    assert outcome.tpot_s == pytest.approx(3 / 8)
    named = read(ROLE, chat(function_call={"name": "look"}), chat("stop"), usage(2), asked=50)
    assert (named.error, named.arrivals_s) == ("", [2, 3])


def test_tokens_held_back_by_a_parser_start_at_the_role_chunk() -> None:
    of_vllm = {**ROLE, "prompt_token_ids": None}
    held = read(of_vllm, chat("length"), usage(9), asked=9)
    assert (held.arrivals_s, held.tpot_s, held.error) == ([1, 2], pytest.approx(1 / 8), "")
    called = read(of_vllm, chat(tool_calls=call(name="look")), chat("tool_calls"), usage(9), asked=9)
    assert called.arrivals_s == [1, 2, 3]
    for asked in (2, 9):  # tokens of a text are not delayed, but a chunk may have several
        spoken = read(of_vllm, chat(content="a"), chat("length", content="b"), usage(asked), asked=asked)
        assert spoken.arrivals_s == [2, 3]
    assert read(ROLE, chat("length"), usage(9), asked=9).arrivals_s == [2], "others may send it before they compute"


def test_several_answers_to_a_prompt_have_separate_gaps() -> None:
    events = [text("a", index=1), text("b"), text("c", index=1), text("d"), text("e", "length", 1), text("f", "length")]
    outcome = read(*events, usage(6), asked=3, answers=2)
    assert (outcome.error, outcome.tokens, outcome.asked_tokens) == ("", 6, 6)
    assert outcome.ttft_s == 1.0 and sorted(outcome.itl_s) == [2.0] * 4
    assert outcome.tpot_s == 2.0
    assert read(*events, usage(5), asked=3, answers=2).error == "fewer_tokens"
    assert read(*events[:-1], asked=3, answers=2, done=False).error == "cut", "one of two has ended"


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"text": "a b c", "finish_reason": "length"}, 3),
        ({"message": {"role": "assistant", "content": "a b c"}, "finish_reason": "length"}, 3),
        ({"message": {"role": "assistant", "content": None, "tool_calls": call(name="f")}, "finish_reason": "stop"}, 3),
        ({"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}, 1),
    ],
)
def test_an_answer_in_one_piece_has_one_time(choice: dict[str, Any], tokens: int) -> None:
    body = json.dumps({"choices": [{"index": 0, **choice}], "usage": {"completion_tokens": tokens, "prompt_tokens": 9}})
    outcome = read(body[:20], body[20:], asked=tokens, done=False)
    assert (outcome.error, outcome.tokens, outcome.whole, outcome.prompt_tokens) == ("", tokens, True, 9)
    assert outcome.ttft_s == 2.0, "when its last bytes came"
    assert outcome.tpot_s is None and outcome.itl_s == [], "no token's time is known but the last one's"


@pytest.mark.parametrize("last", [[chat("stop"), usage(0)], [chat("stop")], [usage(0)], [chat("stop", content="")]])
def test_an_answer_that_stops_at_once_is_complete_unless_tokens_were_required(last: list[Event]) -> None:
    outcome = read(ROLE, *last, asked=5, whole_output=False)
    assert not outcome.error
    assert attains(outcome, Slo(9.0, 1.0)) == (True, True) and attains(outcome, Slo(1.0, 1.0)) == (False, True)
    if not outcome.tokens:
        assert read(ROLE, *last, asked=5).error == "fewer_tokens"


def test_a_finish_reason_completes_an_answer_without_done() -> None:
    assert not read(ROLE, chat(content="a"), chat("stop"), asked=5, whole_output=False, done=False).error
    assert read(ROLE, chat(content="a"), asked=5, whole_output=False, done=False).error == "cut"
    assert not read(text("a"), text("b"), asked=2, done=False).error, "all that was asked for is there"


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([ROLE, {"error": {"message": "out of blocks", "code": 500}}], "server", "out of blocks"),
        ([text("a"), {"error": "out of blocks"}], "server", "out of blocks"),
        ([text("a"), {"object": "error", "message": "out of blocks", "code": 500}], "server", "out of blocks"),
        ([text("a"), text("", "abort"), usage(5)], "server", "finish_reason 'abort'"),
        (['{"error": {"message": "no such model"}}'], "server", "no such model"),
        (['{"object": "error", "message": "no such model"}'], "server", "no such model"),
        ([ROLE, usage(0)], "fewer_tokens", "the answer has no token; 5 were requested"),
        ([], "fewer_tokens", "the answer has no token; 5 were requested"),
        ([text("a"), text("b", "stop"), usage(2)], "fewer_tokens", "after 2 of 5 tokens"),
        ([text("a"), text("b", "length"), usage(2)], "fewer_tokens", "after 2 of 5 tokens"),
    ],
)
def test_kinds_of_failure_are_distinguished(events: list[Event], kind: str, message: str) -> None:
    outcome = read(*events, asked=5, done=not events or not str(events[0]).startswith('{"'))
    assert outcome.error == kind and message in outcome.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>Bad gateway</html>", "neither events nor a JSON object: <html>Bad gateway"),
        ('{"detail": "moved"}', "a JSON object without choices: moved"),
        ('{"choices": [', "truncated"),
        ("data: 5\n\n", "Expected `object`"),
        ('data: {"choices": 5}\n\n', "choices"),
    ],
)
def test_an_invalid_answer_is_malformed(body: str, message: str) -> None:
    with pytest.raises((EventError, msgspec.DecodeError), match=message):
        read(body, asked=5, done=False)


def test_the_tokens_of_a_broken_answer_are_kept() -> None:
    outcome = RequestOutcome(Planned(0, 0.0, [0], 9, 5))
    answer = AnswerReader(outcome)
    answer.add(b'data: {"choices": [{"text": "a"}]}\n\n', 1.0)
    outcome.fail("timeout", "not complete")
    answer.settle()
    assert (outcome.tokens, outcome.arrivals_s, outcome.error) == (1, [1.0], "timeout")
