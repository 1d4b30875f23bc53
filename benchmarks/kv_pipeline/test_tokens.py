"""Tokens a second from a fixed number of resident bytes of KV: does a larger batch, lent in part, bring more?

A decoder with real weights and attention on one core has `RESIDENT` sequences' worth of memory for KV. Of a larger
batch so many layers' KV is in a store behind a link that what stays, and two buffers of a layer, fit the same bytes.
The KV comes over the link one layer ahead; or attention goes to the KV, which needs no buffers. The time of a step is
the time between two tokens of each sequence (TPOT), so for each bound on it there is a batch that brings most tokens a
second. For each rate of the link this is compared with the batch, the share and the step that `kvstore plan pipeline
--resident-bytes` computes, from the bandwidth of the link, measured by reading and doing nothing else, and from the
steps of all batches without a lender, in the same turns: a line over their KV, whose slope is the time of reading and
computing one more byte. What copying costs computing (`--lost-share`) is the time of a step with nothing lent while
the link is kept busy and nobody uses what comes. Outputs must be equal whatever is lent.

Needs two cores, and root for the link (network namespaces).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.kv_pipeline.decoder import Shape
from benchmarks.kv_pipeline.lending import lent_layers, read_time
from benchmarks.kv_pipeline.rig import FETCHED, FULL_RATE, PUSHED, Rig, in_turn
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.planning.pipeline import BUFFERS, Hardware, largest_kv, plan_pipeline

TOKENS: Final = "tokens"
RESIDENT: Final = 8  # sequences whose KV fits the decoder's memory
BATCHES: Final = tuple(range(RESIDENT, 2 * RESIDENT + 1))
# Many layers, so that the buffers of two are little; KV for 8 sequences is half as large as the weights.
SHAPE: Final = Shape(layers=32, heads=8, batch=BATCHES[-1], context=192)
WANTED: Final = (0.2, 0.4, 0.8)  # of the resident KV that the link moves in a step; then as fast as it goes
BOUNDS: Final = (1.1, 1.25, 1.5)  # on the TPOT, in steps of the batch that fits without a lender
DEPTH: Final = BUFFERS - 1
ROUNDS: Final = 5


def lent_of(batch: int, resident_bytes: int, buffers: int) -> int | None:
    """-> the fewest layers that must be lent so that the rest of the KV fits, and the buffers; None: it never does."""
    layer_bytes = SHAPE.of_batch(batch).layer_bytes
    if SHAPE.layers * layer_bytes <= resident_bytes:
        return 0
    lent = SHAPE.layers + buffers - resident_bytes // layer_bytes
    return lent if lent <= SHAPE.layers else None


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", ROUNDS)
    if benchmark.lacks(unavailable(), missing_cores()):
        return 1
    with LimitedLink(FULL_RATE) as link, ExitStack() as stack:
        _measure(benchmark, Rig(SHAPE, link, stack), link)
    benchmark.finish(shape=msgspec.to_builtins(SHAPE), bounds=BOUNDS)
    return 0


def _measure(benchmark: Benchmark, rig: Rig, link: LimitedLink) -> None:
    batches = (BATCHES[0], BATCHES[-1]) if benchmark.quick else BATCHES
    rigs = {batch: rig.of_batch(batch) for batch in batches}
    resident_bytes = rigs[RESIDENT].shape.kv_bytes
    step_s = median(rigs[RESIDENT].lent(0, 0) for _ in range(benchmark.rounds))
    beside = rig.beside()
    rates = [*(wanted * resident_bytes / step_s for wanted in WANTED), FULL_RATE]
    for rate in rates[:1] if benchmark.quick else rates:
        link.set_rate(rate)
        # Enough to know the rate, without long waits.
        few = lent_layers(SHAPE, SHAPE.layers // 4)
        runs: dict[Any, Callable[[], float]] = {"link": partial(read_time, SHAPE, rig.client, few, rig.other_core)}
        runs |= {("alone", batch): partial(each.lent, 0, 0) for batch, each in rigs.items()}
        runs["beside copies"] = rigs[BATCHES[-1]].beside_copies
        lent: dict[str, dict[int, int]] = {FETCHED: {}, PUSHED: {}}
        for batch, each in rigs.items():
            for arm, buffers in ((FETCHED, BUFFERS), (PUSHED, 0)):
                layers = lent_of(batch, resident_bytes, buffers)
                if layers:
                    lent[arm][batch] = layers
                    run = partial(each.lent, layers, DEPTH) if arm == FETCHED else partial(each.pushed, layers, beside)
                    runs[arm, batch] = run
        found = in_turn(benchmark, runs)
        bytes_per_s = len(few) * SHAPE.layer_bytes / found["link"]
        # Of the same turns: the machine is not equally fast at all times.
        alone = {batch: found["alone", batch] for batch in rigs}
        slope, other_s = np.polyfit([each.shape.kv_bytes for each in rigs.values()], list(alone.values()), 1)
        memory = float(1 / slope)
        lost_share = max(0.0, 1 - alone[BATCHES[-1]] / found["beside copies"])
        hardware = Hardware(bytes_per_s, memory, float(other_s), 0.0, SHAPE.layers, lost_share)
        kv_bytes = largest_kv(resident_bytes, hardware)
        plan = plan_pipeline(kv_bytes, hardware) if kv_bytes is not None else None
        steps = {arm: {RESIDENT: alone[RESIDENT], **{n: found[arm, n] for n in lent[arm]}} for arm in lent}
        for arm, by_batch in steps.items():
            told = ", ".join(f"{batch}: {batch / seconds:.1f}" for batch, seconds in by_batch.items())
            console().print(f"link {bytes_per_s / 1e9:.2f} GB/s, {arm}, tokens/s by batch: {told}")
        benchmark.found(
            f"link {rate / 1e6:.0f} MB/s", group=TOKENS, link_bytes_per_s=bytes_per_s,
            resident_bytes=resident_bytes, memory_bytes_per_s=memory, other_s=float(other_s), layers=SHAPE.layers,
            sequence_bytes=SHAPE.layers * SHAPE.block_bytes, plan=msgspec.to_builtins(plan), plan_kv_bytes=kv_bytes,
            alone_s=alone, lost_share=lost_share, lent_layers=lent, step_s=steps,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
