"""The tables of the benchmarks with real engines, in the style of tables.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.markdown import markdown, spread_text
from benchmarks.remote_kv_cache import test_conversation as talks
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import COMPUTED, FIRST_TOKEN
from benchmarks.remote_kv_cache.test_apart import APART, FIGURES, ONE, SCALES, WAYS
from benchmarks.remote_kv_cache.test_documents import DOCUMENTS, ENGINES
from benchmarks.remote_kv_cache.test_faults import PHASES
from benchmarks.remote_kv_cache.test_hand_over import ALONE, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.test_hand_over import FIRST_TOKEN as TO_FIRST
from benchmarks.remote_kv_cache.test_layer_parts import CHUNKED_WHOLE, IN_CHUNKS, WHOLE_BLOCKS
from benchmarks.remote_kv_cache.test_load_generators import OURS, THEIRS
from benchmarks.remote_kv_cache.test_long_prefill import MODES, ROWS
from benchmarks.remote_kv_cache.test_proxy_links import FIGURES as OF_STREAM
from benchmarks.remote_kv_cache.test_proxy_links import WAYS as OF_LINKS
from benchmarks.remote_kv_cache.test_request_time import FIRST, PARTS, WAY
from benchmarks.remote_kv_cache.test_transfer_in import FILL, READ
from benchmarks.remote_kv_cache.test_transfer_out import AGAIN, ANSWERED, BATCH_SIZES, PREFILL, STORED
from benchmarks.results_reader import CaseResult, Result, Results
from kvstore_serving.load.report import wilson

GOOD_SHARE: Final = 0.9  # of requests that attain, for a rate to count
SUSTAINED: Final = "3"  # times an idle engine's times, for a rate to be called sustained


def transfer_out(results: Results) -> str:
    """Prompts a second with the connector, as a share of those without."""
    result = results["test_transfer_out"]
    rows = [
        (
            case.name,
            _qps(case, WITHOUT),
            *(spread_text(case.to_limit(name).inverse) for name in (AGAIN, ANSWERED, STORED)),
        )
        for group in (BATCH_SIZES, PREFILL)
        for case in result.group(group)
    ]
    headings = (
        "",
        "prompts/s without",
        "another engine without, ÷ without",
        "until answered, ÷ without",
        "until stored, ÷ without",
    )
    scales = [_scale(cases[0]) for cases in map(result.group, (BATCH_SIZES, PREFILL)) if cases]
    return f"{markdown(headings, rows)}\n\n{'; '.join(scales)}. {_checked(result)}"


def transfer_in(results: Results) -> str:
    """Prompts a second by hit rate."""
    result = results["test_transfer_in"]
    cases = result.cases
    rows = []
    for case in cases:
        runs = (_qps(case, name) for name in (WITHOUT, FILL, READ))
        rows.append((case.name, *runs, f"{case.ratio(FILL, READ):.2f}"))
    headings = ("prompts/s at prefix hit rate", WITHOUT, FILL, READ, "read ÷ fill")
    given = result.parameters
    scale = f"{given['prompts']} prompts, {given['model']['name']} model"
    return f"{markdown(headings, rows)}\n\n{scale}. {_checked(result)}"


def long_prefill(results: Results) -> str:
    """Prompts a second by number of output tokens, one table for each mode."""
    result = results["test_long_prefill"]
    parts = []
    for mode in MODES.values():
        cases = [case for case in result.group(ROWS) if case.parameters["mode"] == mode.name]
        if cases:
            outputs = (f"{case.parameters['output_tokens']} tokens" for case in cases)
            rows = [(name, *(_qps(case, name) for case in cases)) for name in (WITHOUT, *mode.rows)]
            parts.append(markdown((f"prompts/s, {mode.name}", *outputs), rows))
            scale = _scale(cases[0])
    if not parts:
        return "Not measured yet."
    return "\n\n".join([*parts, f"{scale}. {_checked(result)}"])


def first_token(results: Results) -> str:
    """Seconds to the first token, and their share of the time of computing it."""
    return _first_tokens(results, "test_long_prefill")


def _first_tokens(results: Results, benchmark: str) -> str:
    cases = results[benchmark].group(FIRST_TOKEN)
    if not cases:
        return "Not measured yet."
    case, rows = cases[0], []
    for name in case.operations:
        seconds = case.seconds(name)
        times = f"{seconds.median:.3f} ({seconds.low:.3f} … {seconds.high:.3f})"
        limit = f"{case.to_limit(name).median:.2f}" if name in case.limits else ""
        rows.append((name, times, f"1/{1 / case.ratio(name, COMPUTED):.1f}", limit))
    return markdown((case.name, "s, median (min … max)", "of computing", "x the engine's own cache"), rows)


def documents(results: Results) -> str:
    """Documents that are asked about again and again."""
    result = results["test_documents"]
    rows = []
    for case in result.group(DOCUMENTS):
        for name in ENGINES:
            seconds = case.seconds(name)
            times = f"{seconds.median:.3f} ({seconds.low:.3f} … {seconds.high:.3f})"
            rate, cached = case.parameters["requests_rps"][name], case.parameters["cached"][name]
            share = f"1/{1 / case.ratio(name, WITHOUT):.1f}"
            rows.append((str(case.parameters["at_once"]), name, times, share, f"{rate:.2f}", f"{cached:.0%}"))
    headings = (
        "at once",
        "engine",
        "first token, s, mean: median (min … max)",
        f"of {WITHOUT}",
        "requests/s",
        "cached",
    )
    return f"{markdown(headings, rows)}\n\n{_checked(result)}"


def long_prompt(results: Results) -> str:
    """One prompt of 100 000 tokens."""
    return _first_tokens(results, "test_documents")


def slow_store(results: Results) -> str:
    """Times over links of limited rate, beside computing."""
    rows = []
    for case in results["test_slow_store"].cases:
        for name in case.operations:
            seconds = case.seconds(name)
            times = f"{seconds.median:.2f} ({seconds.low:.2f} … {seconds.high:.2f})"
            rows.append((case.name, name, times, spread_text(case.to_limit(name)) if name in case.limits else ""))
    return markdown(("prompts", "", "s, median (min … max)", f"x {WITHOUT}"), rows)


def hand_over(results: Results) -> str:
    """The time between tokens while prompts come, and what a hand-over adds to the first token."""
    result = results["test_hand_over"]
    rows = []
    for case in result.group(BETWEEN_TOKENS):
        for name in case.operations:
            share = spread_text(case.to_limit(name)) if name in case.limits else ""
            longest = f"{case.parameters['longest_s'][name] * 1e3:.0f}"
            tokens = f"{case.parameters['prompt_tokens']}"
            rows.append((tokens, name, f"{case.seconds(name).median * 1e3:.1f}", share, longest))
    between = markdown(("prompts of", "time between tokens", "p99, ms", f"x {ALONE}", "longest, ms"), rows)
    first = []
    for case in result.group(TO_FIRST):
        names = tuple(case.operations)
        milliseconds = (f"{case.seconds(name).median * 1e3:.1f}" for name in names)
        first.append((f"{case.parameters['prompt_tokens']}", *milliseconds))
    headings = ("to the first token, ms, prompts of", *names)
    return f"{between}\n\n{markdown(headings, first)}\n\n{_checked(result)}"


def request_time(results: Results, name: str) -> str:
    """Where the time of requests goes that are handed over."""
    result = results[name]
    rows = []
    for case in result.cases:
        median = (f"{case.seconds(part).median * 1e3:.1f}" for part in PARTS)
        rows.append((case.name, "median", *median))
        rows.append(("", "p90", *(f"{case.parameters['p90_s'][part] * 1e3:.1f}" for part in PARTS)))
    shares = [f"{case.seconds(WAY).median / case.seconds(FIRST).median:.1%} at {case.name}" for case in result.cases]
    told = f"The way takes {' and '.join(shares)} of the time to the first token (medians)."
    return f"{markdown(('requests', 'ms', *PARTS), rows)}\n\n{told} {_checked(result)}"


def layer_parts(results: Results, name: str) -> str:
    """When a prompt that is handed over is there, by the rate of the link."""
    result = results[name]
    names = tuple(result.cases[0].operations)
    modes = tuple(result.cases[0].parameters["parts"])
    ready = [
        (
            f"{case.parameters['bytes_per_s'] / 1e6:.0f} MB/s",
            *(f"{case.seconds(name).median * 1e3:.0f}" for name in names),
        )
        for case in result.cases
    ]
    beyond = [
        (
            f"{case.parameters['bytes_per_s'] / 1e6:.0f} MB/s",
            *(f"{case.parameters['beyond_s'][name] * 1e3:.0f}" for name in modes),
        )
        for case in result.cases
    ]
    rates = [float(case.parameters["bytes_per_s"]) for case in result.cases]
    sooner = []
    for parts in modes:
        whole = CHUNKED_WHOLE if parts.endswith(IN_CHUNKS) else WHOLE_BLOCKS
        if parts != whole:
            rounds = [
                list(zip(case.data["seconds"][parts], case.data["seconds"][whole], strict=True))
                for case in result.cases
            ]
            sooner.append((parts, whole, _sooner(rates, rounds)))
    tables = (
        markdown(("there after ms, over a link of", *names), ready),
        markdown(("beyond the longer of prefill and link, ms", *modes), beyond),
        markdown(("sooner there", "than", "over links of"), sooner, figures=False),
        _checked(result),
    )
    return "\n\n".join(tables)


def _sooner(rates: Sequence[float], rounds: Sequence[Sequence[tuple[float, float]]]) -> str:
    """Over which links parts are sooner, given both times of each round: up to the rate at which fewer than six rounds
    of seven say so."""
    told = [sum(parts < whole for parts, whole in of_rate) >= 6 / 7 * len(of_rate) for of_rate in rounds]
    if all(told):
        return "every rate"
    first = told.index(False)
    return f"up to {rates[first - 1] / 1e6:.0f} MB/s" if first else "none"


def apart(results: Results) -> str:
    """Requests at a rate: their times, and how many of them attain."""
    result = results["test_apart"]
    rows = []
    for cases in zip(*(result.group(figure) for figure in FIGURES), strict=True):
        attained = cases[0].parameters["attained"]
        for way in WAYS:
            times = (f"{case.seconds(way).median * 1e3:.0f}" for case in cases)
            shares = (_attained(share, cases[0].parameters["requests"]) for share in attained[way].values())
            rows.append((f"{cases[0].parameters['requests_per_s']:g}", way, *times, *shares))
    case = result.cases[0]
    scales = tuple(case.parameters["attained"][WAYS[0]])
    headings = (
        "requests/s",
        "served by",
        *(f"{figure}, ms" for figure in FIGURES),
        *(f"{each} x, %" for each in scales),
    )
    promised = (
        f"An idle engine has the first token after {case.parameters['idle_first_s'] * 1e3:.0f} ms and another one "
        f"every {case.parameters['idle_each_s'] * 1e3:.1f} ms. The last columns: requests that hold so many times "
        f"both, of {case.parameters['requests']}, with Wilson's interval of 95 %."
    )
    of_rates = [each.parameters for each in result.group(FIGURES[0])]
    goodput = [(way, *(_goodput(of_rates, way, scale) for scale in scales)) for way in WAYS]
    good = markdown((f"requests/s of which {GOOD_SHARE:.0%} attain", *(f"{each} x" for each in scales)), goodput)
    return f"{markdown(headings, rows)}\n\n{promised}\n\n{good}\n\n{_checked(result)}"


def _attained(share: float, requests: int) -> str:
    """A share of requests with its interval, in percent."""
    interval = wilson(round(share * requests), requests)
    assert interval is not None
    low, high = interval
    return f"{share * 100:.0f} ({low * 100:.0f} … {high * 100:.0f})"


def _goodput(of_rates: Sequence[dict[str, Any]], way: str, scale: str) -> str:
    """The highest rate at which enough requests attain; between two measured rates, on the line between them."""
    points = [(each["requests_per_s"], each["attained"][way][scale]) for each in of_rates]
    if points[0][1] < GOOD_SHARE:
        return f"< {points[0][0]:g}"
    for (rate, share), (next_rate, next_share) in itertools.pairwise(points):
        if next_share < GOOD_SHARE:
            return f"{rate + (share - GOOD_SHARE) / (share - next_share) * (next_rate - rate):.1f}"
    return f"> {points[-1][0]:g}"


def rfc(results: Results) -> str:
    """What the RFC's comments report of one instance and 1P1D, beside what these engines do with the same lengths."""
    result = results["test_apart"]
    rows = [("the RFC's comments, A10s, each at the rate it sustains: 1.3 and 2.6 requests/s", "more", "-27 %")]
    for first, each in zip(result.group(FIGURES[0]), result.group(FIGURES[1]), strict=True):
        changes = (case.seconds(APART).median / case.seconds(ONE).median - 1 for case in (first, each))
        rows.append(
            (
                f"these engines, {first.parameters['requests_per_s']:g} requests/s",
                *(f"{change * 100:+.0f} %" for change in changes),
            )
        )
    table = markdown(("1P1D against one instance, 1000/200 tokens", *FIGURES[:2]), rows)
    of_rates = [each.parameters for each in result.group(FIGURES[0])]
    one, apart = (_goodput(of_rates, way, SUSTAINED) for way in (ONE, APART))
    return (
        f"{table}\n\nRequests a second of which {GOOD_SHARE:.0%} hold {SUSTAINED} x an idle engine's times: {one} with "
        f"one engine, {apart} with prefill and decode apart."
    )


def conversation(results: Results) -> str:
    """A trace of conversations, with the prefixes it shares and without."""
    result = results["test_conversation"]
    given = result.parameters
    kinds = {case.parameters["prompts"]: case.parameters for case in result.cases}
    rows = []
    for kind, parameters in kinds.items():
        of_figures = [case for figure in FIGURES for case in result.group(figure) if case.parameters["prompts"] == kind]
        for way in talks.WAYS:
            times = (f"{case.seconds(way).median * 1e3:.0f}" for case in of_figures)
            attained = (f"{share:.0%}" for share in parameters["attained"][way].values())
            rows.append((kind, way, f"{parameters['found'][way]:.0%}", *times, *attained))
    headings = (
        "prompts",
        "served by",
        "not computed",
        *(f"{figure}, ms" for figure in FIGURES),
        *(f"attain {scale:g} x" for scale in SCALES),
    )
    said = (
        f"{parameters['requests']} requests a row, {parameters['mean_prompt_tokens']} tokens of prompt on average and "
        f"{given['most_output_tokens']} of answer at most, the trace {parameters['speed']:.1f} times as fast. An idle "
        f"engine has the first token of such a prompt after {parameters['idle_first_s'] * 1e3:.0f} ms and another one "
        f"every {parameters['idle_each_s'] * 1e3:.1f} ms; to attain is to hold so many times both."
    )
    return f"{markdown(headings, rows)}\n\n{said}"


def faults(results: Results) -> str:
    """How often each fault met each phase of a request, and how long answers took beside it."""
    result = results["test_faults"]
    told = []
    for case in result.cases:
        met = case.parameters["met"]
        phases = sorted({phase for of_fault in met.values() for phase in of_fault}, key=PHASES.index)
        rows = [
            (
                fault,
                *(f"{met[fault].get(phase, 0)}" for phase in phases),
                f"{case.seconds(fault).median:.2f}",
                f"{case.seconds(fault).high:.2f}",
            )
            for fault in case.operations
        ]
        told.append(markdown((case.name, *phases, "answer, s, median", "longest"), rows))
    return "\n\n".join((*told, f"{result.parameters['faults']} requests, all of whose tokens were right."))


def load_generators(results: Results) -> str:
    """The figures of two load generators, which sent the same requests to one engine."""
    cases = results["test_load_generators"].cases
    rows = [
        (
            case.name,
            *(f"{case.seconds(name).median * 1e3:.1f}" for name in (OURS, THEIRS)),
            spread_text(case.to_limit(OURS)),
        )
        for case in cases
    ]
    given = cases[0].parameters
    said = f"{given['requests']} requests a round, {given['requests_per_s']:g} a second."
    return f"{markdown(('ms', OURS, THEIRS, f'x {THEIRS}'), rows)}\n\n{said}"


def proxy_links(results: Results) -> str:
    """What a user of the proxy waits for, by the rate of the links, beside one engine."""
    result = results["test_proxy_links"]
    rows = []
    for of_rate in zip(*(result.group(figure) for figure in OF_STREAM), strict=True):
        given = of_rate[0].parameters
        rows.append(
            (
                f"{given['bytes_per_s'] / 1e6:.0f} MB/s",
                f"{given['transfer_s'] * 1e3:.0f}",
                *(f"{case.seconds(way).median * 1e3:.0f}" for case in of_rate for way in OF_LINKS),
            )
        )
    headings = (
        "links of",
        "the prompt's KV takes, ms",
        *(f"{figure}: {way}" for figure in OF_STREAM for way in OF_LINKS),
    )
    said = f"Prompts of {given['prompt_tokens']} tokens, answers of {given['answer_tokens']}; medians."
    return f"{markdown(headings, rows)}\n\n{said} {_checked(result)}"


_HOOK_COLUMNS: Final = {
    "p50": "p50",
    "p99": "p99",
    "longest": "max",
    "longest, with the wait for a core": "max_waiting",
}


def hooks(results: Results) -> str:
    """The time of each call to the connector, in milliseconds."""
    cases = {case.name: case.parameters["calls"] for case in results["test_hooks"].cases}
    rows = []
    for call in dict.fromkeys(name for calls in cases.values() for name in calls):
        cells = [call]
        for calls in cases.values():
            told = calls.get(call)
            cells += [f"{told[key] * 1e3:.3f}" for key in _HOOK_COLUMNS.values()] if told else [""] * len(_HOOK_COLUMNS)
        rows.append(tuple(cells))
    headings = [f"{name}: {what}" for name in cases for what in _HOOK_COLUMNS]
    return markdown(("call, ms", *headings), rows)


def _qps(case: CaseResult, operation: str) -> str:
    return f"{case.parameters['prompts'] / case.seconds(operation).median:.2f}"


def _scale(case: CaseResult) -> str:
    """The size of the workload beside that of the reference."""
    given = case.parameters
    said = f"{given['prompts']} prompts of {given['prompt_tokens']} tokens, {given['model']['name']} model"
    return said


def _checked(result: Result) -> str:
    """The results of the checks of answers, as a sentence under the table."""
    checks = result.parameters["checks"]
    said = f"{checks['answers_equal']} answers equal to those without the connector"
    if checks["answers_tied"]:
        said += f", {checks['answers_tied']} with a tie of logits told differently"
    said += f", **{checks['answers_wrong']} wrong**" if checks["answers_wrong"] else ", none wrong"
    cached = "as expected" if checks["cached_as_expected"] else "**not as expected**"
    return f"{said}; cached tokens {cached}."


# As in tables.py.
ENGINE_TABLES: Final[dict[str, tuple[str, Callable[[Results], str]]]] = {
    "transfer_out": ("test_transfer_out", transfer_out),
    "transfer_in": ("test_transfer_in", transfer_in),
    "long_prefill": ("test_long_prefill", long_prefill),
    "first_token": ("test_long_prefill", first_token),
    "documents": ("test_documents", documents),
    "long_prompt": ("test_documents", long_prompt),
    "slow_store": ("test_slow_store", slow_store),
    "request_time": ("test_request_time", partial(request_time, name="test_request_time")),
    "request_time_mid": ("test_request_time_mid", partial(request_time, name="test_request_time_mid")),
    "layer_parts": ("test_layer_parts", partial(layer_parts, name="test_layer_parts")),
    "layer_parts_delayed": ("test_layer_parts_delayed", partial(layer_parts, name="test_layer_parts_delayed")),
    "proxy_links": ("test_proxy_links", proxy_links),
    "apart": ("test_apart", apart),
    "rfc": ("test_apart", rfc),
    "conversation": ("test_conversation", conversation),
    "hooks": ("test_hooks", hooks),
    "hand_over": ("test_hand_over", hand_over),
    "faults": ("test_faults", faults),
    "load_generators": ("test_load_generators", load_generators),
}
