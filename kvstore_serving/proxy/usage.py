"""The `usage` of an engine's answer: the tokens of a request."""

from __future__ import annotations

from typing import Any, Final

import msgspec


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many tokens of the prompt were found in a cache. It is None if the engine does not report this; vLLM
        needs `--enable-prompt-tokens-details`."""
        cached = (self.prompt_tokens_details or {}).get("cached_tokens")
        return cached if isinstance(cached, int) else None


class _Document(msgspec.Struct):
    usage: Usage | None = None


_decode: Final = msgspec.json.Decoder(_Document).decode
_decode_parts: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def usage_of(body: bytes) -> Usage | None:
    """Return the usage in an answer's body, or None if the body has none or is not JSON."""
    try:
        return _decode(body).usage
    except msgspec.DecodeError:
        return None


def read_usage(value: object) -> Usage | None:
    """Return the usage in a stream's chunk, or None if the value is not a usage."""
    return None if value is None else usage_of(msgspec.json.encode({"usage": value}))


def with_found(usage: dict[str, Any], found: int) -> dict[str, Any]:
    """Return the usage with `found` as its number of cached tokens, if it has that field."""
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        return usage
    return {**usage, "prompt_tokens_details": {**details, "cached_tokens": found}}


def body_with_found(body: bytes, found: int) -> bytes:
    """Return the answer with `found` as the number of cached tokens in its usage. Everything else is unchanged."""
    try:
        parts = _decode_parts(body)
        usage = msgspec.json.decode(parts["usage"])
    except (msgspec.DecodeError, KeyError):
        return body
    if not isinstance(usage, dict) or (changed := with_found(usage, found)) == usage:
        return body
    return msgspec.json.encode({**parts, "usage": changed})
