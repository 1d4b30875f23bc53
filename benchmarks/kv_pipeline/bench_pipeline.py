"""Measures how much KV of a decode loop can be lent to a kvstore-server behind a link without making a step longer.

A decoder with real weights and attention runs on one core. The server, the kernel and the reading thread share the
other core. A fraction alpha of the layers, evenly spread, has its KV in the store. For each ratio of KV to weights and
each rate of the link, alpha is raised to one half, or to a few times alpha*. The *knee*, where a step begins to take
longer, is compared with

    alpha* = B_link T_step / M

(`kvstore plan pipeline`). B_link is measured by reading all layers over the same link while nothing else runs. T_step
is measured without lending. Rates are chosen so that alpha* lies between 0 and 1. *Serial* reads a layer when the
decoder needs it, and depths 1 and 2 read one and two layers ahead. The decoder's output must not depend on what is
lent, not even in its last bit. With *pushed*, the query goes to the KV and partial attention comes back, so the output
may differ by rounding.

Needs two cores, and root for the link (network namespaces).
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.kv_pipeline.lending import lent_layers, read_time
from benchmarks.kv_pipeline.rig import FULL_RATE, Rig, in_turn, of_ratios
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.planning.pipeline import Hardware, plan_pipeline

KNEE: Final = "knee"
MODES: Final = "modes"
WANTED: Final = (0.08, 0.12, 0.18, 0.25, 0.45)  # the link's rates are chosen to give these alpha*
ROUNDS: Final = 7


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", ROUNDS)
    if benchmark.lacks(unavailable(), missing_cores()):
        return 1
    for name, rig, link in of_ratios(benchmark):
        _knees(benchmark, name, rig, link)
        link.set_rate(FULL_RATE)
        _modes(benchmark, name, rig)
    benchmark.finish()
    return 0


def _knees(benchmark: Benchmark, name: str, rig: Rig, limited: LimitedLink) -> None:
    shape, layers = rig.shape, rig.shape.layers
    alone = median(rig.lent(0, 1) for _ in range(benchmark.rounds))
    for wanted in WANTED[:1] if benchmark.quick else WANTED:
        limited.set_rate(wanted * shape.kv_bytes / alone)
        # Above this fraction a step takes as long as its transfers, which is many times its own time.
        shares = [lent for lent in range(0, layers + 1, 2) if lent <= layers * max(0.5, 2.5 * wanted)]
        runs: dict[Any, Any] = {lent: (lambda lent=lent: rig.lent(lent, 1)) for lent in shares}
        every = lent_layers(shape, layers)
        runs["all"] = partial(read_time, shape, rig.client, every, rig.other_core)
        found = in_turn(benchmark, runs)
        step_s = found[0]
        # The rate includes the time to start each read: one thread reads the layers one after the other.
        link = shape.kv_bytes / found["all"]
        plan = plan_pipeline(shape.kv_bytes, Hardware(link, shape.kv_bytes / step_s, 0.0, 0.0))
        curve = {lent / layers: found[lent] for lent in shares}
        measured = knee(curve)
        worst = max(curve[alpha] / max(alpha * shape.kv_bytes / link, step_s) for alpha in curve if alpha)
        console().print(
            f"KV {name} x weights, link {link / 1e9:.2f} GB/s: step {step_s * 1e3:.1f} ms, alpha* {plan.alpha:.1%}, "
            f"knee {measured:.1%}, at worst {worst:.2f} x max(copy, compute)"
        )
        benchmark.found(
            f"{name}, {wanted:g}", group=KNEE, ratio=name, kv_bytes=shape.kv_bytes, weight_bytes=shape.weight_bytes,
            link_bytes_per_s=link, step_s=step_s, alpha=plan.alpha, knee=measured,
            curve={f"{alpha:.4f}": seconds for alpha, seconds in curve.items()}, worst_to_max=worst,
        )  # fmt: skip


def knee(curve: dict[float, float]) -> float:
    """Return the lent share at which a step begins to take longer: where the line through the longer steps meets the
    level of the others.

    curve: lent share -> seconds of a step."""
    level = curve[0.0]
    beyond = [(alpha, seconds) for alpha, seconds in curve.items() if seconds > 1.15 * level]
    if len(beyond) < 2:
        return 1.0
    slope, offset = np.polyfit([alpha for alpha, _ in beyond], [seconds for _, seconds in beyond], 1)
    return float(min(1.0, max(0.0, (level - offset) / slope)))


def _modes(benchmark: Benchmark, name: str, rig: Rig) -> None:
    """Measure serial, depths 1 and 2, shared memory, and attention beside the KV, with half of the layers lent."""
    shape, lent = rig.shape, rig.shape.layers // 2
    near, beside = rig.connect(True), rig.beside()
    runs: dict[Any, Any] = {
        "nothing lent": lambda: rig.lent(0, 1),
        "serial": lambda: rig.lent(lent, 0),
        "depth 1": lambda: rig.lent(lent, 1),
        "depth 2": lambda: rig.lent(lent, 2),
        "shared memory, serial": lambda: rig.lent(lent, 0, near),
        "shared memory, depth 1": lambda: rig.lent(lent, 1, near),
        "shared memory, depth 2": lambda: rig.lent(lent, 2, near),
        "all layers, shared memory, depth 1": lambda: rig.lent(shape.layers, 1, near),
        "attention beside the KV": lambda: rig.pushed(lent, beside),
    }
    found = in_turn(benchmark, runs)
    alone = found["nothing lent"]
    for mode, seconds in found.items():
        console().print(f"KV {name} x weights, half lent, {mode}: {seconds * 1e3:.1f} ms, {seconds / alone:.2f} x")
    benchmark.found(
        f"{name}, modes", group=MODES, ratio=name, alpha=lent / shape.layers, step_s=found,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
