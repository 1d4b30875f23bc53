"""What the proxy reads from a request's body."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_serving.proxy.ask import CHAT, COMPLETIONS, understand

TEXT = {"type": "text", "text": "How many?"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "img-1"}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"prompt": "and", "prompt_embeds": ["AAAA"]}),
        (CHAT, chat(TEXT, {"type": "prompt_embeds", "data": "AAAA"})),
        (CHAT, chat({"prompt_embeds": "AAAA", "data": "AAAA"}, TEXT)),
        (CHAT, {"messages": [{"role": "user", "content": {"type": "prompt_embeds", "data": "AAAA"}}]}),
        (CHAT, {"messages": [{"role": "tool", "content": [{"type": "list", "content": [{"type": "prompt_embeds"}]}]}]}),
    ],
)
def test_a_prompt_with_embeddings_is_not_split_wherever_they_are(path: str, body: dict[str, Any]) -> None:
    assert not understand(path, body).splittable


@pytest.mark.parametrize(
    "body",
    [
        chat(TEXT),
        chat(TEXT, PICTURE),
        chat({"type": "text", "text": '{"type": "prompt_embeds"}'}),
        chat("prompt_embeds", None, 7),
        {"messages": "prompt_embeds"},
        {"messages": None},
    ],
)
def test_ordinary_chats_are_split(body: dict[str, Any]) -> None:
    assert understand(CHAT, body).splittable


@pytest.mark.parametrize(
    ("more", "plain"),
    [
        ({}, True),
        ({"logprobs": None}, True),
        ({"logprobs": False}, True),
        ({"logprobs": 0}, False),
        ({"echo": False}, True),
        ({"prompt_logprobs": 0}, False),
        ({"tools": []}, True),
        ({"suffix": ""}, True),
        ({"presence_penalty": 0}, True),
    ],
    ids=str,
)
def test_a_zero_that_requests_something_counts_as_a_request(more: dict[str, Any], plain: bool) -> None:
    """`logprobs: 0` requests the log probability of each token; without the field, none is requested."""
    ask = understand(COMPLETIONS, {"prompt": "a", **more})
    assert ask.plain == ask.may_continue == plain
    assert ask.splittable == ("prompt_logprobs" not in more)
