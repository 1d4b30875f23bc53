"""Parts and mixtures of a trace. A policy that was tuned with the whole trace has not seen this traffic.

A session consists of all requests that begin with the same blocks, up to the first block that only one session has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from benchmarks.eviction.synthetic import Request, agents, mixed, new_only
from benchmarks.eviction.traces import Trace

_SHARED: Final = 50  # a block in more requests than this belongs to a system prompt of several sessions


def parts_of(trace: Trace, seed: int = 0) -> Iterator[Trace]:
    """Yield three thirds of the trace by time, a half and a sixth of its sessions, and mixtures with other traces."""
    requests = [chain.tolist() for chain in trace.chains]
    third = len(requests) // 3
    made: dict[str, Callable[[], Iterable[Request]]] = {
        "first third": lambda: requests[:third],
        "second third": lambda: requests[third : 2 * third],
        "last third": lambda: requests[2 * third :],
        "half its sessions": lambda: _sessions(requests, 1 / 2, seed),
        "a sixth of its sessions": lambda: _sessions(requests, 1 / 6, seed),
        "two halves at once": lambda: mixed(
            seed, iter(requests[: len(requests) // 2]), iter(requests[len(requests) // 2 :])
        ),
        "with agents": lambda: mixed(seed, iter(requests), agents(seed + 40, len(requests) // 3)),
        "with new prompts": lambda: mixed(seed, iter(requests), new_only(seed + 41, len(requests) // 2)),
    }
    for name, make in made.items():
        yield Trace.of(f"{trace.name}, {name}{f', seed {seed}' if seed else ''}", make())


def _sessions(requests: Sequence[Request], share: float, seed: int) -> Iterator[Request]:
    """Return the requests of a random `share` of the sessions."""
    uses: dict[int, int] = {}
    for request in requests:
        for block in request:
            uses[block] = uses.get(block, 0) + 1
    for request in requests:
        own = next((block for block in request if uses[block] <= _SHARED), 0)
        if random.Random(own << 16 ^ seed).random() < share:
            yield request
