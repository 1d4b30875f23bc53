"""Which engines serve a request, and why: one decode engine alone, or a prefill engine and a decode engine together.

A split pays when there is much to compute, so what counts is the prompt's uncached tokens. The prompt's tokens come
with the request or from an engine's /tokenize; short texts are not asked about, since a token is at least a byte. When
tokens cannot be had, their number is guessed from the text's length, and nothing is known to be cached.

A request for a single token is prefill and nothing else, so a prefill engine answers it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import xxhash

from kvstore_serving.proxy.ask import Ask
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.prefixes import Have, Prefixes
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.store import StoreWatch
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_BYTES_A_TOKEN: Final = 4  # of English text, about
_KEPT_TOKENS: Final = 4 << 20  # of texts that were tokenized
_TOKENIZED: Final = ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "tools")
_TOKENIZED_CHAT: Final = ("continue_final_message", "chat_template", "chat_template_kwargs")

_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True)
class Decision:
    """`path`: split or colocate. `decode` answers. `tokens`: of the prompt; None: they are not known."""

    path: Literal["split", "colocate"]
    why: str
    decode: Engine
    prefill: Engine | None
    tokens: Sequence[int] | None
    prompt_tokens: int
    cached_tokens: int
    have: Have


class Decider:
    """One event loop."""

    def __init__(
        self, settings: Settings, pools: Pools, upstream: Upstream, prefixes: Prefixes, store: StoreWatch
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._upstream = upstream
        self._prefixes = prefixes
        self._store = store
        self._tokenized: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._kept = 0

    async def decide(self, ask: Ask) -> Decision | None:
        """-> None: no engine serves this model now."""
        tokens, count = await self._tokens_of(ask)
        engines = list(self._pools.engines.values())
        have = await self._prefixes.find(tokens, engines) if tokens is not None else Have()
        worth = have.worth(engines)
        only_prefill = ask.max_tokens == 1 and ask.splittable and self._settings.policy != "colocate"
        decode = self._pools.decoder(ask.model, worth, count, first="prefill" if only_prefill else "decode")
        if decode is None:
            return None
        cached = min(count, have.at(decode))
        prefill = self._pools.prefiller(ask.model, worth, count, decode)
        why = self._colocated_because(ask, decode, prefill, count - cached, only_prefill)
        if not why:
            assert prefill is not None
            why = "policy split" if self._settings.policy == "split" else f"{count - cached} uncached tokens"
            return Decision("split", why, decode, prefill, tokens, count, cached, have)
        return Decision("colocate", why, decode, None, tokens, count, cached, have)

    def sent(self, decision: Decision, *engines: Engine) -> None:
        """These engines have the prompt now."""
        if decision.tokens is not None:
            for engine in engines:
                self._prefixes.sent(decision.tokens, engine)

    def _colocated_because(
        self, ask: Ask, decode: Engine, prefill: Engine | None, uncached: int, only_prefill: bool
    ) -> str:
        settings = self._settings
        if settings.policy == "colocate":
            return "policy colocate"
        if only_prefill and "prefill" in decode.roles:
            return "one token"
        if "decode" not in decode.roles:
            return "no decode engine"
        if prefill is None:
            return "no prefill engine"
        if not self._store.works:
            return "the store does not answer"
        if not ask.splittable:
            return "needs the prompt's logits"
        if settings.policy == "auto" and uncached < settings.split_tokens:
            return f"{uncached} uncached tokens"
        return ""

    # ---- tokens ----------------------------------------------------------------------------------------------

    async def _tokens_of(self, ask: Ask) -> tuple[Sequence[int] | None, int]:
        """-> the prompt's tokens, or None; and how many they are, or may be."""
        if ask.token_ids is not None:
            return ask.token_ids, len(ask.token_ids)
        prompt = ask.body.get("messages" if ask.chat else "prompt")
        if not isinstance(prompt, str | list):
            return None, 0
        data = prompt.encode() if isinstance(prompt, str) else _encoder.encode(prompt)
        guess = len(data) // _BYTES_A_TOKEN
        one_prompt = ask.chat or isinstance(prompt, str)
        if not one_prompt or len(data) < self._settings.split_tokens or self._settings.policy == "colocate":
            return None, guess
        names = (*_TOKENIZED, *_TOKENIZED_CHAT) if ask.chat else _TOKENIZED
        body = {name: ask.body[name] for name in names if ask.body.get(name) is not None}
        tokens = await self._tokenize(ask, body)
        return (tokens, guess) if tokens is None else (tokens, len(tokens))

    async def _tokenize(self, ask: Ask, body: dict[str, object]) -> Sequence[int] | None:
        name = xxhash.xxh3_128_digest(_encoder.encode(body))
        known = self._tokenized.get(name)
        if known is not None:
            self._tokenized.move_to_end(name)
            return known  # type: ignore[return-value]
        engine = self._pools.decoder(ask.model, {}, 0)
        if engine is None:
            return None
        try:
            answer = await self._upstream.own(engine, "/tokenize", self._settings.tokenize_s, body)
            if answer.status != 200:
                return None  # the engines will say what is wrong with the request
            tokens = np.asarray(msgspec.json.decode(answer.body)["tokens"], dtype=np.int64)
        except (EngineFailed, msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("%s/tokenize: %s; the prompt's length is guessed", engine.url, error)
            return None
        before = self._tokenized.pop(name, None)  # requests with one text, at once, all asked
        self._tokenized[name] = tokens
        self._kept += len(tokens) - (0 if before is None else len(before))
        while self._kept > _KEPT_TOKENS:
            self._kept -= len(self._tokenized.popitem(last=False)[1])
        return tokens  # type: ignore[return-value]
