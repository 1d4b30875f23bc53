"""The proxy in front of a real vLLM server: its answers are the engine's own, header by header and event by event.

A generated matrix of requests is sent to the engine, and through a proxy that has it alone. These differences are
permitted; docs/reference/proxy.md lists them, too. The fields of `PER_ANSWER` differ between any two answers of an
engine. The headers of `OF_A_HOP` say how a body is transferred. A reply through the proxy always has an `x-request-id`.
If a stream of the engine begins with an error event, the proxy replies with that error and its status.
"""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, Fleet, some
from tests.engine.served import MODEL
from tests.support.proxies import ProxyProcess

PER_ANSWER = frozenset({"id", "created", "created_at", "completed_at", "request_id", "item_id", "response_id"})
OF_A_HOP = frozenset({"date", "content-length", "transfer-encoding", "connection", "keep-alive"})
ADDED = frozenset({"x-request-id"})
WORDS = "w301 w302 w303 w304"
JSON_SCHEMA = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Case(NamedTuple):
    name: str
    path: str
    body: Any = None  # bytes are sent unchanged, other values as JSON
    method: str = "POST"
    headers: dict[str, str] = {}  # noqa: RUF012 - of a tuple, and never changed


class Reply(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "no tokens": {"max_tokens": 0},
    "two answers": {"n": 2, "temperature": 0.9, "seed": 4},
    "a seed": {"temperature": 0.9, "seed": 7},
    "stop": {"stop": ["w1", "w2", "zzz"]},
    "stop and shown": {"stop": "w1", "include_stop_str_in_output": True},
    "at least": {"min_tokens": 8},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"400": 50}},
    "a zero": {"presence_penalty": 0, "n": 1, "min_tokens": 0, "seed": 0},
    "unknown fields": {"of_another_api": {"a": [1, None]}, "metadata": None},
    "token ids": {"return_token_ids": True},
    "ignore the end": {"ignore_eos": True, "skip_special_tokens": False},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}},
    "a choice": {"structured_outputs": {"choice": ["w1", "w2"]}},
    "user": {"user": "\u00fc\u4e16\U0001f600"},
    # These are refused.
    "too hot": {"temperature": 99},
    "hot as text": {"temperature": "hot"},
    "too many": {"max_tokens": 10_000_000},
    "fewer than none": {"max_tokens": -1},
    "another model": {"model": "no-such-model"},
    "a model of another type": {"model": 7},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "options of another type": {"stream_options": [1]},
    "top_p": {"top_p": 7},
    "stop of another type": {"stop": 3},
    "transfer of another type": {"kv_transfer_params": 3},
}
OF_COMPLETIONS: dict[str, dict[str, Any]] = {
    **{f"logprobs {number}": {"logprobs": number} for number in range(6)},
    "logprobs beyond all": {"logprobs": 1000},
    "prompt logprobs": {"prompt_logprobs": 0},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 1},
    "a text": {"prompt": WORDS},
    "unicode": {"prompt": "\u00e4\u4e16\u754c \U0001f600 \u202e\u0000"},
    "several prompts": {"prompt": [WORDS, "w5"]},
    "several of tokens": {"prompt": [[301, 302], [303]]},
    "suffix": {"suffix": "w9"},
    "an empty prompt": {"prompt": ""},
    "no prompt": {"prompt": None},
    "prompt of another type": {"prompt": {"a": 1}},
    "best of": {"best_of": 2},
    "a long prompt": {"prompt": [301] * 300},
    "beyond the model": {"prompt": [301] * 100_000},
}
OF_CHATS: dict[str, dict[str, Any]] = {
    **{f"top logprobs {number}": {"logprobs": True, "top_logprobs": number} for number in range(6)},
    "top logprobs alone": {"top_logprobs": 2},
    "unicode": {"messages": [{"role": "user", "content": "\u00e4\u4e16 \U0001f600"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}, IMAGE]}]},
    "turns": {"messages": [{"role": each, "content": WORDS} for each in ("system", "user", "assistant", "user")]},
    "goes on": {
        "messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "w7"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "echo": {"echo": True},
    "tools": {"tools": [TOOL], "tool_choice": "none"},
    "a tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "a tool by itself": {"tools": [TOOL], "tool_choice": "auto"},
    "no tools": {"tools": []},
    "reasoning": {"reasoning_effort": "low", "include_reasoning": False},
    "template": {"chat_template_kwargs": {"a": 1}},
    "no messages": {"messages": []},
    "messages of another type": {"messages": "hello"},
    "a strange role": {"messages": [{"role": "nobody", "content": "a"}]},
    "completion tokens": {"max_completion_tokens": 3},
}
STREAMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "streamed with all usage": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
TRIES = 10
WITH_USAGE = ("plain", "one token", "two answers", "stop", "logprobs 0", "top logprobs 0", "token ids", "too hot")
BASE = {"model": MODEL, "max_tokens": 12, "temperature": 0}
PLAIN_CHAT = {**BASE, "messages": [{"role": "user", "content": WORDS}]}
PLAIN = {**BASE, "prompt": [301, 302, 303, 304]}


def generated() -> Iterator[Case]:
    for path, plain, own in ((COMPLETIONS, PLAIN, OF_COMPLETIONS), (CHAT, PLAIN_CHAT, OF_CHATS)):
        for name, more in (*SAMPLING.items(), *own.items()):
            for how, stream in STREAMS.items():
                if "stream_options" in stream and name not in WITH_USAGE:
                    continue
                yield Case(f"{path} {name}, {how}", path, {**plain, **stream, **more})


def others() -> Iterator[Case]:
    text = {"model": MODEL, "prompt": WORDS}
    for path, bodies in {
        "/tokenize": [
            text,
            {"model": MODEL, "messages": PLAIN_CHAT["messages"]},
            {"prompt": 3},
            {**text, "model": "no"},
        ],
        "/detokenize": [{"model": MODEL, "tokens": [301, 302]}, {"model": MODEL, "tokens": "a"}],
        "/v1/responses": [
            {"model": MODEL, "input": WORDS, "max_output_tokens": 8, "temperature": 0},
            {"model": MODEL, "input": WORDS, "max_output_tokens": 8, "temperature": 0, "stream": True},
            {"model": MODEL},
            {"model": "no", "input": "a"},
        ],
        "/v1/messages": [{"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": PLAIN_CHAT["messages"]}, {}],
        "/v1/embeddings": [{"model": MODEL, "input": "a"}],
        "/pooling": [{"model": MODEL, "input": "a"}],
        "/classify": [{"model": MODEL, "input": "a"}],
        "/score": [{"model": MODEL, "text_1": "a", "text_2": "b"}],
        "/v1/score": [{}],
        "/rerank": [{"model": MODEL, "query": "a", "documents": ["b"]}],
        "/v1/rerank": [{}],
    }.items():
        for number, body in enumerate(bodies):
            yield Case(f"{path} {number}", path, body)
    for path in (COMPLETIONS, CHAT):
        plain = json.dumps(PLAIN if path == COMPLETIONS else PLAIN_CHAT).encode()
        for name, body in {
            "no JSON": b"{",
            "nothing": b"",
            "a list": b"[1]",
            "no UTF-8": b'{"model": "\xff"}',
            "a number beyond all": b'{"seed": 1e999}',
            "deep": b"[" * 2000,
            "twice": plain[:-1] + b', "max_tokens": 2}',
        }.items():
            yield Case(f"{path} {name}", path, body)
        yield Case(f"{path} as text", path, plain, headers={"Content-Type": "text/plain"})
        yield Case(f"{path} packed", path, gzip.compress(plain), headers={"Content-Encoding": "gzip"})
        yield Case(f"{path} of a browser", path, plain, headers={"Origin": "http://page"})
        yield Case(f"{path} of a load balancer", path, plain, headers={"X-Forwarded-For": "1.2.3.4", "Accept": "a/b"})
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            yield Case(f"{method} {path}", path, None, method)
        asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        yield Case(f"preflight {path}", path, None, "OPTIONS", asks)
        yield Case(
            f"preflight with headers {path}", path, None, "OPTIONS", {**asks, "Access-Control-Request-Headers": "a"}
        )
    yield Case("models", "/v1/models", None, "GET")
    yield Case("models of a browser", "/v1/models", None, "GET", {"Origin": "http://page"})
    yield Case("models by post", "/v1/models", {}, "POST")
    yield Case("version", "/version", None, "GET")
    yield Case("version by post", "/version", {}, "POST")
    yield Case("tokenize by get", "/tokenize", None, "GET")
    yield Case("a response that is not there", "/v1/responses/resp_1", None, "GET")


def ask(url: str, case: Case) -> Reply:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    body = case.body if case.body is None or isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"Content-Type": "application/json", **case.headers} if body is not None else case.headers
    try:
        connection.request(case.method, case.path, body, headers)
        reply = connection.getresponse()
        return Reply(reply.status, [(name.lower(), value) for name, value in reply.getheaders()], reply.read())
    finally:
        connection.close()


def comparable(reply: Reply) -> tuple[int, list[tuple[str, str]], Any]:
    left_out = OF_A_HOP | ADDED
    headers = sorted((name, value) for name, value in reply.headers if name not in left_out)
    kind = dict(reply.headers).get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [[_line(line) for line in event.split(b"\n")] for event in reply.body.split(b"\n\n")]
        error = events[0][0][1].get("error") if isinstance(events[0][0][1], dict) else None
        if error is not None:
            return error["code"], [("content-type", "application/json")], {"error": error}
        return reply.status, headers, sorted(events, key=_answer)  # events of several answers may be interleaved
    return reply.status, headers, _document(reply.body)


def _line(line: bytes) -> Any:
    name, colon, rest = line.partition(b": ")
    return (name, _document(rest)) if colon and name == b"data" else line


def _answer(event: list[Any]) -> int:
    """Return the index of the answer that an event belongs to."""
    document = event[0][1] if isinstance(event[0], tuple) else None
    choices = document.get("choices") if isinstance(document, dict) else None
    return int(choices[0]["index"]) if choices else 1 << 30


def _document(data: bytes) -> Any:
    try:
        return without_names(json.loads(data))
    except (ValueError, UnicodeDecodeError):
        return data


def without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: type(each).__name__ if key in PER_ANSWER and each is not None else without_names(each)
            for key, each in value.items()
        }
    return [without_names(each) for each in value] if isinstance(value, list) else value


CASES = {"generated": some(generated()), "others": list(others())}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", CASES)
def test_answers_through_the_proxy_are_the_engines_own(fleet: Fleet, alone: ProxyProcess, kind: str) -> None:
    """If two answers differ, both requests are sent again: the engine may have cached less for the first one, and a
    busy engine sometimes puts two tokens into one event. A difference caused by the proxy persists."""
    different = {}
    for case in CASES[kind]:
        for _ in range(TRIES):
            right, through = comparable(ask(fleet.d.url, case)), comparable(ask(alone.url, case))
            if through == right:
                break
        else:
            different[case.name] = through, right
    print(f"{len(CASES[kind])} cases, {len(different)} differ: {', '.join(different)}")
    told = "\n".join(f"{name}\n  proxy  {through}\n  engine {right}" for name, (through, right) in different.items())
    assert not different, f"{len(different)} of {len(CASES[kind])} cases differ:\n{told}"
