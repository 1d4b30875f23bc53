"""The tables of the KV pipeline in docs/planning-validation.md, each a function of the results; `benchmarks.draw` makes
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.kv_pipeline.bench_pipeline import KNEE, MODES
from benchmarks.kv_pipeline.bench_pushed import BY_ARM
from benchmarks.kv_pipeline.bench_tokens import BOUNDS, RESIDENT, TOKENS
from benchmarks.kv_pipeline.rig import ARMS, FETCHED, PUSHED
from benchmarks.render.cells import Cell, Row, cases
from benchmarks.render.tables import Table, markdown, section
from benchmarks.results_reader import CaseResult, Result, parameters_of
from kvstore_serving.planning.pipeline import BUFFERS, Hardware, largest_kv, plan_pipeline

PIPELINE: Final = "bench_pipeline"
PIPELINE_PUSHED: Final = "bench_pushed"
PIPELINE_TOKENS: Final = "bench_tokens"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.2f} GB/s"


def _chart(what: str, name: str) -> str:
    """A chart that is shown together with its table."""
    return f"![{what}](charts/planning-{name}.svg)"


def modes(result: Result) -> str:
    """The cost of lending half of the layers, by the way they are read."""
    cases = result.group(MODES)
    names = list(cases[0].parameters["step_s"])

    def cell(case: CaseResult, name: str) -> str:
        steps = case.parameters["step_s"]
        return f"{steps[name] * 1e3:.1f} ms, {steps[name] / steps['nothing lent']:.2f} x"

    rows = [(name, *(cell(case, name) for case in cases)) for name in names]
    return markdown(("", *(f"KV {case.parameters['ratio']} x weights" for case in cases)), rows)


# GB/s of memory and of NVLink, from the reply that objects to the proposal (DistServe's issue 3).
_REPLY: Final = {
    "A100 40G SXM": (1560, 600),
    "A100 80G SXM": (2040, 600),
    "H100 80G SXM": (3360, 900),
    "B100": (8000, 1800),
}
_MEMORY: Final = 1.55e12  # bytes/s of an A100 80G, as measured in that issue
_RESIDENT: Final = 40e9  # bytes of memory for KV
_WEIGHTS_S: Final = 0.017  # seconds to read 26 GB of weights
_LINKS: Final = {
    "A100 40G's ratio": (_MEMORY / 2.6,),
    "A100 80G's ratio": (_MEMORY / 3.4,),
    "H100's ratio": (_MEMORY / 3.73,),
    "B100's ratio": (_MEMORY / 4.44,),
    "measured both ways, GPUs 4 to 7": (518e9,),
    "measured both ways": (420e9,),
    "measured one way": (272e9,),
    "PCIe 4.0 x16": (25e9,),
    "without P2P": (20e9,),
    "100 Gbit/s": (12.5e9,),
}


def gpus() -> str:
    """The GPUs named in the reply to the proposal, and what the reply's formula gives without the times that it adds to
    the copies."""
    rows = [
        (
            gpu,
            f"{memory}",
            f"{link}",
            f"{memory / link:.2f}",
            f"{link / memory:.1%}",
            f"{1 / (1 - link / memory):.2f} x",
        )
        for gpu, (memory, link) in _REPLY.items()
    ]
    headings = ("GPU", "memory, GB/s", "NVLink, GB/s", "ratio", "alpha, first term alone", "capacity")
    return markdown(headings, rows)


def proposal() -> str:
    """The results, for each link, of the formula's first term alone and of the whole formula. Both are computed."""
    rows = []
    for what, links in _LINKS.items():
        for link in links:
            hardware = Hardware(link, _MEMORY, _WEIGHTS_S, 0.0)
            kv_bytes = largest_kv(_RESIDENT, hardware)
            assert kv_bytes is not None
            plan = plan_pipeline(kv_bytes, hardware)
            first = plan.alpha_bandwidth
            rows.append(
                (
                    f"{link / 1e9:.3g} GB/s, {what}", f"{1 / first:.3g}", f"{first:.1%}", f"{1 / (1 - first):.2f} x",
                    f"{plan.alpha:.1%}", f"{kv_bytes / _RESIDENT:.2f} x", f"{plan.lender_bytes / 1e9:.1f} GB",
                )
            )  # fmt: skip
    one, both = "first term alone", "with T_other = 17 ms"
    headings = ("link", "B_memory / B_link", f"alpha, {one}", f"capacity, {one}", f"alpha, {both}")
    return markdown((*headings, f"capacity, {both}", "KV at the lender"), rows)


_LAYER_MS: Final = (10.0, 0.47)  # vllm#15123: copying a layer's KV over PCIe, and computing it
_CLAIMED: Final = 0.30  # alpha for an A100 80G, from the reply to the proposal


def published(result: Result) -> str:
    """Figures that others published about lent KV, next to our measurements."""
    cases = parameters_of(result, KNEE)
    shares = sorted(
        max(alpha * case["kv_bytes"] / case["link_bytes_per_s"], case["step_s"]) / seconds
        for case in cases
        for alpha, seconds in zip(map(float, case["curve"]), case["curve"].values(), strict=True)
        if alpha
    )
    slow = min(cases, key=lambda case: float(case["alpha"]))
    copied, computed = _LAYER_MS
    copies = slow["kv_bytes"] / slow["link_bytes_per_s"] / slow["step_s"]
    near = min(cases, key=lambda case: abs(case["alpha"] - _CLAIMED))
    rows = (
        (
            f"a reply to the proposal: alpha ≤ {_CLAIMED:.0%} at 600 GB/s (a capacity of {1 / (1 - _CLAIMED):.2f} x)",
            f"with alpha* {near['alpha']:.1%} the knee is at {near['knee']:.1%}",
            "alpha depends on the link and the rest of the step (see the table above); theirs is an A100 with NVLink",
        ),
        (
            f"vllm#15123: {copied:g} ms to copy a layer over PCIe, {computed * 1e3:.0f} µs to compute it",
            f"copying takes {copies:.1f} x as long as computing: alpha* {slow['alpha']:.1%}, knee {slow['knee']:.1%}",
            f"theirs takes {copied / computed:.0f} x: alpha* is {computed / copied:.1%}; our slowest link is faster",
        ),
        (
            "a fork of llama.cpp: 96 to 99 % of the longer of copying and computing",
            f"{shares[0]:.0%} to {shares[-1]:.0%}, {shares[len(shares) // 2]:.0%} in the median of "
            f"{len(shares)} shares and links",
            "theirs is a GPU's copy engine; here, server, kernel and reader share one core",
        ),
    )
    return markdown(("published", "ours", "what differs"), rows, figures=False)


def arm_steps(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step for each arm. If fetching the KV was not measured, its time is that of copying
    alone, a lower bound."""
    return {FETCHED: case["alpha"] * case["kv_bytes"] / case["link_bytes_per_s"], **case["step_s"]}


def pushed(result: Result) -> str:
    """Steps with KV fetched, and with the query sent to it, by the rate of the link."""
    cases = parameters_of(result, BY_ARM)
    shares = sorted({case["alpha"] for case in cases})
    rows = []
    for first in (case for case in cases if case["alpha"] == shares[0]):
        cells = []
        for case in (case for case in cases if _same_link(case, first)):
            steps = {arm: seconds / case["alone_s"] for arm, seconds in arm_steps(case).items()}
            least = min(steps.values())
            for arm in ARMS:
                told = f"{steps[arm]:.2f} x" if arm in case["step_s"] else f"> {steps[arm]:.0f} x"
                cells.append(f"**{told}**" if steps[arm] == least else told)
        alpha = first["link_bytes_per_s"] * first["alone_s"] / first["kv_bytes"]
        rows.append((first["ratio"], _rate(first["link_bytes_per_s"]), f"{min(1.0, alpha):.1%}", *cells))
    ways = [f"{share:.3g} lent: {way}" for share in shares for way in ARMS.values()]
    chart = _chart("Time of a step against the rate of the link, by what crosses it", "pushed")
    return "\n\n".join((markdown(("KV to weights", "link", "alpha*", *ways), rows), _crossings(cases), chart))


def _same_link(case: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(case[name] == other[name] for name in ("ratio", "link_bytes_per_s"))


def _crossings(cases: list[dict[str, Any]]) -> str:
    """The rates from which fetching is faster, and the bytes that cross the link."""
    rows = []
    for ratio, alpha in dict.fromkeys((case["ratio"], case["alpha"]) for case in cases):
        mine = sorted(
            (case for case in cases if (case["ratio"], case["alpha"]) == (ratio, alpha)),
            key=lambda case: float(case["link_bytes_per_s"]),
        )
        won = [arm_steps(case)[FETCHED] <= arm_steps(case)[PUSHED] for case in mine]
        lost = max((number for number, each in enumerate(won) if not each), default=-1)
        since = _rate(mine[lost + 1]["link_bytes_per_s"]) if lost + 1 < len(mine) else "none of these"
        crossed = mine[-1]["crossed_bytes"]
        rows.append(
            (
                ratio, f"{alpha:.3g}", f"{crossed[FETCHED][1] / 1e6:.1f} MB",
                " / ".join(f"{each / 1e6:.2f}" for each in crossed[PUSHED]) + " MB",
                _rate(alpha * mine[-1]["kv_bytes"] / mine[-1]["alone_s"]), since,
            )
        )  # fmt: skip
    headings = (
        "KV to weights", "lent", "KV fetched in a step", "queries sent / answers received in a step",
        "rate at which alpha* is the lent share", "fetching the KV is faster from",
    )  # fmt: skip
    return markdown(headings, rows)


def rates_by_batch(case: Mapping[str, Any], arm: str) -> dict[int, tuple[float, float]]:
    """Return, for each batch, the seconds of a step and the tokens a second."""
    return {int(batch): (seconds, int(batch) / seconds) for batch, seconds in case["step_s"][arm].items()}


def planned_batch(case: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the number of whole sequences that fit according to the plan (None if there is no bound), and the largest
    measured batch of at most this size."""
    kv_bytes, tried = case["plan_kv_bytes"], rates_by_batch(case, FETCHED)
    fits = None if kv_bytes is None else int(kv_bytes / case["sequence_bytes"] + 1e-9)
    return fits, max(batch for batch in tried if fits is None or batch <= fits)


def planned_step(case: Mapping[str, Any], batch: int) -> float:
    """Return the seconds of a step of this batch according to the plan. Copies overlap with the computation and only
    slow it."""
    kv_bytes = batch * case["sequence_bytes"]
    copies_s = planned_share(case, batch) * kv_bytes / case["link_bytes_per_s"]
    return float(case["other_s"] + kv_bytes / case["memory_bytes_per_s"] + case["lost_share"] * copies_s)


def planned_share(case: Mapping[str, Any], batch: int) -> float:
    """Return the share of this batch's KV to lend, so that the rest and two one-layer buffers fit."""
    layers, kv_bytes = case["layers"], batch * case["sequence_bytes"]
    return 1 + BUFFERS / layers - case["resident_bytes"] / kv_bytes if kv_bytes > case["resident_bytes"] else 0.0


def best_batch(by_batch: Mapping[int, tuple[float, float]], longest_s: float) -> tuple[int, float]:
    """Return the batch with the most tokens a second among those whose step takes at most `longest_s`, and its tokens a
    second."""
    inside = {batch: rate for batch, (seconds, rate) in by_batch.items() if seconds <= longest_s}
    batch = max(inside, key=lambda each: inside[each])
    return batch, inside[batch]


def _best(case: Mapping[str, Any], arm: str, bound: float) -> str:
    """The batch with the most tokens a second within the bound, which is a multiple of the step of the batch that fits
    without a lender."""
    by_batch = rates_by_batch(case, arm)
    step_s, alone = by_batch[RESIDENT]
    batch, rate = best_batch(by_batch, bound * step_s)
    return f"{batch}: {rate:.0f} tokens/s, {rate / alone:.2f} x"


def tokens(result: Result) -> str:
    """Tokens a second with fixed resident bytes, with bounds on the time between tokens."""
    cases = parameters_of(result, TOKENS)
    rows = []
    for case in cases:
        step_s, alone = rates_by_batch(case, FETCHED)[RESIDENT]
        first = (_rate(case["link_bytes_per_s"]), f"{alone:.0f} tokens/s, {step_s * 1e3:.0f} ms")
        for arm, way in ARMS.items():
            rows.append((*first, way, *(_best(case, arm, bound) for bound in BOUNDS)))
            first = ("", "")
    headings = (
        "link", f"nothing lent, batch of {RESIDENT}", "way",
        *(f"TPOT ≤ {bound:g} x: best batch" for bound in BOUNDS),
    )  # fmt: skip
    return markdown(headings, rows)


def _fits(row: Row) -> str:
    fits, _ = planned_batch(row.p)
    return "any" if fits is None else f"{fits}"


def _of_batch(cell: Callable[[dict[str, Any], int], str]) -> Cell:
    """A cell for the batch that fits according to the plan."""
    return lambda row: cell(dict(row.p), planned_batch(row.p)[1])


def _lent(case: dict[str, Any], batch: int) -> str:
    return f"{case['lent_layers'][FETCHED].get(str(batch), 0) / case['layers']:.1%}"


PIPELINE_TABLES: Final = {
    "knees": section(PIPELINE, Table(
        cases(KNEE), ("KV to weights", "{p[ratio]}"), ("KV", "{p[kv_bytes]:M.0f} MB"),
        ("link", "{p[link_bytes_per_s]:G.2f} GB/s"), ("step", "{p[step_s]:ms.1f} ms"), ("alpha*", "{p[alpha]:.1%}"),
        ("knee", "{p[knee]:.1%}"), ("off", lambda row: f"{row.p['knee'] / row.p['alpha'] - 1:+.0%}"),
        ("worst step, x the longer", "{p[worst_to_max]:.2f} x"),
    )),
    "pipeline_modes": section(PIPELINE, modes),
    "pipeline_published": section(PIPELINE, published),
    "pipeline_pushed": section(PIPELINE_PUSHED, pushed),
    "pipeline_tokens": section(
        PIPELINE_TOKENS, tokens, _chart("Tokens a second and their time, against the batch", "tokens")
    ),
    "pipeline_planned": section(PIPELINE_TOKENS, Table(
        cases(TOKENS), ("link", lambda row: _rate(row.p["link_bytes_per_s"])), ("fits by the plan", _fits),
        ("batch", _of_batch(lambda case, batch: f"{batch}")),
        ("alpha, planned", _of_batch(lambda case, batch: f"{planned_share(case, batch):.1%}")),
        ("step, planned", _of_batch(lambda case, batch: f"{planned_step(case, batch) * 1e3:.0f} ms")),
        ("tokens/s, planned", _of_batch(lambda case, batch: f"{batch / planned_step(case, batch):.0f}")),
        ("alpha lent", _of_batch(_lent)),
        ("step, measured", _of_batch(lambda case, batch: f"{rates_by_batch(case, FETCHED)[batch][0] * 1e3:.0f} ms")),
        ("tokens/s, measured", _of_batch(lambda case, batch: f"{rates_by_batch(case, FETCHED)[batch][1]:.0f}")),
        ("lost while copies run", "{p[lost_share]:.0%}"),
    )),
}  # fmt: skip
# These use no results: they are computed.
PIPELINE_COMPUTED: Final[dict[str, Callable[[], str]]] = {"proposal": proposal, "proposal_gpus": gpus}
