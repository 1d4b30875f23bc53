"""Which engines serve a request, and why: one decode engine alone, or a prefill engine and a decode engine together.

A split is worth its cost if there is much to compute, so the decision depends on the number of the prompt's uncached
tokens. The smallest number for which prompts are split is measured (`pace`), unless the operator sets it. A decode
engine may get a long prompt alone because the prompt's KV is in the store. Before the proxy decides this, it asks
whether the store has lost blocks. When engines report how many tokens were cached, the proxy corrects what it
remembers.

A request for a single token needs only prefill, so a prefill engine answers it.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from kvstore_serving.proxy.ask import ParsedRequest
from kvstore_serving.proxy.describing import Describing
from kvstore_serving.proxy.kv_identity import identity_of
from kvstore_serving.proxy.pace import Ways
from kvstore_serving.proxy.pairs import Pairs
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.prefixes import PIECE, Have, Prefixes, Prompt
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.store import StoreWatch
from kvstore_serving.proxy.tokens import EngineTokenizer, PromptTokens
from kvstore_serving.proxy.upstream import Upstream

log = logging.getLogger(__name__)

_LEAST_S: Final = 0.1  # how long the computed smallest number of tokens for a split is used
_EVIDENCE: Final = 32  # tokens; a hand-over of fewer does not show whether blocks arrive


@dataclass(frozen=True)
class Decision:
    """The engines for a request.

    path: "split" or "colocate"
    decode: the engine that answers
    prompt: the prompt; None if its tokens, or anything else that decides its KV, are not known
    given: the prompt's tokens, which both engines of a split get instead of the text; None if both get the prompt as
    the user sent it
    """

    path: Literal["split", "colocate"]
    why: str
    decode: Engine
    prefill: Engine | None
    prompt: Prompt | None
    prompt_tokens: int
    cached_tokens: int
    have: Have
    given: list[int] | None = None


class Decider:
    """Chooses the engines of requests. Used by one event loop."""

    def __init__(
        self,
        settings: Settings,
        pools: Pools,
        upstream: Upstream,
        prefixes: Prefixes,
        store: StoreWatch,
        pairs: Pairs,
        describing: Describing,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._tokens = EngineTokenizer(settings, pools, upstream, self.least)
        self._prefixes = prefixes
        self._store = store
        self._pairs = pairs
        self._describing = describing
        self._least = self._least_until = 0.0

    async def decide(self, ask: ParsedRequest) -> Decision | None:
        """Return the engines for this request, or None if no engine serves this model now."""
        tokens = await self._tokens.of(ask)
        kv = identity_of(ask.body, chat=ask.chat)
        prompt = Prompt.of(tokens.ids, kv, ask.model) if tokens.ids is not None and kv is not None else None
        decision = await self._decide(ask, prompt, tokens)
        if decision is not None and self._counts_on_the_store(ask, decision) and await self._store.look_again():
            decision = await self._decide(ask, prompt, tokens)
        if decision is not None and decision.prefill is not None:
            self._pairs.taken(decision.prefill, decision.decode)
        return decision

    async def _decide(self, ask: ParsedRequest, prompt: Prompt | None, tokens: PromptTokens) -> Decision | None:
        count = tokens.count
        engines = list(self._pools.engines.values())
        have = await self._prefixes.find(prompt, engines) if prompt is not None else Have()
        worth = have.worth(engines)
        policy = ask.policy or self._settings.policy
        only_prefill = ask.max_tokens == 1 and ask.splittable and policy != "colocate"
        decode = self._pools.decoder(ask.model, worth, count, first="prefill" if only_prefill else "decode")
        if decode is None:
            return None
        cached = min(count, have.at(decode))
        if ask.model is not None and decode.identity(ask.model).is_adapter:
            for engine in (decode, *self._pools.candidates("prefill", ask.model)):
                self._describing.want(engine, ask.model)
        off = self._pairs.off(decode, self._pools.engines)
        prefill = self._pools.prefiller(ask.model, worth, count, decode, without=off)
        uncached = count - cached
        why = self._colocated_because(ask, decode, prefill, policy, only_prefill, bool(off))
        if not why and policy == "auto":
            assert prefill is not None
            splits = self._splits(prefill, decode, uncached, count - min(count, have.at(prefill)))
            why = "" if splits else f"{uncached} uncached tokens"
        if not why:
            assert prefill is not None
            why = "policy split" if policy == "split" else f"{uncached} uncached tokens"
            longest = decode.max_model_len(ask.model)
            fits = longest is None or count + (ask.max_tokens or 1) <= longest  # otherwise D itself refuses
            given = np.asarray(tokens.ids).tolist() if tokens.replace and fits else None
            return Decision("split", why, decode, prefill, prompt, count, cached, have, given)
        return Decision("colocate", why, decode, None, prompt, count, cached, have)

    def _counts_on_the_store(self, ask: ParsedRequest, decision: Decision) -> bool:
        """Return whether a decode engine would have much to compute alone if the store did not have the prompt."""
        own = decision.have.engines.get(decision.decode.url, 0)
        least = self.least()
        auto = (ask.policy or self._settings.policy) == "auto"
        there = decision.path == "colocate" and auto and self._pools.count("prefill") > 0
        return there and decision.prompt_tokens - decision.cached_tokens < least <= decision.prompt_tokens - own

    def _ways(self, prefill: Engine, decode: Engine) -> Ways:
        answers = decode.running + decode.others_running
        return Ways(prefill.side, decode.side, decode.hand_overs.line, answers)

    def _splits(self, prefill: Engine, decode: Engine, uncached: int, at_prefill: int) -> bool:
        fixed = self._settings.split_tokens
        return uncached >= fixed if fixed is not None else self._ways(prefill, decode).splits(uncached, at_prefill)

    def split_from(self) -> list[dict[str, Any]]:
        """Return, for each decode engine, the fewest uncached tokens for which a prompt is split now. The number is
        None if no prompt is split."""
        found = []
        fixed = self._settings.split_tokens
        for decode in self._pools.candidates("decode", None):
            prefill = self._pools.prefiller(None, {}, 0, decode)
            if prefill is not None:
                least = fixed or self._ways(prefill, decode).least
                tokens = math.ceil(least) if math.isfinite(least) else None
                found.append({"decode": decode.url, "prefill": prefill.url, "tokens": tokens})
        return found

    def least(self) -> float:
        """The fewest uncached tokens for which any prompt is split now."""
        if self._settings.split_tokens is not None:
            return self._settings.split_tokens
        if (now := time.monotonic()) > self._least_until:
            found = [each["tokens"] for each in self.split_from()]
            self._least = min((each for each in found if each is not None), default=math.inf)
            self._least_until = now + _LEAST_S
        return self._least

    def answered(self, ask: ParsedRequest, decision: Decision, engine: Engine, cached: int | None = None) -> None:
        """Note that this engine has computed or loaded the prompt. `cached`: the number of tokens that it reported as
        cached; None if it reports no such number."""
        prompt = decision.prompt
        if prompt is None:
            return
        expected = min(decision.prompt_tokens, decision.have.at(engine))
        if cached is not None and ask.splittable and cached < expected - PIECE:
            log.info("%s found only %d tokens of a prompt; %d were expected", engine.url, cached, expected)
            self._prefixes.missed(prompt, engine, cached)
        else:
            self._prefixes.sent(prompt, engine)

    def handed_over(self, decision: Decision, cached: int | None) -> None:
        """Note how much a decode engine found of the prompt that the prefill engine has computed."""
        before = decision.have.at(decision.decode)
        lacked = decision.prompt_tokens - before
        if decision.prefill is None or decision.prompt is None or cached is None or lacked < _EVIDENCE:
            return
        if cached - before < lacked // 2:
            if self._pairs.lost(decision.prefill, decision.decode):
                self._describing.doubt(decision.prefill, decision.decode)
        else:
            self._pairs.arrived(decision.prefill, decision.decode)

    def _colocated_because(
        self, ask: ParsedRequest, decode: Engine, prefill: Engine | None, policy: str, only_prefill: bool, off: bool
    ) -> str:
        if policy == "colocate":
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
        return ""
