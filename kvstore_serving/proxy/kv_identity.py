"""What decides the KV of a prompt besides its tokens, read from a request's body.

Pure. Two prompts with the same tokens have different KV if they differ in the model or adapter, in `cache_salt`, or in
pictures, sounds, videos or embeddings. `salt` covers all of this, so a table of prompts by tokens and salt never
confuses two prompts. Media are covered as the request contains them. Only the text of a URL is covered, so the content
behind the URL may change. In that case the proxy guesses wrongly, but answers stay right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
# Fields that change the KV, or that change the tokens although /tokenize ignores them.
_DECIDES: Final = ("model", "cache_salt", "prompt_embeds")
_DECIDES_CHAT: Final = ("model", "cache_salt", "prompt_embeds", "documents", "reasoning_effort")
_DECIDES_MEDIA: Final = ("mm_processor_kwargs", "media_io_kwargs")
_LEAST_TTL_S: Final = 600  # a prompt that the store keeps for less time is not remembered as stored

_encoder: Final = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True)
class KVIdentity:
    """What decides a prompt's KV besides its tokens.

    salt: a digest of everything but the tokens
    cache_salt: the request's `cache_salt`; empty if it has none
    plain: whether only tokens, adapter and `cache_salt` decide the KV
    loads, saves: how many of the prompt's tokens the engine may load from the store, and save there; None means all
    """

    salt: bytes
    cache_salt: str = ""
    plain: bool = True
    loads: int | None = None
    saves: int | None = None


def identity_of(body: Mapping[str, Any], *, chat: bool) -> KVIdentity | None:
    """Return what decides the KV of this request's prompt besides its tokens. Returns None if the request does not
    tell. The proxy must then remember nothing about the prompt."""
    if body.get("truncate_prompt_tokens") is not None:
        return None  # the engine will compute other tokens than those known here
    covered: dict[str, Any] = {name: body.get(name) for name in (_DECIDES_CHAT if chat else _DECIDES)}
    media = list(_media(body.get("messages"))) if chat else []
    if media:
        covered |= {"media": media} | {name: body.get(name) for name in _DECIDES_MEDIA}
    if chat:
        covered |= _shown_to_model(body)
    cache_salt = body.get("cache_salt")
    loads, saves = _of_store(body.get("kv_transfer_params"))
    return KVIdentity(
        xxhash.xxh3_128_digest(_encoder.encode(covered)),
        cache_salt if isinstance(cache_salt, str) else "",
        not media and body.get("prompt_embeds") is None,
        loads,
        saves,
    )


def _media(messages: object) -> Iterator[object]:
    """Yield the parts of messages that are not text, in order."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else message
        for part in content if isinstance(content, list) else (content,):
            if part is None or isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXT_PARTS):
                continue
            yield part


def _shown_to_model(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that some chat templates write into the prompt, and that /tokenize does not accept."""
    shown = {}
    if body.get("tools"):
        shown["tool_choice"] = body.get("tool_choice")
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        shown["response_format"] = response_format
    return shown


def _of_store(params: object) -> tuple[int | None, int | None]:
    """Return how many tokens may be loaded and saved, by the connector's `kv_transfer_params` (docs/vllm.md)."""
    given = params.get("kvstore") if isinstance(params, dict) else None
    if given is None:
        return None, None
    if not isinstance(given, dict):
        return 0, 0  # the engine will compute it without the store, and say why
    loads = 0 if given.get("load") is False else _count(given.get("max_load_tokens"))
    saves = 0 if given.get("save") is False else _count(given.get("max_save_tokens"))
    ttl_s = given.get("ttl_s")
    if ttl_s is not None and not (isinstance(ttl_s, int | float) and ttl_s >= _LEAST_TTL_S):
        saves = 0
    return loads, saves


def _count(value: object) -> int | None:
    return None if value is None else value if isinstance(value, int) else 0
