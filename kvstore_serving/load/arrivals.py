"""The times of requests of a synthetic load: a Poisson process, as from independent users.

The times are drawn from a seed before the run. So they cannot depend on what the server does, and two runs with the
same seed send at the same times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.records import Planned


def poisson(rate_rps: float, count: int, seed: int) -> list[float]:
    """Return `count` times in seconds. The first is 0, and the gaps are independent and exponential with mean 1 /
    `rate_rps`."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_rps, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def seed_of(seed: int, number: int) -> int:
    """Return the seed of one run of a sweep. All runs of a sweep, and of sweeps with other seeds, have different seeds.
    Otherwise their prompts would already be in the endpoint's cache."""
    return seed if not number else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def synthetic(
    rate_rps: float, requests: int, warmup: int, input_tokens: int, output_tokens: int, seed: int
) -> Iterator[Planned]:
    """Yield requests of fixed lengths, whose prompts have no common beginning. The first `warmup` requests are not
    counted."""
    blocks = -(-input_tokens // HASHED_TOKENS)
    for index, at_s in enumerate(poisson(rate_rps, warmup + requests, seed)):
        own = range(index * blocks, (index + 1) * blocks)
        yield Planned(index, at_s, own, input_tokens, output_tokens, counted=index >= warmup)
