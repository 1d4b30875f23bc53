"""Which fields of a request, in addition to its tokens, decide the KV of its prompt."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_serving.proxy.ask import CHAT, COMPLETIONS, understand
from kvstore_serving.proxy.kv_identity import KVIdentity, identity_of
from kvstore_serving.proxy.tokens import _tokenize_body

TEXT = {"type": "text", "text": "hello"}


def of(chat: bool = False, **body: Any) -> KVIdentity:
    found = identity_of({"model": "m", "prompt": [1, 2], **body}, chat=chat)
    assert found is not None
    return found


def of_chat(*parts: Any, **body: Any) -> KVIdentity:
    return of(True, messages=[{"role": "user", "content": list(parts)}], **body)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "another"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"prompt_embeds": "QUFB"},
        {"prompt_embeds": ["QUFB", "QkJC"]},
    ],
)
def test_fields_that_change_the_kv_count(body: dict[str, Any]) -> None:
    for chat in (False, True):
        assert of(chat, **body).salt != of(chat).salt
        assert of(chat, **body).salt == of(chat, **body).salt


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 1.0, "seed": 7, "stream": True, "max_tokens": 3, "user": "u", "n": 2, "stop": ["."]},
        {"kv_transfer_params": {"kvstore": {"priority": 2}}},
        {"response_format": {"type": "text"}, "tool_choice": "none"},
    ],
)
def test_fields_that_change_only_the_answer_do_not_count(body: dict[str, Any]) -> None:
    for chat in (False, True):
        assert of(chat, **body) == of(chat)


PARTS: list[Any] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUFB"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QkJC"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QkJC"}, "uuid": "1"},
    {"type": "image_url", "image_url": None, "uuid": "1"},
    {"type": "image_url", "image_url": None, "uuid": "2"},
    {"image_url": "http://a/b.png"},
    {"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}},
    {"type": "video_url", "video_url": {"url": "http://a/b.mp4"}},
    {"type": "image_embeds", "image_embeds": "QUFB"},
    {"type": "prompt_embeds", "data": "QUFB"},
    {"type": "prompt_embeds", "data": "QkJC"},
    {"type": "of the future", "data": "QUFB"},
    {"no": "type"},
    7,
]


def test_every_non_text_message_part_counts_and_so_does_their_order() -> None:
    salts = [of_chat(part, TEXT).salt for part in PARTS]
    salts += [of_chat(PARTS[0], PARTS[1]).salt, of_chat(PARTS[1], PARTS[0]).salt, of_chat(TEXT).salt]
    assert len(set(salts)) == len(salts)
    assert not any(of_chat(part).plain for part in PARTS)
    twice = [{"role": "user", "content": [PARTS[0]]}, {"role": "user", "content": [TEXT]}]
    assert of(True, messages=twice).salt == of_chat(PARTS[0]).salt, "text is known by its tokens"


@pytest.mark.parametrize("content", ["text", [TEXT], ["text"], None, [{"type": "refusal", "refusal": "no"}]])
def test_text_in_any_form_is_identified_by_its_tokens(content: Any) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant"}]
    assert of(True, messages=messages) == of(True)
    assert of(True, messages=messages).plain


def test_media_options_count_only_with_media() -> None:
    how = {"mm_processor_kwargs": {"max_pixels": 1}}
    assert of_chat(PARTS[0], **how).salt != of_chat(PARTS[0]).salt
    assert of_chat(TEXT, **how) == of_chat(TEXT)


@pytest.mark.parametrize("messages", [None, "text", [None], [1], [{"content": 7}], {}])
def test_requests_that_engines_refuse_do_no_harm(messages: Any) -> None:
    of(True, messages=messages)
    of(True, cache_salt=7, kv_transfer_params=[1])


def test_a_prompt_that_engines_truncate_has_no_identity() -> None:
    for chat in (False, True):
        assert identity_of({"prompt": [1, 2], "truncate_prompt_tokens": 1}, chat=chat) is None


@pytest.mark.parametrize(
    ("given", "loads", "saves"),
    [
        (None, None, None),
        ({}, None, None),
        ({"load": False}, 0, None),
        ({"save": False, "max_load_tokens": 64}, 64, 0),
        ({"max_save_tokens": 128}, None, 128),
        ({"ttl_s": 5}, None, 0),
        ({"ttl_s": 86_400}, None, None),
        ({"max_save_tokens": "many", "max_load_tokens": []}, 0, 0),
        ([], 0, 0),
    ],
)
def test_requests_that_bypass_the_store_are_recognised(given: Any, loads: int | None, saves: int | None) -> None:
    found = of(kv_transfer_params={"kvstore": given})
    assert (found.loads, found.saves) == (loads, saves)


def test_engines_tokenize_with_all_fields_that_matter() -> None:
    messages = [{"role": "user", "content": "x"}]
    decides = {
        **{"model": "m", "messages": messages, "add_generation_prompt": False, "continue_final_message": True},
        **{"chat_template": "t", "chat_template_kwargs": {"a": 1}, "tools": [{"type": "function"}]},
        **{"mm_processor_kwargs": {"b": 2}, "media_io_kwargs": {"c": {}}, "add_special_tokens": True},
    }
    assert _tokenize_body(understand(CHAT, {**decides, "temperature": 0})) == decides
    more = {"documents": [{"text": "d"}], "reasoning_effort": "low"}
    asked = _tokenize_body(understand(CHAT, {**decides, **more}))
    assert asked["chat_template_kwargs"] == {"a": 1, **more, "enable_thinking": True}
    off = understand(CHAT, {"messages": messages, "reasoning_effort": "none"})
    assert _tokenize_body(off)["chat_template_kwargs"]["enable_thinking"] is False
    text = {"model": "m", "prompt": "x", "add_special_tokens": False}
    assert _tokenize_body(understand(COMPLETIONS, {**text, "tools": [], "seed": 1})) == text
