"""The share of prompts' tokens that a store of a given size has, from a result of `benchmarks.eviction`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvstore_serving.load.prompts import HASHED_TOKENS

POLICY: Final = "default"
NEIGHBOURS: Final = 2  # the number of measured sizes on each side of the assumed size


class CurveError(ValueError):
    """The curve cannot be read; the message says what is wrong."""


@dataclass(frozen=True)
class HitCurve:
    """The hit rates of stores of several sizes. Sizes are in tokens, in rising order."""

    tokens: Sequence[float]
    hit_rates: Sequence[float]

    def at(self, tokens: float) -> float:
        """Return the interpolated hit rate of a store of this size. It is 0 for no store, and the last measured rate
        for larger stores."""
        return float(np.interp(tokens, [0.0, *self.tokens], [0.0, *self.hit_rates]))

    def around(self, tokens: float) -> list[float]:
        """Return this size and the measured sizes next to it, `NEIGHBOURS` on each side, in rising order."""
        smaller = [each for each in self.tokens if each < tokens][-NEIGHBOURS:]
        larger = [each for each in self.tokens if each > tokens][:NEIGHBOURS]
        return [*smaller, tokens, *larger]


def read_curve(path: Path) -> HitCurve:
    """Read the curve of the trace that was replayed. Raises `CurveError`."""
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
        found = [each["parameters"] for each in document["cases"] if each["parameters"].get("group") == "trace"]
        blocks, rates = found[0]["blocks"], found[0]["hit_rate"][POLICY]
        block_tokens = float(found[0].get("block_tokens", HASHED_TOKENS))  # old results do not have it
        return HitCurve([float(each) * block_tokens for each in blocks], [float(each) for each in rates])
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CurveError(
            f"{path}: not a result of `python -m benchmarks.eviction --trace FILE --json FILE`: {error!r}"
        ) from error
