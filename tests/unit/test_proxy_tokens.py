"""Which tokenized texts the proxy keeps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_serving.proxy import tokens
from kvstore_serving.proxy.ask import COMPLETIONS, understand
from kvstore_serving.proxy.tokens import EngineTokenizer


class Upstream:
    """Engines that tokenize a text into as many tokens as it has bytes, after a delay."""

    async def own(self, engine: Any, path: str, timeout_s: float, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.01)
        return SimpleNamespace(status=200, body=b'{"tokens": %s}' % str([7] * len(body["prompt"])).encode())


def test_simultaneous_equal_texts_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_KEPT_TOKENS", 100)
    settings: Any = SimpleNamespace(split_tokens=1, policy="auto", tokenize_s=1.0)
    pools: Any = SimpleNamespace(decoder=lambda *_: "an engine")
    upstream: Any = Upstream()
    asking = EngineTokenizer(settings, pools, upstream)

    async def ask(text: str, times: int) -> list[int]:
        asked = understand(COMPLETIONS, {"prompt": text})
        return [found.count for found in await asyncio.gather(*(asking.of(asked) for _ in range(times)))]

    for number in range(20):
        assert asyncio.run(ask(f"{number:030}", 8)) == [30] * 8
    assert asking._kept_tokens == sum(map(len, asking._kept.values())) == 90
