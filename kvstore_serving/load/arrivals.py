"""When requests of a synthetic load are sent: a Poisson process, as independent users make it.

The times are drawn before the run, from a seed. So they cannot depend on what the server does, and two runs with one
seed send at the same times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.records import Planned


def poisson(rate_rps: float, count: int, seed: int) -> list[float]:
    """-> `count` times in seconds, the first at 0, with independent exponential gaps of mean 1 / `rate_rps`."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_rps, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def seed_of(seed: int, number: int) -> int:
    """-> the seed of a sweep's run. Sweeps with other seeds share none of them: the same prompts would be in the
    endpoint's cache."""
    return seed if not number else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def synthetic(
    rate_rps: float, requests: int, warmup: int, input_tokens: int, output_tokens: int, seed: int
) -> Iterator[Planned]:
    """Requests of fixed lengths whose prompts share nothing; the first `warmup` are not counted."""
    blocks = -(-input_tokens // HASHED_TOKENS)
    for index, at_s in enumerate(poisson(rate_rps, warmup + requests, seed)):
        own = range(index * blocks, (index + 1) * blocks)
        yield Planned(index, at_s, own, input_tokens, output_tokens, counted=index >= warmup)
