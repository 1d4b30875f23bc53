"""Measures whether a step is shorter if the query is sent to the KV or if the KV is fetched, over the same links.

The decoder, its KV and the links are those of `benchmarks.kv_pipeline.bench_pipeline`. The KV of one eighth of the
layers, and then of half of them, is in the store. Either the KV is read over the link, two layers ahead, or the query
is sent over the link, and partial attention with its log-sum-exp comes back and is merged. Both are measured in turn at
each rate of the link. Bytes are counted at the link. If copying alone would take longer than `LONGEST` steps, the step
is not measured, and the time of copying is used as a lower bound.

Needs two cores, and root for the link (network namespaces).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

from benchmarks.kv_pipeline.lending import lent_layers, read_time
from benchmarks.kv_pipeline.rig import ARMS, FETCHED, FULL_RATE, PUSHED, Rig, in_turn, of_ratios
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.report import console

BY_ARM: Final = "arms"
SHARES: Final = (1 / 8, 1 / 2)  # shares of the layers whose KV is in the store
WANTED: Final = (0.005, 0.02, 0.08, 0.18, 0.45)  # shares of the KV that the link moves in a step; then at full rate
LONGEST: Final = 8.0
DEPTH: Final = 2
ROUNDS: Final = 5


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", ROUNDS)
    if benchmark.lacks(unavailable(), missing_cores()):
        return 1
    for name, rig, link in of_ratios(benchmark):
        _measure(benchmark, name, rig, link)
    benchmark.finish(depth=DEPTH)
    return 0


def _measure(benchmark: Benchmark, name: str, rig: Rig, link: LimitedLink) -> None:
    shape, beside = rig.shape, rig.beside()
    alone = median(rig.lent(0, 0) for _ in range(benchmark.rounds))
    rates = [*(wanted * shape.kv_bytes / alone for wanted in WANTED), FULL_RATE]
    for rate in rates[2:3] if benchmark.quick else rates:
        link.set_rate(rate)
        crossed: dict[Any, list[tuple[int, int]]] = {}
        few = lent_layers(shape, 2)  # enough to measure the rate, and quick even over a slow link
        runs: dict[Any, Callable[[], float]] = {
            "alone": lambda: rig.lent(0, 0),
            "few": partial(read_time, shape, rig.client, few, rig.other_core),
        }
        for share in SHARES:
            lent = round(share * shape.layers)
            if share * shape.kv_bytes / rate <= LONGEST * alone:
                fetch = partial(rig.lent, lent, DEPTH)
                runs[share, FETCHED] = _counting(link, crossed.setdefault((share, FETCHED), []), fetch)
            push = partial(rig.pushed, lent, beside)
            runs[share, PUSHED] = _counting(link, crossed.setdefault((share, PUSHED), []), push)
        found = in_turn(benchmark, runs)
        bytes_per_s = len(few) * shape.layer_bytes / found["few"]
        for share in SHARES:
            arms = [arm for arm in ARMS if (share, arm) in runs]
            per_step = {
                arm: [median(way) / shape.steps for way in zip(*crossed[share, arm], strict=True)] for arm in arms
            }
            steps = {arm: found[share, arm] for arm in arms}
            told = ", ".join(f"{arm} {seconds / found['alone']:.2f} x" for arm, seconds in steps.items())
            console().print(f"KV {name} x weights, link {bytes_per_s / 1e6:.1f} MB/s, {share:.1%} lent: {told}")
            benchmark.found(
                f"{name}, {rate / 1e6:.0f} MB/s, {share:g}", group=BY_ARM, ratio=name, alpha=share,
                kv_bytes=shape.kv_bytes, link_bytes_per_s=bytes_per_s, alone_s=found["alone"], step_s=steps,
                crossed_bytes=per_step,
            )  # fmt: skip


def _counting(link: LimitedLink, crossed: list[tuple[int, int]], run: Callable[[], float]) -> Callable[[], float]:
    """Return a run that also appends the bytes that crossed the link meanwhile, each way."""

    def counted() -> float:
        sent, received = link.crossed()
        seconds = run()
        now = link.crossed()
        crossed.append((now[0] - sent, now[1] - received))
        return seconds

    return counted


if __name__ == "__main__":
    sys.exit(main())
