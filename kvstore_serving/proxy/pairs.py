"""The pairs of P and D in which D does not find the blocks that P computes. The number of cached tokens that D reports
shows this.

This happens if P and D name blocks differently (for example, after a reset of one of them), or if they use different
stores. Each split prompt is then computed twice, and its user waits. After `_ENOUGH` such prompts in a row the proxy
stops using the pair for some time. Then a single prompt tries the pair; if this prompt is lost, too, the time doubles.
The pair is used again when a prompt arrives, either engine restarts, or an engine gives new names to its blocks.

Used by one event loop. The size of the table is bounded by the number of pairs of engines in the pools.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvstore_serving.proxy.pools import Engine

log = logging.getLogger(__name__)

_ENOUGH: Final = 2
_WAITS: Final = 10.0  # the first wait, in multiples of the engines' back-off
_LONGEST_WAIT_S: Final = 300.0


_Life: TypeAlias = "tuple[int, int]"  # the engine's life, and the count of changes to the names of its blocks


@dataclass
class _Pair:
    lives: tuple[_Life, _Life]
    lost: int = 0  # prompts in a row that did not arrive
    tries: int = 0  # prompts sent to see whether the pair works again
    until: float = 0.0  # no prompts before this time


class Pairs:
    """The pairs that lose prompts, as the module describes. `backoff_s`: the back-off of engines in seconds."""

    def __init__(self, backoff_s: float) -> None:
        self._first_s = backoff_s * _WAITS
        self._pairs: dict[tuple[str, str], _Pair] = {}  # by the URLs of P and D

    def off(self, decode: Engine, engines: Mapping[str, Engine]) -> frozenset[str]:
        """Return the engines among `engines` that must not prefill for this decode engine now."""
        lives, now = {url: _life(engine) for url, engine in engines.items()}, time.monotonic()
        self._pairs = {
            (p, d): pair for (p, d), pair in self._pairs.items() if (lives.get(p), lives.get(d)) == pair.lives
        }
        return frozenset(
            p for (p, d), pair in self._pairs.items() if d == decode.url and pair.lost >= _ENOUGH and now < pair.until
        )

    def taken(self, prefill: Engine, decode: Engine) -> None:
        """Note that a prompt is sent to this pair. If the prompt tries a pair that was out of use, no other prompt is
        sent to the pair meanwhile."""
        pair = self._pairs.get((prefill.url, decode.url))
        if pair is not None and pair.lost >= _ENOUGH:
            pair.tries += 1
            pair.until = time.monotonic() + self._wait_s(pair)

    def lost(self, prefill: Engine, decode: Engine) -> bool:
        """Note that D did not find what P computed. Returns True if the pair is out of use from now on."""
        lives = _life(prefill), _life(decode)
        pair = self._pairs.get((prefill.url, decode.url))
        if pair is None or pair.lives != lives:
            pair = self._pairs[prefill.url, decode.url] = _Pair(lives)
        pair.lost += 1
        if pair.lost >= _ENOUGH:
            wait_s = self._wait_s(pair)
            pair.until = time.monotonic() + wait_s
            log.warning(
                "prompts that %s computed did not arrive at %s, %d times in a row: this pair is not used for %.0f s. "
                "Do both engines use the same store and namespace? If you reset one engine, reset the other, too "
                "(docs/reference/proxy.md)",
                prefill.url,
                decode.url,
                pair.lost,
                wait_s,
            )
        return pair.lost >= _ENOUGH

    def arrived(self, prefill: Engine, decode: Engine) -> None:
        """Note that D found what P computed."""
        pair = self._pairs.pop((prefill.url, decode.url), None)
        if pair is not None and pair.lost >= _ENOUGH:
            log.info("prompts that %s computes arrive at %s again", prefill.url, decode.url)

    def status(self) -> list[dict[str, Any]]:
        """Return the pairs that are out of use now."""
        now = time.monotonic()
        return [
            {"prefill": p, "decode": d, "lost": pair.lost, "tried_again_in_s": round(max(0.0, pair.until - now), 1)}
            for (p, d), pair in self._pairs.items()
            if pair.lost >= _ENOUGH
        ]

    def _wait_s(self, pair: _Pair) -> float:
        return float(min(_LONGEST_WAIT_S, self._first_s * 2 ** min(pair.tries, 10)))


def _life(engine: Engine) -> _Life:
    return engine.life, engine.renamed
