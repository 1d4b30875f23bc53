"""The tables of docs/benchmarks-appendix.md for benchmarks with real engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.remote_kv_cache import bench_conversation as talks
from benchmarks.remote_kv_cache.bench_apart import APART, FIGURES, ONE, SCALES, WAYS
from benchmarks.remote_kv_cache.bench_documents import DOCUMENTS, ENGINES
from benchmarks.remote_kv_cache.bench_faults import PHASES
from benchmarks.remote_kv_cache.bench_hand_over import ALONE, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.bench_hand_over import FIRST_TOKEN as TO_FIRST
from benchmarks.remote_kv_cache.bench_layer_loads import BEFORE as LOAD_FIRST
from benchmarks.remote_kv_cache.bench_layer_loads import MODES as LAYER_LOADS
from benchmarks.remote_kv_cache.bench_layer_parts import CHUNKED_WHOLE, IN_CHUNKS, WHOLE_BLOCKS
from benchmarks.remote_kv_cache.bench_load_generators import OURS, THEIRS
from benchmarks.remote_kv_cache.bench_long_prefill import MODES, ROWS
from benchmarks.remote_kv_cache.bench_proxy_links import FIGURES as OF_STREAM
from benchmarks.remote_kv_cache.bench_proxy_links import WAYS as OF_LINKS
from benchmarks.remote_kv_cache.bench_request_time import FIRST, PARTS, WAY
from benchmarks.remote_kv_cache.bench_transfer_in import CACHES, FILL, READ
from benchmarks.remote_kv_cache.bench_transfer_out import AGAIN, ANSWERED, BATCH_SIZES, PREFILL, STORED, SWAPPED
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import COMPUTED, FIRST_TOKEN
from benchmarks.render.cells import Cell, Row, at, cases, operations, text
from benchmarks.render.tables import Column, Each, Part, Section, Table, markdown, matrix, names_of, paragraph, section
from benchmarks.results_reader import CaseResult, Result
from kvstore_serving.load.report import wilson

GOOD_SHARE: Final = 0.9  # the share of requests that must meet the SLO for a rate to count
SUSTAINED: Final = "3"  # the SLO of a sustained rate, as a multiple of an idle engine's times


def _prompts_per_s(row: Row) -> str:
    return f"{row.p['prompts'] / row.s.median:.2f}"


def _checked(row: Row) -> str:
    """The results of the checks of answers, as a sentence under the table."""
    checks = row.run["checks"]
    said = f"{checks['answers_equal']} answers equal to those without the connector"
    if checks["answers_tied"]:
        said += f", {checks['answers_tied']} where two logits were equal"
    said += f", **{checks['answers_wrong']} wrong**" if checks["answers_wrong"] else ", none wrong"
    cached = "as expected" if checks["cached_as_expected"] else "**not as expected**"
    return f"{said}; cached tokens {cached}."


def _and_checked(said: Cell, *groups: str) -> Part:
    """A sentence about the first case of each group, and the checks of answers."""

    def part(result: Result) -> str:
        firsts = [rows[0] for group in groups or ("",) if (rows := cases(*filter(None, (group,)))(result))]
        return f"{'; '.join(text(said, row) for row in firsts)}. {_checked(firsts[0])}" if firsts else ""

    return part


def _checks(result: Result) -> str:
    return _checked(Row(result, result.cases[0])) if result.cases else ""


_SCALE: Final = "{p[prompts]} prompts of {p[prompt_tokens]} tokens, {p[model][name]} model"


def _first_tokens(needs: str) -> Section:
    """The time to the first token, in seconds and as a fraction of the time to compute the prompt."""
    columns: Sequence[Column] = (
        ("{case}", "{name}"),
        ("s, median (min … max)", "{s:.3f~}"),
        ("of the time to compute", lambda row: f"1/{1 / row.times(COMPUTED):.1f}"),
        ("x the engine's own cache", "{x:.2f}"),
    )
    return section(needs, Table(operations(FIRST_TOKEN), *columns))


def _of_mode(mode: str, names: Sequence[str]) -> Table:
    """A row for each operation, and a column for each case of this mode."""

    def of(result: Result) -> list[CaseResult]:
        return [case for case in result.group(ROWS) if case.parameters["mode"] == mode]

    def rows(result: Result) -> list[Row]:
        return [Row(result, case, name) for case in of(result)[:1] for name in names]

    columns = Each(lambda row: of(row.result), _prompts_per_s, "{p[output_tokens]} tokens")
    return Table(rows, (f"prompts/s, {mode}", "{name}"), columns)


def _request_time(needs: str) -> Section:
    """The parts of the time of requests that are handed over."""

    def said(result: Result) -> str:
        shares = [
            f"{case.seconds(WAY).median / case.seconds(FIRST).median:.1%} at {case.name}" for case in result.cases
        ]
        shown = " and ".join(shares)
        return f"The way to D takes this share of the time to the first token (medians): {shown}.\n\n{_checks(result)}"

    def table(result: Result) -> str:
        rows: list[Sequence[str]] = []
        for row in cases()(result):
            rows.append((row.case, "median", *(text("{s:ms.1f}", row.at(part)) for part in PARTS)))
            rows.append(("", "p90", *(text("{mine[p90_s]:ms.1f}", row.at(part)) for part in PARTS)))
        return markdown(("requests", "ms", *PARTS), rows)

    return section(needs, table, said)


def _layer_parts(needs: str) -> Section:
    """The time when a handed-over prompt is ready, by the rate of the link."""

    def modes(row: Row) -> list[str]:
        return list(row.p["parts"])

    def sooner(result: Result) -> str:
        rates = [float(case.parameters["bytes_per_s"]) for case in result.cases]
        rows = []
        for parts in result.cases[0].parameters["parts"]:
            whole = CHUNKED_WHOLE if parts.endswith(IN_CHUNKS) else WHOLE_BLOCKS
            if parts != whole:
                both = [[case.data["seconds"][name] for name in (parts, whole)] for case in result.cases]
                rows.append((parts, whole, _sooner(rates, [list(zip(*each, strict=True)) for each in both])))
        return markdown(("faster", "than", "over links of"), rows, figures=False)

    return section(
        needs,
        Table(cases(), ("ready after ms, over a link of", _LINK), Each(names_of, "{s:ms.0f}")),
        Table(cases(), ("beyond the longer of prefill and link, ms", _LINK), Each(modes, "{mine[beyond_s]:ms.0f}")),
        sooner,
        _checks,
    )


_LINK: Final = "{p[bytes_per_s]:M.0f} MB/s"


def _sooner(rates: Sequence[float], rounds: Sequence[Sequence[tuple[float, float]]]) -> str:
    """The links over which layer slices are faster, given both times of each round. A rate counts if at least six of
    seven rounds show it, and if all lower rates count."""
    told = [sum(parts < whole for parts, whole in of_rate) >= 6 / 7 * len(of_rate) for of_rate in rounds]
    if all(told):
        return "every rate"
    first = told.index(False)
    return f"up to {rates[first - 1] / 1e6:.0f} MB/s" if first else "none"


def _attained(share: float, requests: int) -> str:
    """A share of requests with its interval, in percent."""
    interval = wilson(round(share * requests), requests)
    assert interval is not None
    low, high = interval
    return f"{share * 100:.0f} ({low * 100:.0f} … {high * 100:.0f})"


def _goodput(of_rates: Sequence[dict[str, Any]], way: str, scale: str) -> str:
    """The highest rate at which enough requests meet the SLO, interpolated between two measured rates."""
    points = [(each["requests_per_s"], each["attained"][way][scale]) for each in of_rates]
    if points[0][1] < GOOD_SHARE:
        return f"< {points[0][0]:g}"
    for (rate, share), (next_rate, next_share) in itertools.pairwise(points):
        if next_share < GOOD_SHARE:
            return f"{rate + (share - GOOD_SHARE) / (share - next_share) * (next_rate - rate):.1f}"
    return f"> {points[-1][0]:g}"


def _of_figures(names: Sequence[str], same: str, heading: str = "{}, ms", cell: Cell = "{s:ms.0f}") -> list[Column]:
    """A column for each figure. Figures are separate cases, and the cases of a row have the same value of a
    parameter."""

    def column(name: str) -> Cell:
        return lambda row: next(
            text(cell, row.at(case)) for case in row.result.group(name) if case.parameters[same] == row.p[same]
        )

    return [(heading.format(name), column(name)) for name in names]


def _scales(heading: str, cell: Callable[[Row, str], str]) -> list[Column]:
    """A column for each multiple of an idle engine's times."""

    def column(scale: str) -> Cell:
        return lambda row: cell(row, scale)

    return [(heading.format(f"{scale:g}"), column(f"{scale:g}")) for scale in SCALES]


def _goodputs(result: Result, way: str, scale: str) -> str:
    return _goodput([case.parameters for case in result.group(FIGURES[0])], way, scale)


def _rfc(result: Result) -> str:
    """The figures that the RFC's comments give for one instance and for 1P1D, next to those of these engines with the
    same lengths."""
    rows = [("the RFC's comments: A10s, each at the rate that it sustains, 1.3 and 2.6 requests/s", "more", "-27 %")]
    for both in zip(*map(result.group, FIGURES[:2]), strict=True):
        changes = (case.seconds(APART).median / case.seconds(ONE).median - 1 for case in both)
        named = f"these engines, {both[0].parameters['requests_per_s']:g} requests/s"
        rows.append((named, *(f"{change * 100:+.0f} %" for change in changes)))
    table = markdown(("1P1D against one instance, 1000/200 tokens", *FIGURES[:2]), rows)
    one, apart = (_goodputs(result, way, SUSTAINED) for way in (ONE, APART))
    return (
        f"{table}\n\nThe highest rate at which {GOOD_SHARE:.0%} of requests take at most {SUSTAINED} x an idle "
        f"engine's times: {one} requests/s with one engine, {apart} with P/D."
    )


def _faults(result: Result) -> str:
    """How often each fault occurred in each phase of a request, and how long answers took with it."""
    tables = []
    for case in result.cases:
        met = case.parameters["met"]
        phases = sorted({phase for of_fault in met.values() for phase in of_fault}, key=PHASES.index)
        columns: list[Column] = [("{case}", "{name}")]
        columns += [(phase, lambda row, phase=phase: f"{row.mine['met'].get(phase, 0)}") for phase in phases]
        columns += [("answer, s, median", "{s:.2f}"), ("longest", "{s.high:.2f}")]
        tables.append(Table(operations(case=case.name), *columns)(result))
    return "\n\n".join(tables)


_HOOK_COLUMNS: Final = {
    "p50": "p50",
    "p99": "p99",
    "longest": "max",
    "longest, with the wait for a core": "max_waiting",
}


def _hooks(result: Result) -> str:
    """The time of each call to the connector, in milliseconds."""
    of_cases = {case.name: case.parameters["calls"] for case in result.cases}
    rows = []
    for call in dict.fromkeys(name for calls in of_cases.values() for name in calls):
        told = ((calls.get(call), key) for calls in of_cases.values() for key in _HOOK_COLUMNS.values())
        rows.append([call, *(f"{each[key] * 1e3:.3f}" if each else "" for each, key in told)])
    return markdown(("call, ms", *(f"{name}: {what}" for name in of_cases for what in _HOOK_COLUMNS)), rows)


# fmt: off
ENGINE_TABLES: Final[dict[str, Section]] = {
    "transfer_out": section("bench_transfer_out",
        Table(cases(BATCH_SIZES, PREFILL),
            ("", "{case}"), ("prompts/s without the connector", at(WITHOUT, _prompts_per_s)),
            Each((AGAIN,), "{share:.2f~}", "another engine without it, ÷ without"),
            Each((SWAPPED,), "{share:.2f~}", "swapping out only, ÷ without"),
            Each((ANSWERED,), "{share:.2f~}", "until answered, ÷ without"),
            Each((STORED,), "{share:.2f~}", "until stored, ÷ without"),
        ),
        _and_checked(_SCALE, BATCH_SIZES, PREFILL),
    ),
    "transfer_in": section("bench_transfer_in",
        *(
            Table(cases(group),
                ("prompts/s at prefix hit rate", "{case}"), Each((WITHOUT, FILL, READ), _prompts_per_s),
                ("read ÷ fill", lambda row: f"{row.at(FILL).times(READ):.2f}"),
            )
            for group in CACHES
        ),
        _and_checked("{run[prompts]} prompts, {run[model][name]} model"),
    ),
    "long_prefill": section("bench_long_prefill",
        *(_of_mode(mode.name, (WITHOUT, *mode.rows)) for mode in MODES.values()), _and_checked(_SCALE, ROWS),
    ),
    "first_token": _first_tokens("bench_long_prefill"),
    "documents": section("bench_documents",
        Table(operations(DOCUMENTS, names=ENGINES),
            ("at once", "{p[at_once]}"), ("engine", "{name}"),
            ("first token, s, mean: median (min … max)", "{s:.3f~}"),
            (f"of the time {WITHOUT}", lambda row: f"1/{1 / row.times(WITHOUT):.1f}"),
            ("requests/s", "{mine[requests_rps]:.2f}"), ("cached", "{mine[cached]:.0%}"),
        ),
        _checks,
    ),
    "long_prompt": _first_tokens("bench_documents"),
    "slow_store": section("bench_slow_store", Table(operations(),
        ("prompts", "{case}"), ("", "{name}"), ("s, median (min … max)", "{s:.2f~}"), (f"x {WITHOUT}", "{x:.2f~}"),
    )),
    "request_time": _request_time("bench_request_time"), "request_time_mid": _request_time("bench_request_time_mid"),
    "layer_parts": _layer_parts("bench_layer_parts"), "layer_parts_delayed": _layer_parts("bench_layer_parts_delayed"),
    "layer_loads": section("bench_layer_loads",
        Table(cases(),
            ("first token, s", "{case}"), Each((WITHOUT, *(mode.name for mode in LAYER_LOADS)), "{s:.2f}"),
            Each(tuple(mode.name for mode in LAYER_LOADS if mode.layered), "{x:.2f~}", f"{{name}} ÷ {LOAD_FIRST}"),
        ),
        _and_checked("{p[model][name]} model; {p[stored_tokens]} tokens are stored; medians"),
    ),
    "proxy_links": section("bench_proxy_links",
        Table(cases(OF_STREAM[0]),
            ("links", _LINK), ("the prompt's KV on the link, ms", "{p[transfer_s]:ms.0f}"),
            *(
                column
                for figure in OF_STREAM
                for way in OF_LINKS
                for column in _of_figures((figure,), "bytes_per_s", f"{{}}: {way}", at(way, "{s:ms.0f}"))
            ),
        ),
        _and_checked("Prompts of {p[prompt_tokens]} tokens, answers of {p[answer_tokens]}; medians"),
    ),
    "apart": section("bench_apart",
        Table(operations(FIGURES[0], names=WAYS),
            ("requests/s", "{p[requests_per_s]:g}"), ("served by", "{name}"), *_of_figures(FIGURES, "requests_per_s"),
            *_scales("{} x, %", lambda row, scale: _attained(row.mine["attained"][scale], row.p["requests"])),
        ),
        "An idle engine has the first token after {p[idle_first_s]:ms.0f} ms and another one every "
        "{p[idle_each_s]:ms.1f} ms. The last columns are the shares of {p[requests]} requests for "
        "which both times are within this multiple, with Wilson's 95 % interval.",
        Table(lambda result: operations(FIGURES[0], names=WAYS)(result)[: len(WAYS)],
            (f"requests/s at which {GOOD_SHARE:.0%} attain", "{name}"),
            *_scales("{} x", lambda row, scale: _goodputs(row.result, row.name, scale)),
        ),
        _checks,
    ),
    "rfc": section("bench_apart", _rfc),
    "conversation": section("bench_conversation",
        Table(operations(FIGURES[0], names=talks.WAYS),
            ("prompts", "{p[prompts]}"), ("served by", "{name}"), ("not computed", "{mine[found]:.0%}"),
            *_of_figures(FIGURES, "prompts"),
            *_scales("attain {} x", lambda row, scale: f"{row.mine['attained'][scale]:.0%}"),
        ),
        paragraph(
            "Each row has {p[requests]} requests, with {p[mean_prompt_tokens]} tokens of prompt on average and "
            "at most {run[most_output_tokens]} of answer. The trace is {p[speed]:.1f} times as fast. An idle engine "
            "has the first token of such a prompt after {p[idle_first_s]:ms.0f} ms and another one every "
            "{p[idle_each_s]:ms.1f} ms; a request attains 2 x if it takes at most twice both times.",
            lambda result: cases()(result)[-1:],
        ),
    ),
    "hooks": section("bench_hooks", _hooks),
    "hand_over": section("bench_hand_over",
        Table(operations(BETWEEN_TOKENS),
            ("prompts of", "{p[prompt_tokens]}"), ("time between tokens", "{name}"), ("p99, ms", "{s:ms.1f}"),
            (f"x {ALONE}", "{x:.2f~}"), ("longest, ms", "{mine[longest_s]:ms.0f}"),
        ),
        matrix("ms to the first token, prompts of", "{s:ms.1f}", names_of, TO_FIRST, row="{p[prompt_tokens]}"),
        _checks,
    ),
    "faults": section("bench_faults", _faults, "All tokens of the {run[faults]} requests were right."),
    "load_generators": section("bench_load_generators",
        Table(cases(),
            ("ms", "{case}"), Each((OURS, THEIRS), "{s:ms.1f}"), Each((OURS,), "{x:.2f~}", f"x {THEIRS}"),
        ),
        "Each round has {p[requests]} requests, {p[requests_per_s]:g} a second.",
    ),
}
# fmt: on
