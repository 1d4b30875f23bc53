"""What the proxy keeps of the texts that engines have tokenized for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_serving.proxy import decision
from kvstore_serving.proxy.ask import COMPLETIONS, understand
from kvstore_serving.proxy.decision import Decider


class Upstream:
    """Engines that tokenize a text into as many tokens as it has bytes, after a while."""

    async def own(self, engine: Any, path: str, timeout_s: float, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.01)
        return SimpleNamespace(status=200, body=b'{"tokens": %s}' % str([7] * len(body["prompt"])).encode())


def test_texts_that_come_at_once_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "_KEPT_TOKENS", 100)
    settings: Any = SimpleNamespace(split_tokens=1, policy="auto", tokenize_s=1.0)
    pools: Any = SimpleNamespace(decoder=lambda *_: "an engine")
    upstream: Any = Upstream()
    not_asked: Any = None
    decider = Decider(settings, pools, upstream, prefixes=not_asked, store=not_asked, pairs=not_asked)

    async def ask(text: str, times: int) -> list[int]:
        asked = understand(COMPLETIONS, {"prompt": text})
        return [count for _, count in await asyncio.gather(*(decider._tokens_of(asked) for _ in range(times)))]

    for number in range(20):
        assert asyncio.run(ask(f"{number:030}", 8)) == [30] * 8
    assert decider._kept == sum(map(len, decider._tokenized.values())) == 90
