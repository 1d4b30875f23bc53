"""A decode loop whose KV lives in part in a kvstore-server behind a link: how much may leave without a longer step?

A decoder with real weights and attention runs on one core; server, kernel and the thread that reads have the other
one. The share alpha of the layers has its KV in the store, evenly spread. For each ratio of KV to weights, and each
rate of the link, alpha grows to one half, or to a few times alpha*: the *knee* is where a step begins to take longer,
and is compared with

    alpha* = B_link T_step / M

(`kvstore plan pipeline`), with B_link measured by reading all layers over the same link and doing nothing else, and
T_step without lending. Rates are chosen so that alpha* lies between 0 and 1. *Serial* reads a layer when it is needed;
depths 1 and 2 read ahead. What the decoder puts out must be equal to the last bit whatever is lent. *Pushed*:
attention goes to the KV, and comes back as partial attention; its output is equal but for rounding.

Needs two cores, and root for the link (network namespaces).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.kv_pipeline.decoder import Decoder, Shape
from benchmarks.kv_pipeline.lending import (
    TIMEOUT_S,
    Fetched,
    Pushed,
    Resident,
    fill,
    lent_layers,
    namespace,
    read_time,
)
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, console
from kvstore_client import KVStoreClient
from kvstore_serving.planning.pipeline import plan_pipeline

KNEE: Final = "knee"
MODES: Final = "modes"
RATIOS: Final = {"0.25": (4, 288), "0.5": (8, 288), "1": (8, 576)}  # batch and context for KV to weights
WANTED: Final = (0.08, 0.12, 0.18, 0.25, 0.45)  # alpha* that the rates of the link are chosen for
FULL_RATE: Final = 4e9
ROUNDS: Final = 7


class Rig:
    """A decoder, its KV, and the store that has a copy of it behind a link."""

    def __init__(self, shape: Shape, link: LimitedLink, stack: ExitStack) -> None:
        self.shape, self.link = shape, link
        self.own_core, self.other_core = sorted(os.sched_getaffinity(0))[:2]
        self.decoder, self.resident = Decoder(shape), Resident(shape)
        flags = ("--host", link.address, "--insecure")
        # Other processes are on the other core, as this one's threads that read.
        prefix = [*link.command, "taskset", "-c", str(self.other_core)]
        self.endpoint = stack.enter_context(kvstore_server(shape.kv_bytes, flags=flags, prefix=prefix))
        self.client = stack.enter_context(self.connect(False))
        link.set_rate(FULL_RATE)
        fill(shape, self.resident, self.client)
        stack.callback(os.sched_setaffinity, 0, {self.own_core, self.other_core})
        os.sched_setaffinity(0, {self.own_core})
        self.expected = self.decoder.run(self.resident.attend)

    def connect(self, shared: bool) -> KVStoreClient:
        """A client whose threads are on the other core."""
        os.sched_setaffinity(0, {self.other_core})
        try:
            return KVStoreClient(self.endpoint, namespace(self.shape), timeout_s=TIMEOUT_S, shared_memory=shared)
        finally:
            os.sched_setaffinity(0, {self.own_core})

    def steps(self, lender: Resident | Fetched | Pushed, exact: bool = True) -> float:
        """-> seconds of a step: the median after the first one. Raises `AssertionError` for another output."""
        times: list[float] = []
        begin = time.perf_counter()

        def stepped() -> None:
            nonlocal begin
            now = time.perf_counter()
            times.append(now - begin)
            begin = now

        output = self.decoder.run(lender.attend, stepped)
        if exact:
            np.testing.assert_array_equal(output, self.expected)
        else:
            np.testing.assert_allclose(output, self.expected, rtol=2e-3, atol=2e-3)
        return median(times[1:])

    def lent(self, lent: int, depth: int, client: KVStoreClient | None = None) -> float:
        """-> seconds of a step when so many layers are lent."""
        if not lent:
            return self.steps(self.resident)
        layers = lent_layers(self.shape, lent)
        with Fetched(self.shape, self.resident, layers, client or self.client, depth, self.other_core) as fetched:
            return self.steps(fetched)


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", ROUNDS)
    reason = unavailable() or ("" if len(os.sched_getaffinity(0)) >= 2 else "two cores are needed")
    if reason:
        benchmark.say(f"nothing is measured: {reason}")
        return 1
    with LimitedLink(FULL_RATE) as link:
        for name, (batch, context) in list(RATIOS.items())[: 1 if benchmark.quick else None]:
            with ExitStack() as stack:
                rig = Rig(Shape(batch=batch, context=context), link, stack)
                _knees(benchmark, name, rig)
                _modes(benchmark, name, rig)
    benchmark.finish()
    return 0


def _rounds(benchmark: Benchmark, runs: dict[Any, Any]) -> dict[Any, float]:
    """-> the median of each, which took turns."""
    found: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(benchmark.rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {name: median(values) for name, values in found.items()}


def _knees(benchmark: Benchmark, name: str, rig: Rig) -> None:
    shape, layers = rig.shape, rig.shape.layers
    alone = median(rig.lent(0, 1) for _ in range(benchmark.rounds))
    for wanted in WANTED[:1] if benchmark.quick else WANTED:
        rig.link.set_rate(wanted * shape.kv_bytes / alone)
        # Beyond this a step is nothing but the time of the link, and takes many times as long.
        shares = [lent for lent in range(0, layers + 1, 2) if lent <= layers * max(0.5, 2.5 * wanted)]
        runs: dict[Any, Any] = {lent: (lambda lent=lent: rig.lent(lent, 1)) for lent in shares}
        every = lent_layers(shape, layers)
        runs |= {
            "all": partial(read_time, shape, rig.client, every, rig.other_core),
        }
        found = _rounds(benchmark, runs)
        step_s = found[0]
        # What starting each read takes is in the rate: layers are read one after the other, by one thread.
        link = shape.kv_bytes / found["all"]
        plan = plan_pipeline(shape.kv_bytes, link, shape.kv_bytes / step_s, 0.0, 0.0)
        curve = {lent / layers: found[lent] for lent in shares}
        measured = knee(curve)
        worst = max(curve[alpha] / max(alpha * shape.kv_bytes / link, step_s) for alpha in curve if alpha)
        console().print(
            f"KV {name} x weights, link {link / 1e9:.2f} GB/s: step {step_s * 1e3:.1f} ms, alpha* {plan.alpha:.1%}, "
            f"knee {measured:.1%}, at worst {worst:.2f} x max(copy, compute)"
        )
        benchmark.cases.append(
            Case(
                name=f"{name}, {wanted:g}", seconds={}, moved={}, limits={},
                parameters={
                    "group": KNEE, "ratio": name, "kv_bytes": shape.kv_bytes, "weight_bytes": shape.weight_bytes,
                    "link_bytes_per_s": link, "step_s": step_s, "alpha": plan.alpha,
                    "knee": measured, "curve": {f"{alpha:.4f}": seconds for alpha, seconds in curve.items()},
                    "worst_to_max": worst,
                },
            )
        )  # fmt: skip


def knee(curve: dict[float, float]) -> float:
    """-> where a step begins to take longer: the line through the steps that do, and the level of those that do not,
    meet.

    curve: share that is lent -> seconds of a step."""
    level = curve[0.0]
    beyond = [(alpha, seconds) for alpha, seconds in curve.items() if seconds > 1.15 * level]
    if len(beyond) < 2:
        return 1.0
    slope, offset = np.polyfit([alpha for alpha, _ in beyond], [seconds for _, seconds in beyond], 1)
    return float(min(1.0, max(0.0, (level - offset) / slope)))


def _modes(benchmark: Benchmark, name: str, rig: Rig) -> None:
    """Serial, depths 1 and 2, shared memory, and attention beside the KV, with half of the layers lent."""
    shape, lent = rig.shape, rig.shape.layers // 2
    layers = lent_layers(shape, lent)
    rig.link.set_rate(FULL_RATE)
    with ExitStack() as stack:
        near = stack.enter_context(rig.connect(True))
        pushed = stack.enter_context(Pushed(shape, rig.resident, layers, rig.endpoint, rig.other_core))
        runs: dict[Any, Any] = {
            "nothing lent": lambda: rig.lent(0, 1),
            "serial": lambda: rig.lent(lent, 0),
            "depth 1": lambda: rig.lent(lent, 1),
            "depth 2": lambda: rig.lent(lent, 2),
            "shared memory, serial": lambda: rig.lent(lent, 0, near),
            "shared memory, depth 1": lambda: rig.lent(lent, 1, near),
            "shared memory, depth 2": lambda: rig.lent(lent, 2, near),
            "all layers, shared memory, depth 1": lambda: rig.lent(shape.layers, 1, near),
            "attention beside the KV": lambda: rig.steps(pushed, exact=False),
        }
        found = _rounds(benchmark, runs)
    alone = found["nothing lent"]
    for mode, seconds in found.items():
        console().print(f"KV {name} x weights, half lent, {mode}: {seconds * 1e3:.1f} ms, {seconds / alone:.2f} x")
    benchmark.cases.append(
        Case(
            name=f"{name}, modes", seconds={}, moved={}, limits={},
            parameters={
                "group": MODES, "ratio": name, "alpha": lent / shape.layers, "step_s": found,
                "sent_bytes": {"fetched": lent * shape.layer_bytes, "pushed": _pushed_bytes(shape, lent)},
            },
        )
    )  # fmt: skip


def _pushed_bytes(shape: Shape, lent: int) -> int:
    """Queries there, and values with two numbers a head back."""
    return lent * shape.batch * shape.heads * (2 * shape.head_size + 2) * 4


if __name__ == "__main__":
    sys.exit(main())
