"""Measures whether a larger batch, with a part of its KV lent, gives more tokens a second for the same resident KV
bytes.

A decoder with real weights and attention on one core has memory for the KV of `RESIDENT` sequences. For a larger batch,
some layers' KV is in a store behind a link. Enough layers are lent that the other layers' KV and two one-layer buffers
fit the same memory. Either the KV is read over the link one layer ahead, or the query is sent to the KV, which needs no
buffers. The time of a step is the time between two tokens of a sequence (TPOT). So for each bound on TPOT there is a
batch that gives the most tokens a second.

For each rate of the link, the results are compared with the batch, the share and the step that `kvstore plan pipeline
--resident-bytes` computes. Its inputs are the bandwidth of the link, measured while nothing else runs, and the times of
the steps of all batches without a lender, measured in the same rounds. A line is fitted to these times by the bytes of
KV; its slope is the time to read one more byte and compute with it. The computing time that copies cost
(`--lost-share`) is measured by a step with nothing lent while the link is kept busy with copies that are not used.
Outputs must not depend on what is lent.

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
# Many layers, so that two one-layer buffers are small. The KV of 8 sequences is half as large as the weights.
SHAPE: Final = Shape(layers=32, heads=8, batch=BATCHES[-1], context=192)
WANTED: Final = (0.2, 0.4, 0.8)  # shares of the resident KV that the link moves in a step; then at full rate
BOUNDS: Final = (1.1, 1.25, 1.5)  # bounds on TPOT: multiples of the step of the batch that fits without a lender
DEPTH: Final = BUFFERS - 1
ROUNDS: Final = 5


def lent_of(batch: int, resident_bytes: int, buffers: int) -> int | None:
    """Return the smallest number of layers to lend so that the other layers' KV and the buffers fit; None if no number
    is enough."""
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
        # Enough to measure the rate, without long waits.
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
        # From the same rounds, because the machine's speed changes over time.
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
