"""The proxy's answers from two engines equal the answers of one engine, header by header and event by event.

P computes the prompt and D the answer; the blocks pass through the store. docs/reference/proxy.md lists the permitted
differences. A stream may be divided into other events around the change from P to D, so streams with different events
are compared by their joined content. The cache counts in the usage may differ; for a new prompt they say that nothing
was cached.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, Fleet, ask, some
from tests.engine.served import post
from tests.engine.test_transparent import SAMPLING as SAMPLING_OF_ONE
from tests.engine.test_transparent import TOOL, Case, comparable
from tests.engine.test_transparent import ask as reply_to

STREAMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "with all usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
BYTES = list(range(256))  # tokens of single bytes: most characters need several of them, and some bytes are no text
COMMON = (
    *("two answers", "a seed", "stop", "stop and shown", "at least", "penalties", "token ids", "ignore the end"),
    *("json schema", "too hot", "too many"),
)
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "two tokens": {"max_tokens": 2},
    "bytes": {"allowed_token_ids": BYTES, "max_tokens": 24},
    "bytes, a seed": {"allowed_token_ids": BYTES, "max_tokens": 24, "temperature": 1.0, "seed": 3},
    **{name: SAMPLING_OF_ONE[name] for name in COMMON},
}
OF_COMPLETIONS: dict[str, dict[str, Any]] = {f"logprobs {number}": {"logprobs": number} for number in range(6)}
OF_CHATS: dict[str, dict[str, Any]] = {
    **{f"top logprobs {number}": {"logprobs": True, "top_logprobs": number} for number in (0, 5)},
    "a tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "tools": {"tools": [TOOL], "tool_choice": "none"},
}
# Cases with a stop at the first token, which comes from P.
FIRST = ("stop at it", "stop in it", "stop in it and shown", "stop at it later")
WITH_USAGE = ("plain", "stop", "two answers", "logprobs 0", "stop at it")
# Requests that one engine serves alone, with the reason; docs/disaggregation.md describes them.
ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "one token": ({"max_tokens": 1}, "one token"),
    "echo": ({"echo": True}, "needs the prompt's logits"),
    "prompt logprobs": ({"prompt_logprobs": 1}, "needs the prompt's logits"),
}


def cases(fleet: Fleet) -> Iterator[tuple[Case, str]]:
    """Yield the cases, each with the reason why the request is not split, or an empty text if it is split."""
    number = 5000
    common = SAMPLING | {name: {} for name in FIRST} | {name: body for name, (body, _) in ALONE.items()}
    for path, own in ((COMPLETIONS, OF_COMPLETIONS), (CHAT, OF_CHATS)):
        for (name, more), (how, stream) in itertools.product({**common, **own}.items(), STREAMS.items()):
            if how.startswith("with") and name not in WITH_USAGE:
                continue
            if how == "whole" and path == CHAT and name not in own and name != "plain":
                continue  # the code is the same as for completions
            number += 1
            body = ask(path, number, **{"max_tokens": 12, "temperature": 0, **more, **stream})
            if name in FIRST:
                body |= of_first_token(fleet, path, body, name)
            why = ALONE[name][1] if name in ALONE else ""
            yield Case(f"{path} {name}, {how}", path, body, headers={"x-request-id": f"split-{number}"}), why


def of_first_token(fleet: Fleet, path: str, body: dict[str, Any], name: str) -> dict[str, Any]:
    question = {key: value for key, value in body.items() if not key.startswith("stream")}
    question |= {"max_tokens": 1, "return_token_ids": True, "cache_salt": "so that nobody has the prompt"}
    _, answer = post(fleet.d.url, path, question)
    [choice] = answer["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return {
        "stop at it": {"stop_token_ids": choice["token_ids"]},
        "stop in it": {"stop": text[1:]},
        "stop in it and shown": {"stop": text[1:], "include_stop_str_in_output": True},
        "stop at it later": {"stop_token_ids": choice["token_ids"], "min_tokens": 3},
    }[name]


def without_caches(value: Any) -> Any:
    """Return the answer without the cache counts in its usage."""
    if isinstance(value, dict):
        return {key: without_caches(each) for key, each in value.items() if key != "prompt_tokens_details"}
    return [without_caches(each) for each in value] if isinstance(value, list | tuple) else value


def joined(events: Any) -> Any:
    """Return the content of a stream, however it was divided into events: texts and lists are concatenated, and of all
    other fields the last value is kept."""

    def add(said: Any, more: Any) -> Any:
        if isinstance(said, dict) and isinstance(more, dict):
            return {key: add(said.get(key), more.get(key)) for key in (*said, *more)}
        if isinstance(said, str | list) and type(said) is type(more):
            return said + more
        return said if more is None else more

    if not isinstance(events, list):
        return events
    answers: dict[int, Any] = {}
    rest: dict[str, Any] = {}
    for event in events:
        for line in event:
            if isinstance(line, list | tuple) and isinstance(line[1], dict):
                for choice in line[1].get("choices", ()):
                    answers[choice["index"]] = add(answers.get(choice["index"]), {**choice, "index": 0})
                rest |= {key: value for key, value in line[1].items() if key != "choices" and value is not None}
    return answers, rest


def differs(through: Any, right: Any) -> str:
    """Return how two answers differ: "" if they are equal, "cut" if only the division into events differs, which is
    permitted, or "said"."""
    if through == right:
        return ""
    return "cut" if through[:2] == right[:2] and joined(through[2]) == joined(right[2]) else "said"


@pytest.mark.timeout(400)
def test_split_answers_equal_one_engines(fleet: Fleet) -> None:
    different, cut, decisions = {}, [], Counter[str]()
    for case, why in some(cases(fleet)):
        raw = reply_to(fleet.proxy.url, case)
        through = without_caches(comparable(raw))
        right = without_caches(comparable(reply_to(fleet.d.url, case)))
        how = differs(through, right)
        if how == "said":
            different[case.name] = through, right
        elif how:
            cut.append(case.name)
        record = fleet.proxy.record(case.headers["x-request-id"])
        decisions[record["decision"]] += 1
        if b'"cached_tokens"' in raw.body and record["prefill_outcome"] == "ok":
            assert b'"cached_tokens":0' in raw.body or b'"cached_tokens":null' in raw.body, case.name
        if not (why and raw.status != 200):
            assert (record["decision"], record["why"]) == (("colocate", why) if why else ("split", "policy split")), (
                case
            )
    print(f"{decisions.total()} requests, {json.dumps(decisions)}; {len(cut)} were cut elsewhere: {', '.join(cut)}")
    told = "\n".join(f"{name}\n  proxy  {through}\n  engine {right}" for name, (through, right) in different.items())
    assert not different, f"{len(different)} differ:\n{told}"
