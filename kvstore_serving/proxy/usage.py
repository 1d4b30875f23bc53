"""What an engine says a request took: the `usage` of an answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, what was found in a cache. None: it does not say, as vLLM without
        `--enable-prompt-tokens-details`."""
        cached = (self.prompt_tokens_details or {}).get("cached_tokens")
        return cached if isinstance(cached, int) else None


class _Document(msgspec.Struct):
    usage: Usage | None = None


_decode: Final = msgspec.json.Decoder(_Document).decode
_decode_parts: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def usage_of(body: bytes) -> Usage | None:
    """Of an answer's body. None: it has none, or is no JSON document with one."""
    try:
        return _decode(body).usage
    except msgspec.DecodeError:
        return None


def read_usage(value: object) -> Usage | None:
    """Of what a chunk of a stream has as its usage. None: that is none."""
    return None if value is None else usage_of(msgspec.json.encode({"usage": value}))


def with_found(usage: dict[str, Any], found: int) -> dict[str, Any]:
    """-> a usage that says so many cached tokens, if it says any number of them."""
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        return usage
    return {**usage, "prompt_tokens_details": {**details, "cached_tokens": found}}


def body_with_found(body: bytes, found: int) -> bytes:
    """-> an answer whose usage says so many cached tokens; all else is as it was."""
    try:
        parts = _decode_parts(body)
        usage = msgspec.json.decode(parts["usage"])
    except (msgspec.DecodeError, KeyError):
        return body
    if not isinstance(usage, dict) or (changed := with_found(usage, found)) == usage:
        return body
    return msgspec.json.encode({**parts, "usage": changed})
