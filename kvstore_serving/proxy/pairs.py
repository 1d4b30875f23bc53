"""Which prefill engines' work does not arrive at which decode engines, by what decode engines say that they found.

That happens if the two name blocks differently, as after a reset of one of them, or with other block sizes, or if their
ways to the store differ: each prompt that is split is then computed twice, and waited for. After `_ENOUGH` such prompts
in a row the pair is left alone for a time, which doubles each time that a single prompt, sent then, is lost again. A
prompt that arrives, a restart of either engine, or another name for its blocks, ends it.

One event loop. Bounded: engines that are in the pools, in pairs.
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
_WAITS: Final = 10.0  # times the back-off of engines, at first
_LONGEST_WAIT_S: Final = 300.0


_Life: TypeAlias = "tuple[int, int]"  # of an engine, and of the names of its blocks


@dataclass
class _Pair:
    lives: tuple[_Life, _Life]
    lost: int = 0  # prompts in a row
    tries: int = 0  # prompts that were to show whether it is of use again
    until: float = 0.0  # without prompts


class Pairs:
    """See above. `backoff_s`: of engines."""

    def __init__(self, backoff_s: float) -> None:
        self._first_s = backoff_s * _WAITS
        self._pairs: dict[tuple[str, str], _Pair] = {}  # the URLs of P and D

    def off(self, decode: Engine, engines: Mapping[str, Engine]) -> frozenset[str]:
        """-> which of these engines are not to prefill for this decode engine now."""
        lives, now = {url: _life(engine) for url, engine in engines.items()}, time.monotonic()
        self._pairs = {
            (p, d): pair for (p, d), pair in self._pairs.items() if (lives.get(p), lives.get(d)) == pair.lives
        }
        return frozenset(
            p for (p, d), pair in self._pairs.items() if d == decode.url and pair.lost >= _ENOUGH and now < pair.until
        )

    def taken(self, prefill: Engine, decode: Engine) -> None:
        """A prompt goes to this pair. If it shows whether the pair is of use again, no other goes meanwhile."""
        pair = self._pairs.get((prefill.url, decode.url))
        if pair is not None and pair.lost >= _ENOUGH:
            pair.tries += 1
            pair.until = time.monotonic() + self._wait_s(pair)

    def lost(self, prefill: Engine, decode: Engine) -> bool:
        """What P computed D did not find. -> whether the pair is left alone from now on."""
        lives = _life(prefill), _life(decode)
        pair = self._pairs.get((prefill.url, decode.url))
        if pair is None or pair.lives != lives:
            pair = self._pairs[prefill.url, decode.url] = _Pair(lives)
        pair.lost += 1
        if pair.lost >= _ENOUGH:
            wait_s = self._wait_s(pair)
            pair.until = time.monotonic() + wait_s
            log.warning(
                "what %s prefills does not arrive at %s, %d times in a row: the pair is not used for %.0f s. Do both "
                "use one store, and the same namespace? After a reset of one, reset the other (docs/proxy.md)",
                prefill.url,
                decode.url,
                pair.lost,
                wait_s,
            )
        return pair.lost >= _ENOUGH

    def arrived(self, prefill: Engine, decode: Engine) -> None:
        """D found what P computed."""
        pair = self._pairs.pop((prefill.url, decode.url), None)
        if pair is not None and pair.lost >= _ENOUGH:
            log.info("what %s prefills arrives at %s again", prefill.url, decode.url)

    def status(self) -> list[dict[str, Any]]:
        """The pairs that are left alone."""
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
