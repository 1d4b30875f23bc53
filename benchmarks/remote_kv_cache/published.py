"""The tables of docs/published.md: the published figures of the design that kvstore follows, compared with ours.

Rows and columns are those of the published tables. The published figures were measured on another machine, with a GPU,
so seconds cannot be compared. Only multiples can: those of a copy within memory, and those of computing a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchmarks.persistence_kv_cache.placements import FILES, LEVELDB, MAPPED, SEGMENTS, SEGMENTS_DIRECT
from benchmarks.persistence_kv_cache.stores import COLD, WARM, WRITE
from benchmarks.remote_kv_cache.bench_long_prefill import COMPUTE, MODES, OUTPUTS, ROWS, Mode
from benchmarks.remote_kv_cache.bench_server import NOT_DEFERRED
from benchmarks.remote_kv_cache.bench_transfer_in import CACHES, FILL, READ
from benchmarks.remote_kv_cache.bench_transfer_out import ANSWERED, BATCH_SIZES, SWAPPED
from benchmarks.remote_kv_cache.copies import FANCY, GATHER, INDEX_COPY, LAYERS, NAIVE, SWAP_IN, SWAP_OUT
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.shapes import HEADLINE, MODELS
from benchmarks.remote_kv_cache.transfers import MEMCPY
from benchmarks.render.tables import NOTHING, markdown
from benchmarks.results_reader import CaseResult, Result, Results

Figures = Mapping[str, Sequence[float]]  # name of the row -> a figure for each column

# Seconds for 512 blocks of 16 tokens, in calls of 64. The others are multiples of the naive copy of blocks.
COPIES: Final = (NAIVE, LAYERS, FANCY, INDEX_COPY, GATHER, SWAP_IN, SWAP_OUT)
COPY_S: Final[Figures] = {
    "Qwen2.5-32B": (0.130, 0.277, 0.335, 0.336, 0.165, 0.19, 0.21),
    "Qwen2.5-7B": (0.033, 0.088, 0.077, 0.077, 0.059, 0.06, 0.06),
    "Qwen2.5-3B": (0.024, 0.090, 0.049, 0.049, 0.031, 0.08, 0.08),
    "glm-4-9b": (0.045, 0.126, 0.107, 0.108, 0.056, 0.09, 0.09),
    "Llama-3.1-8B": (0.065, 0.140, 0.160, 0.161, 0.082, 0.09, 0.10),
}

# The published seconds have two digits; the published multiples were computed from more exact values.
TRANSPORTS: Final = ("zmq tcp", "zmq ipc", "zmq inproc")
TRANSPORT_S: Final[Figures] = {
    "Qwen2.5-32B": (0.56, 0.57, 0.13),
    "Qwen2.5-7B": (0.12, 0.12, 0.04),
    "Qwen2.5-3B": (0.10, 0.07, 0.03),
    "glm-4-9b": (0.18, 0.17, 0.05),
    "Llama-3.1-8B": (0.30, 0.29, 0.08),
}
TRANSPORT_X: Final[Figures] = {
    "Qwen2.5-32B": (4.27, 4.37, 1.02),
    "Qwen2.5-7B": (3.55, 3.65, 1.14),
    "Qwen2.5-3B": (3.95, 2.93, 1.11),
    "glm-4-9b": (4.00, 3.78, 1.20),
    "Llama-3.1-8B": (4.55, 4.53, 1.19),
}

# The multiples published for `get` repeat those of `set`. These are the seconds of `get` divided by those of the naive
# copy.
CALLS: Final = (NOT_DEFERRED, "set", "get", "stream_get")
CALL_S: Final[Figures] = {
    "Qwen2.5-32B": (0.52, 0.41, 0.77, 0.33),
    "Qwen2.5-7B": (0.13, 0.09, 0.24, 0.07),
    "Qwen2.5-3B": (0.07, 0.05, 0.17, 0.06),
    "glm-4-9b": (0.15, 0.10, 0.29, 0.09),
    "Llama-3.1-8B": (0.27, 0.21, 0.50, 0.13),
}
CALL_X: Final[Figures] = {
    "Qwen2.5-32B": (4.01, 3.16, 5.92, 2.53),
    "Qwen2.5-7B": (3.76, 2.72, 7.27, 2.10),
    "Qwen2.5-3B": (3.08, 2.15, 7.08, 2.61),
    "glm-4-9b": (3.33, 2.31, 6.44, 2.06),
    "Llama-3.1-8B": (4.17, 3.19, 7.69, 1.96),
}

# The prompts a second while all blocks are sent, as a share of those while blocks are only swapped out. A step is
# scheduled when it is computed (synchronous), or two steps earlier (asynchronous). The engine's own cache is on in the
# first two columns and off in the others.
SENDING: Final[Mapping[int, Sequence[float]]] = {
    1024: (0.96, 0.95, 0.98, 0.96),
    768: (0.97, 0.95, 0.97, 0.97),
    512: (0.97, 1.00, 0.95, 1.00),
    384: (0.96, 1.00, 0.94, 1.02),
    256: (0.97, 0.97, 0.97, 0.96),
    128: (0.98, 0.97, 0.98, 0.99),
    64: (0.99, 1.00, 0.99, 0.98),
    32: (0.99, 0.99, 1.00, 0.98),
}

# The prompts a second for ten prompts of 10240 tokens, by the number of tokens of the answer.
LONG_PREFILL: Final[Mapping[str, Sequence[Sequence[float]]]] = {
    "cache on": (
        (0.88, 0.88, 0.86, 0.81, 0.72, 0.59, 0.43),
        (47.94, 24.92, 12.64, 6.35, 3.18, 1.59, 0.80),
        (48.69, 24.91, 12.64, 6.36, 3.18, 1.59, 0.80),
        (5.54, 5.03, 4.13, 4.01, 2.63, 1.44, 0.75),
        (48.28, 24.78, 12.60, 6.35, 3.18, 1.59, 0.80),
        (48.80, 24.98, 12.63, 6.35, 3.18, 1.59, 0.80),
    ),
    "cache off": (
        (0.89, 0.89, 0.86, 0.81, 0.72, 0.59, 0.43),
        (9.26, 7.71, 5.80, 4.68, 2.91, 1.52, 0.78),
        (9.26, 7.71, 5.80, 4.69, 2.91, 1.52, 0.78),
        (5.56, 5.00, 4.19, 4.07, 2.65, 1.44, 0.76),
        (9.27, 7.72, 5.78, 4.69, 2.92, 1.52, 0.78),
        (9.28, 7.67, 5.78, 4.69, 2.92, 1.52, 0.78),
    ),
}

# Multiples of the naive copy, over the five models: writing and reading 512 blocks. LevelDB's reads were not published.
PERSISTENCE: Final[Mapping[str, Sequence[str]]] = {
    FILES: ("3.5 - 4.3 x", "3.6 - 4.0 x"),
    MAPPED: ("a little more", "a little more"),
    LEVELDB: ("8 - 20 x", ""),
    SEGMENTS: ("", ""),
    SEGMENTS_DIRECT: ("", ""),
}


def _timed(seconds: float, multiple: float) -> str:
    return f"{seconds * 1e3:.0f} ms, {multiple:.2f} x"


def _of(case: CaseResult | None, name: str, reference: str) -> str:
    if case is None or name not in case.operations:
        return ""
    return _timed(case.seconds(name).median, case.ratio(name, reference))


def _case(result: Result, name: str) -> CaseResult | None:
    return next((case for case in result.cases if case.name == name), None)


def _by_model(
    result: Result, columns: Sequence[str], reference: str, seconds: Figures, multiples: Figures, *more: str
) -> str:
    """Two rows for each model: the published figures and ours. If `more` has a heading, a third row has multiples of
    the physical limit."""
    rows = []
    for model in MODELS:
        case = _case(result, model)
        theirs = (_timed(*figures) for figures in zip(seconds[model], multiples[model], strict=True))
        rows += [[model, "published", *theirs], ["", "ours", *(_of(case, name, reference) for name in columns)]]
        for what in more:
            limited = (case.to_limit(name) if case and name in case.operations else None for name in columns)
            rows.append(["", what, *(f"{each.median:.2f} x" if each else "" for each in limited)])
    return markdown(("model", "", *columns), rows)


def copies(result: Result) -> str:
    """The table of copies within memory."""
    multiples = {model: [each / seconds[0] for each in seconds] for model, seconds in COPY_S.items()}
    return _by_model(result, COPIES, NAIVE, COPY_S, multiples)


def transports(result: Result) -> str:
    """The table of ZeroMQ's library."""
    return _by_model(result, TRANSPORTS, MEMCPY, TRANSPORT_S, TRANSPORT_X, "ours, x plain socket")


def calls(result: Result) -> str:
    """The table of client and server, end to end."""
    return _by_model(result, CALLS, MEMCPY, CALL_S, CALL_X, "ours, x plain socket")


def _share(case: CaseResult, reference: str) -> str:
    """The prompts a second while all blocks are sent, as a share of those of another engine."""
    return f"{case.ratio(reference, ANSWERED):.2f}" if reference in case.operations else ""


def sending(result: Result) -> str:
    """The table of the cost of sending for an engine."""
    rows = []
    for batch, published in SENDING.items():
        ours = []
        for prefix_cache in (True, False):
            found = (
                case
                for case in result.group(BATCH_SIZES)
                if case.parameters["max_num_batched_tokens"] == batch
                and case.parameters["prefix_cache"] is prefix_cache
            )
            case = next(found, None)
            of = ("", "") if case is None else (_share(case, SWAPPED), _share(case, WITHOUT))
            ours.append(of)
        on, off = (published[:2], published[2:])
        rows.append([str(batch), *(f"{each:.2f}" for each in on), *ours[0], *(f"{each:.2f}" for each in off), *ours[1]])
    kinds = ("published, synchronous", "published, asynchronous", "ours", "ours, compared with no connector")
    headings = [f"cache {state}: {kind}" for state in ("on", "off") for kind in kinds]
    return markdown(("tokens a step", *headings), rows)


def _long_prefill_of(result: Result, mode: Mode) -> list[list[str]]:
    found = {
        case.parameters["output_tokens"]: case for case in result.group(ROWS) if case.parameters["mode"] == mode.name
    }
    rows = []
    computed = LONG_PREFILL[mode.name][0]
    for row, published in zip(mode.rows, LONG_PREFILL[mode.name], strict=True):
        theirs = [f"{rate:g}, {rate / base:.1f} x" for rate, base in zip(published, computed, strict=True)]
        ours = []
        for outputs in OUTPUTS:
            case = found.get(outputs)
            rate = 0.0 if case is None else case.parameters["prompts"] / case.seconds(row).median
            ours.append("" if case is None else f"{rate:.3g}, {1 / case.ratio(row, COMPUTE):.1f} x")
        rows += [[f"{mode.name}: {row}", "published", *theirs], ["", "ours", *ours]]
    return rows


def long_prefill(result: Result) -> str:
    """The table of long prompts, and an engine that restarts."""
    rows = [row for name in LONG_PREFILL for row in _long_prefill_of(result, MODES[name])]
    return markdown(("prompts/s, and x computing", "", *(f"{n} tokens" for n in OUTPUTS)), rows)


def reading(result: Result) -> str:
    """The table of the gain from reading, by the share of tokens that prompts have in common."""
    found = {(case.parameters["hit_rate_percent"], case.parameters.get("group")): case for case in result.cases}
    rows = [["0 %", "published", "20", "50 - 60", "2.5 - 3.0 x", "more", "more", ""]]
    for percent in sorted({percent for percent, _ in found}):
        row = [f"{percent} %", "ours"]
        for group in reversed(CACHES):
            case = found.get((percent, group))
            prompts = 0 if case is None else case.parameters["prompts"]
            rates = [] if case is None else [f"{prompts / case.seconds(name).median:.3g}" for name in (FILL, READ)]
            row += ["", "", ""] if case is None else [*rates, f"{case.ratio(FILL, READ):.1f} x"]
        rows.append(row)
    states = (group.removeprefix("engine's ") for group in reversed(CACHES))
    headings = [f"{state}: {what}" for state in states for what in (FILL, READ, "read ÷ fill")]
    return markdown(("tokens in common", "", *headings), rows)


def persistence(result: Result) -> str:
    """The table of blocks on disk."""
    case = _case(result, HEADLINE.name)
    rows = []
    for placement, theirs in PERSISTENCE.items():
        ours = (f"{placement}: {what}" for what in (WRITE, COLD, WARM))
        rows.append([placement, *theirs, *(_of(case, name, NAIVE) for name in ours)])
    return markdown(("", "published: write", "published: read", "write", "read, cold", "read, warm"), rows)


def _section(benchmark: str, table: Callable[[Result], str]) -> Callable[[Results], str]:
    return lambda results: table(results[benchmark]) if benchmark in results else NOTHING


PUBLISHED_TABLES: Final = {
    "published_copies": _section("bench_memory_io", copies),
    "published_transports": _section("bench_zmq_transfer", transports),
    "published_calls": _section("bench_server", calls),
    "published_persistence": _section("bench_placement", persistence),
    "published_sending": _section("bench_transfer_out", sending),
    "published_reading": _section("bench_transfer_in", reading),
    "published_long_prefill": _section("bench_long_prefill", long_prefill),
}
