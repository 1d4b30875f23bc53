"""Measures how evenly keys and reads are spread over shards, how many keys move when a shard joins, and how both depend
on the length of runs.

A *run* is R consecutive keys of a chain, all placed on the shard of the first one. In the server's placement, R is 1.
Blocks of the trace have 512 tokens. `parts` is the number of smaller blocks, each with its own key, into which a block
is cut, as for an engine with smaller blocks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_sim.cluster import Numbers
from benchmarks.eviction.traces import Chain, Keys, Trace
from kvstore.cluster.placement import Placement

RUNS: Final = (1, 4, 16, 64)
RUN_SHARDS: Final = (8, 64, 256)
PARTS: Final = (1, 32)  # one key for 512 tokens, or one for 16 tokens
TRACE_BLOCK_TOKENS: Final = 512
UNIFORM_KEYS: Final = 1_000_000


def shards(count: int) -> Placement:
    """Return shards of equal weight, each on a separate node."""
    return Placement([f"node-{number}/0" for number in range(count)], [1.0] * count)


def max_to_mean(counts: npt.NDArray[np.int64]) -> float:
    """Return the fullest shard's load, as a multiple of the mean load."""
    return float(counts.max() / counts.mean())


class Uniform(NamedTuple):
    """The balance of keys that are requested equally often."""

    max_to_mean: float
    moved_by_join: float
    fair: float  # the share that a joining node should get: 1 / (count + 1)


def uniform(count: int, keys: int) -> Uniform:
    """Return the balance of random keys on `count` shards."""
    drawn = np.random.default_rng(count).integers(0, 256, (keys, 8), dtype=np.uint8)
    owners = shards(count).owners(drawn)
    moved = float((owners != shards(count + 1).owners(drawn)).mean())
    return Uniform(max_to_mean(np.bincount(owners, minlength=count)), moved, 1 / (count + 1))


class OnTrace(NamedTuple):
    """The balance of a trace. `reads`: the balance if each reference counts as a read. `asked`: the number of shards to
    which requests for a prompt are sent."""

    keys: float
    reads: float
    asked_mean: float
    asked_p95: float
    hottest_share: float  # the share of all reads that go to the most read shard


def on_trace(trace: Trace, count: int, run: int, parts: int) -> OnTrace:
    """Return the balance of a trace: the keys and reads of each shard, and the number of shards that each prompt
    uses."""
    first = _first_of_run(trace, run, parts)
    keys = _part_keys(trace.distinct * parts)
    owners = shards(count).owners(keys)[first].reshape(trace.distinct, parts)
    uses = np.bincount(np.concatenate(trace.chains), minlength=trace.distinct)
    reads = np.bincount(owners.ravel(), weights=np.repeat(uses, parts), minlength=count)
    asked = np.array([len(np.unique(owners[chain])) for chain in trace.chains if len(chain)])
    return OnTrace(
        keys=max_to_mean(np.bincount(owners.ravel(), minlength=count)),
        reads=max_to_mean(reads.astype(np.int64)),
        asked_mean=float(asked.mean()),
        asked_p95=float(np.percentile(asked, 95)),
        hottest_share=float(reads.max() / reads.sum()),
    )


def placing_keys(trace: Trace, run: int) -> Keys:
    """Return, for each block, the key of its run's first block."""
    return trace.keys[_first_of_run(trace, run, 1)]


def _part_keys(count: int) -> Keys:
    """Return random keys for the parts of blocks. They replace hashes."""
    return np.random.default_rng(count).integers(0, 256, (count, 8), dtype=np.uint8)


def _first_of_run(trace: Trace, run: int, parts: int) -> Numbers:
    """Return, for each part (block * parts + part), the first part of its run. A part always belongs to the same run,
    because a block always has the same prefix."""
    first: Numbers = np.empty(trace.distinct * parts, dtype=np.intp)
    seen = np.zeros(trace.distinct, dtype=np.bool_)
    for chain in trace.chains:
        if not seen[chain].all():
            first_of_chain = _chain_parts(chain, parts)
            first[first_of_chain] = first_of_chain[np.arange(len(first_of_chain)) // run * run]
            seen[chain] = True
    return first


def _chain_parts(chain: Chain, parts: int) -> Numbers:
    numbers: Numbers = (chain.astype(np.intp)[:, None] * parts + np.arange(parts)).ravel()
    return numbers
