"""The share of prompts that a store has, by its size: from a result of `benchmarks.eviction`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvstore_serving.load.prompts import HASHED_TOKENS

POLICY: Final = "default"
NEIGHBOURS: Final = 2  # measured sizes on each side of the one that is assumed


class CurveError(ValueError):
    """The curve cannot be read; the message says what is wrong."""


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of stores of these sizes, in tokens, rising."""

    tokens: Sequence[float]
    hit_rates: Sequence[float]

    def at(self, tokens: float) -> float:
        """-> the hit rate of a store of this size, between the measured ones; 0 for none, the last one beyond."""
        return float(np.interp(tokens, [0.0, *self.tokens], [0.0, *self.hit_rates]))

    def around(self, tokens: float) -> list[float]:
        """-> this size between the measured ones next to it, `NEIGHBOURS` on each side, rising."""
        smaller = [each for each in self.tokens if each < tokens][-NEIGHBOURS:]
        larger = [each for each in self.tokens if each > tokens][:NEIGHBOURS]
        return [*smaller, tokens, *larger]


def read_curve(path: Path) -> HitCurve:
    """The curve of the trace that was replayed. Raises `CurveError`."""
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
        found = [each["parameters"] for each in document["cases"] if each["parameters"].get("group") == "trace"]
        blocks, rates = found[0]["blocks"], found[0]["hit_rate"][POLICY]
        block_tokens = float(found[0].get("block_tokens", HASHED_TOKENS))  # results of old have none
        return HitCurve([float(each) * block_tokens for each in blocks], [float(each) for each in rates])
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CurveError(
            f"{path}: not a result of `python -m benchmarks.eviction --trace FILE --json FILE`: {error!r}"
        ) from error
