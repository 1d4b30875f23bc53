"""Which engines serve a request, and why: one decode engine alone, or a prefill engine and a decode engine together.

A split pays when there is much to compute, so what counts is the prompt's uncached tokens. The prompt's tokens come
with the request or from an engine's /tokenize; short texts are not asked about, since a token is at least a byte. When
tokens cannot be had, their number is guessed from the text's length, and nothing is known to be cached. Before a decode
engine gets a long prompt alone because the store has it, the store is asked whether it has lost blocks meanwhile; how
many tokens engines say that they found corrects what is remembered.

A request for a single token is prefill and nothing else, so a prefill engine answers it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import xxhash

from kvstore_serving.proxy.ask import Ask
from kvstore_serving.proxy.kv_identity import identity_of
from kvstore_serving.proxy.pairs import Pairs
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.prefixes import PIECE, Have, Prefixes, Prompt
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.store import StoreWatch
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_BYTES_A_TOKEN: Final = 4  # of English text, about
_KEPT_TOKENS: Final = 4 << 20  # of texts that were tokenized
# What decides the tokens, of what /tokenize takes.
_TOKENIZED: Final = ("model", "prompt", "add_special_tokens")
_TOKENIZED_CHAT: Final = (
    *("model", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message", "tools"),
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"),
)
_EVIDENCE: Final = 32  # tokens that a decode engine lacks, from which it shows whether they come

_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True)
class Decision:
    """`path`: split or colocate. `decode` answers. `prompt`: None: its tokens are not known, or not all that decides
    its KV."""

    path: Literal["split", "colocate"]
    why: str
    decode: Engine
    prefill: Engine | None
    prompt: Prompt | None
    prompt_tokens: int
    cached_tokens: int
    have: Have


class Decider:
    """One event loop."""

    def __init__(
        self,
        settings: Settings,
        pools: Pools,
        upstream: Upstream,
        prefixes: Prefixes,
        store: StoreWatch,
        pairs: Pairs,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._upstream = upstream
        self._prefixes = prefixes
        self._store = store
        self._pairs = pairs
        self._tokenized: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._kept = 0

    async def decide(self, ask: Ask) -> Decision | None:
        """-> None: no engine serves this model now."""
        tokens, count = await self._tokens_of(ask)
        kv = identity_of(ask.body, chat=ask.chat)
        prompt = Prompt.of(tokens, kv, ask.model) if tokens is not None and kv is not None else None
        decision = await self._decide(ask, prompt, count)
        if decision is not None and self._counts_on_the_store(decision) and await self._store.look_again():
            decision = await self._decide(ask, prompt, count)
        if decision is not None and decision.prefill is not None:
            self._pairs.taken(decision.prefill, decision.decode)
        return decision

    async def _decide(self, ask: Ask, prompt: Prompt | None, count: int) -> Decision | None:
        engines = list(self._pools.engines.values())
        have = await self._prefixes.find(prompt, engines) if prompt is not None else Have()
        worth = have.worth(engines)
        only_prefill = ask.max_tokens == 1 and ask.splittable and self._settings.policy != "colocate"
        decode = self._pools.decoder(ask.model, worth, count, first="prefill" if only_prefill else "decode")
        if decode is None:
            return None
        cached = min(count, have.at(decode))
        off = self._pairs.off(decode, self._pools.engines)
        prefill = self._pools.prefiller(ask.model, worth, count, decode, without=off)
        why = self._colocated_because(ask, decode, prefill, count - cached, only_prefill, bool(off))
        if not why:
            assert prefill is not None
            why = "policy split" if self._settings.policy == "split" else f"{count - cached} uncached tokens"
            return Decision("split", why, decode, prefill, prompt, count, cached, have)
        return Decision("colocate", why, decode, None, prompt, count, cached, have)

    def _counts_on_the_store(self, decision: Decision) -> bool:
        """Whether a decode engine would have much to compute alone, did the store not have it."""
        own = decision.have.engines.get(decision.decode.url, 0)
        least = self._settings.split_tokens
        there = decision.path == "colocate" and self._settings.policy == "auto" and self._pools.count("prefill") > 0
        return there and decision.prompt_tokens - decision.cached_tokens < least <= decision.prompt_tokens - own

    def answered(self, ask: Ask, decision: Decision, engine: Engine, cached: int | None = None) -> None:
        """This engine has computed or loaded the prompt. cached: how many tokens it said it found; None: it did not."""
        prompt = decision.prompt
        if prompt is None:
            return
        expected = min(decision.prompt_tokens, decision.have.at(engine))
        if cached is not None and ask.splittable and cached < expected - PIECE:
            log.info("%s found %d tokens of a prompt where %d were expected", engine.url, cached, expected)
            self._prefixes.missed(prompt, engine, cached)
        else:
            self._prefixes.sent(prompt, engine)

    def handed_over(self, decision: Decision, cached: int | None) -> None:
        """The prefill engine has computed the prompt, and the decode engine said how many tokens it found."""
        before = decision.have.at(decision.decode)
        lacked = decision.prompt_tokens - before
        if decision.prefill is None or decision.prompt is None or cached is None or lacked < _EVIDENCE:
            return
        if cached - before < lacked // 2:
            self._pairs.lost(decision.prefill, decision.decode)
        else:
            self._pairs.arrived(decision.prefill, decision.decode)

    def _colocated_because(
        self, ask: Ask, decode: Engine, prefill: Engine | None, uncached: int, only_prefill: bool, off: bool
    ) -> str:
        settings = self._settings
        if settings.policy == "colocate":
            return "policy colocate"
        if only_prefill and "prefill" in decode.roles:
            return "one token"
        if "decode" not in decode.roles:
            return "no decode engine"
        if prefill is None:
            return "what is prefilled does not arrive" if off else "no prefill engine"
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
        tokens = await self._tokenize(ask, _tokenize_body(ask))
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


def _tokenize_body(ask: Ask) -> dict[str, Any]:
    """-> what asks /tokenize for the prompt's tokens."""
    names = _TOKENIZED_CHAT if ask.chat else _TOKENIZED
    body = {name: ask.body[name] for name in names if ask.body.get(name) is not None}
    # A chat has fields that vLLM hands to the template, and /tokenize does not have.
    given = body.get("chat_template_kwargs", {})
    more = {name: ask.body[name] for name in ("documents", "reasoning_effort") if ask.body.get(name) is not None}
    if ask.chat and more and isinstance(given, dict):
        if "reasoning_effort" in more:
            more["enable_thinking"] = given.get("enable_thinking", more["reasoning_effort"] != "none")
        body["chat_template_kwargs"] = given | more
    return body
