"""The tokens of a prompt. They decide which engines serve the prompt, and both engines of a split get the tokens.

The tokens come with the request, or from an engine. A chat is rendered by an engine's /v1/chat/completions/render, if
an engine has it (vLLM with --enable-scale-out). That answer has exactly the tokens that the engine would compute, and
both engines then get these tokens. So neither a template that shows the time of day nor a different tokenizer can make
the two engines compute different prompts. Other prompts are sent to /tokenize. That path does not accept everything
that a template may show, so the engines then render the messages of a chat themselves. Short texts are not sent to
/tokenize: a token has at least one byte, so a short text has few tokens. If the tokens cannot be obtained, their number
is estimated from the text's length, and no token is assumed to be cached.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from kvstore_serving.proxy.ask import CHAT, ParsedRequest
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_BYTES_A_TOKEN: Final = 4  # approximately, in English text
_KEPT_TOKENS: Final = 4 << 20  # the most tokens that are kept, of all texts together
# The fields that /tokenize accepts and that decide the tokens.
_TOKENIZED: Final = ("model", "prompt", "add_special_tokens")
_TOKENIZED_CHAT: Final = (
    *("model", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message", "tools"),
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"),
)
_RENDER: Final = f"{CHAT}/render"
_NO_SUCH_PATH: Final = (403, 404, 405, 501)  # 403: vLLM without --enable-scale-out

_encoder: Final = msgspec.json.Encoder()


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_decode_rendered: Final = msgspec.json.Decoder(_Rendered).decode
_decode_tokenized: Final = msgspec.json.Decoder(_Tokenized).decode


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt.

    ids: None if they are not known
    count: the number of tokens, or an estimate of it
    replace: whether engines may get the tokens instead of the text
    """

    ids: Sequence[int] | None
    count: int
    replace: bool = False


class EngineTokenizer:
    """Gets tokens from engines. One event loop."""

    def __init__(
        self, settings: Settings, pools: Pools, upstream: Upstream, least: Callable[[], float] = lambda: 1
    ) -> None:
        """least: returns the fewest uncached tokens for which a prompt is split now"""
        self._settings = settings
        self._pools = pools
        self._least = least
        self._upstream = upstream
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._kept_tokens = 0
        self._renders_not: set[int] = set()  # the lives of engines that cannot render

    async def of(self, ask: ParsedRequest) -> PromptTokens:
        if ask.token_ids is not None:
            return PromptTokens(ask.token_ids, len(ask.token_ids))
        prompt = ask.body.get("messages" if ask.chat else "prompt")
        if not isinstance(prompt, str | list):
            return PromptTokens(None, 0)
        data = prompt.encode() if isinstance(prompt, str) else _encoder.encode(prompt)
        guess = PromptTokens(None, len(data) // _BYTES_A_TOKEN)
        one_prompt = ask.chat or isinstance(prompt, str)
        if not one_prompt or len(data) < self._least() or (ask.policy or self._settings.policy) == "colocate":
            return guess
        if ask.brings_tokens:  # engines use these tokens instead of the messages
            return guess
        engine = self._pools.decoder(ask.model, {}, 0)
        if engine is None:
            return guess
        try:
            if ask.chat and ask.is_text and (ids := await self._render(engine, ask)) is not None:
                return PromptTokens(ids, len(ids), replace=True)
            ids = await self._tokenize(engine, _tokenize_body(ask))
        except (EngineFailed, msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            log.info("could not get the tokens of a prompt from %s: %s; its length is guessed", engine.url, error)
            return guess
        return PromptTokens(ids, len(ids), replace=not ask.chat and ask.is_text)

    async def _render(self, engine: Engine, ask: ParsedRequest) -> Sequence[int] | None:
        """Return the tokens of a chat, or None if the engine cannot render chats. The tokens are not kept, because a
        template may show the time of day. Raises `EngineFailed`, also if the engine refuses the request (it would
        refuse the user's, too), and any error of the decoder."""
        if engine.life in self._renders_not:
            return None
        body = {**ask.body, "stream": False}
        for name in ("kv_transfer_params", "stream_options"):
            body.pop(name, None)
        answer = await self._upstream.own(engine, _RENDER, self._settings.tokenize_s, body)
        if answer.status in _NO_SUCH_PATH:
            self._renders_not &= {each.life for each in self._pools.engines.values()}
            self._renders_not.add(engine.life)
            return None
        if answer.status != 200:
            raise EngineFailed(engine, f"{_RENDER}: status {answer.status}")
        return _decode_rendered(answer.body).token_ids

    async def _tokenize(self, engine: Engine, body: dict[str, Any]) -> Sequence[int]:
        """Return the tokens. Raises the same errors as `_render`."""
        name = xxhash.xxh3_128_digest(_encoder.encode(body))
        known = self._kept.get(name)
        if known is not None:
            self._kept.move_to_end(name)
            return known  # type: ignore[return-value]
        answer = await self._upstream.own(engine, "/tokenize", self._settings.tokenize_s, body)
        if answer.status != 200:
            raise EngineFailed(engine, f"/tokenize: status {answer.status}")
        tokens = np.asarray(_decode_tokenized(answer.body).tokens, dtype=np.int64)
        before = self._kept.pop(name, None)  # requests with the same text may have asked at the same time
        self._kept[name] = tokens
        self._kept_tokens += len(tokens) - (0 if before is None else len(before))
        while self._kept_tokens > _KEPT_TOKENS:
            self._kept_tokens -= len(self._kept.popitem(last=False)[1])
        return tokens  # type: ignore[return-value]


def _tokenize_body(ask: ParsedRequest) -> dict[str, Any]:
    """Return the body that asks /tokenize for the prompt's tokens."""
    names = _TOKENIZED_CHAT if ask.chat else _TOKENIZED
    body = {name: ask.body[name] for name in names if ask.body.get(name) is not None}
    # vLLM passes to the template some fields of a chat that /tokenize does not accept.
    given = body.get("chat_template_kwargs", {})
    more = {name: ask.body[name] for name in ("documents", "reasoning_effort") if ask.body.get(name) is not None}
    if ask.chat and more and isinstance(given, dict):
        if "reasoning_effort" in more:
            more["enable_thinking"] = given.get("enable_thinking", more["reasoning_effort"] != "none")
        body["chat_template_kwargs"] = given | more
    return body
