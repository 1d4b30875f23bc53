"""`kvstore load`: sends requests to an OpenAI-compatible endpoint at given times, and reports how many of them attain
their SLOs.

`kvstore_serving.load` does the work. It is imported when the command runs, because it needs the extra `serving`. This
file checks the options, shows the progress, and ends with the status that `kvstore_cli.output` defines:

* 0: the run is complete, even if some requests failed, because failures are a result, too;
* 1: every request failed, no server listens at the address, or the run was interrupted; results so far are printed;
* 2: an option or the trace is wrong, and nothing was sent.
"""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import typer

from kvstore_cli.options import JsonOption, need_modules, takes
from kvstore_cli.output import CommandFailed, fail, show
from kvstore_cli.traces import TRACE_HELP, BlockTokensOption, TimeUnitOption, say_what_is_odd, unit_of

if TYPE_CHECKING:
    import asyncio

    from kvstore_serving.load.client import RequestBodies
    from kvstore_serving.load.records import Planned, RequestOutcome
    from kvstore_serving.load.report import LoadReport
    from kvstore_serving.load.run import LoadRun, RunProgress

API_KEY_VARIABLE: Final = "OPENAI_API_KEY"
LOAD_TIMEOUT_S: Final = 600.0
# All models have larger vocabularies than this. A token outside the vocabulary is refused, or crashes an engine without
# a tokenizer.
DEFAULT_VOCABULARY: Final = 1024
OnProgress: TypeAlias = "Callable[[RunProgress], None]"


class Api(str, Enum):
    """Values of --api."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class _Load:
    """The requests of one run, and how the report describes them."""

    planned: Sequence[Planned]
    rate_rps: float | None
    source: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of `kvstore load`."""

    url: Annotated[str, typer.Option(metavar="URL", help="The endpoint, http://HOST:PORT, with or without /v1.")]
    model: Annotated[str, typer.Option(help="Name of the model, as the endpoint serves it.")]
    slo_ttft: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="SLO of the time to the first token.")]
    slo_tpot: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="SLO of the time per token after the first.")
    ]
    rate: Annotated[
        list[float] | None,
        typer.Option(metavar="R", help="Requests per second, at random times (Poisson). Repeatable: one run each."),
    ] = None
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer.")] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of counted requests. With --trace, the first ones; default: all.")
    ] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Trace to replay: {TRACE_HELP}.")] = None
    block_tokens: BlockTokensOption = None
    time_unit: TimeUnitOption = None
    speed: Annotated[float, typer.Option(help="Speed of the replay; 2 is twice as fast.")] = 1.0
    max_input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Clip longer prompts of the trace; their beginnings stay.")
    ] = None
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Clip longer outputs of the trace.")] = None
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, at the same rate, and not counted.")] = 0
    api: Annotated[
        Api, typer.Option(help="completions sends token ids; chat sends words, with about as many tokens.")
    ] = Api.COMPLETIONS
    extensions: Annotated[
        bool,
        typer.Option(
            "--extensions/--no-extensions",
            help="Send `ignore_eos` (vLLM and others): answers then have exactly the requested tokens.",
        ),
    ] = True
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="Additional fields of the request's body.")] = "{}"
    vocab: Annotated[
        int,
        typer.Option(min=16, metavar="TOKENS", help="Prompts have token ids below this number, at most the model's."),
    ] = DEFAULT_VOCABULARY
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of arrivals and prompts. Another seed avoids hits from earlier runs.")
    ] = 0
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="A request that takes longer has failed.")
    ] = LOAD_TIMEOUT_S
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"Sent as a bearer token. [env var: {API_KEY_VARIABLE}]")
    ] = None
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one JSON line for each request.")] = None
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart into FILE.svg or FILE.png.")] = None
    as_json: JsonOption = False


@takes(LoadOptions)
def load(given: LoadOptions) -> None:
    """Load an OpenAI-compatible endpoint and measure SLO attainment and goodput.

    The load is an open loop: requests are sent at their planned times, whatever the endpoint does. Give either --trace,
    or --rate with --input-tokens, --output-tokens and --requests. If --rate is repeated, the rates make a sweep.
    """
    need_modules("load", "aiohttp", *(["matplotlib.figure"] if given.chart else []))
    import asyncio

    from kvstore_serving.load.client import BadBody, RequestBodies
    from kvstore_serving.load.report import Slo, make_report
    from kvstore_serving.load.sweep import make_sweep

    check_url(given.url)
    _check_seconds(given)
    _check_files(given.output, given.chart, given.trace)
    api: Literal["chat", "completions"] = "chat" if given.api is Api.CHAT else "completions"
    try:
        bodies = RequestBodies(given.model, api, extensions=given.extensions, extra=given.extra_body)
    except BadBody as error:
        fail("usage", f"--extra-body: {error}")
    loads = _synthetic(given) if given.trace is None else [_replayed(given, given.trace)]
    slo = Slo(given.slo_ttft, given.slo_tpot)
    runs: list[tuple[LoadReport, list[RequestOutcome]]] = []
    check_reached(given.url)
    for each in loads:
        with _progress(each) as on_progress:
            run = asyncio.run(_send(each, given, bodies, on_progress))
        report = make_report(
            run, slo, rate_rps=each.rate_rps, source=each.source, url=given.url, model=given.model, seed=each.seed
        )
        runs.append((report, run.outcomes))
        if run.interrupted:
            break
    _write(runs, given.output, given.chart)
    reports = [report for report, _ in runs]
    from kvstore_cli.load_tables import print_report, print_sweep

    if len(loads) == 1:
        show(reports[0], given.as_json, lambda: print_report(reports[0]), _failure(reports))
    else:
        sweep = make_sweep(reports)
        show(sweep, given.as_json, lambda: print_sweep(sweep), _failure(reports))


# ---- options -----------------------------------------------------------------------------------------------------


def check_url(url: str) -> None:
    """End the command if this is not the URL of an endpoint."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number
        valid = False
    if not valid:
        fail("usage", f"--url {url!r}: expected http://HOST:PORT or https://HOST:PORT")


def _check_seconds(given: LoadOptions) -> None:
    """Check that these options are finite. Their ranges allow infinity, which JSON cannot express."""
    for option, value in (("--slo-ttft", given.slo_ttft), ("--slo-tpot", given.slo_tpot), ("--timeout", given.timeout)):
        if not math.isfinite(value):
            fail("usage", f"{option} {value:g}: expected a finite number of seconds")


def _check_files(output: Path | None, chart: Path | None, trace: Path | None) -> None:
    """Check the files before the run, so that the command does not fail after it."""
    for option, file in (("--output", output), ("--chart", chart)):
        if file is not None and trace is not None and file.exists() and trace.exists() and file.samefile(trace):
            fail("usage", f"{option} {file}: this is the file of --trace; expected another file")
    if output is not None and output == chart:
        fail("usage", f"--output and --chart are both {output}; expected two files")
    from kvstore_serving.files import check_writable

    if chart is not None:
        from kvstore_serving.load.chart import CHART_FORMATS

        if chart.suffix not in CHART_FORMATS:
            fail("usage", f"--chart {chart}: expected a file name that ends with {' or '.join(CHART_FORMATS)}")
    for option, file in (("--output", output), ("--chart", chart)):
        try:
            if file is not None:
                check_writable(file)
        except OSError as error:
            fail("usage", f"{option} {file}: {error.strerror}")


def _synthetic(given: LoadOptions) -> list[_Load]:
    from kvstore_serving.load.arrivals import seed_of, synthetic

    only_traces = (given.max_input_tokens, given.max_output_tokens, given.block_tokens, given.time_unit)
    if any(value is not None for value in only_traces) or given.speed != 1.0:
        fail("usage", "--speed, --max-input-tokens, --max-output-tokens, --block-tokens and --time-unit need --trace")
    rates, inputs, outputs, requests = given.rate or [], given.input_tokens, given.output_tokens, given.requests
    needed = {"--input-tokens": inputs, "--output-tokens": outputs, "--requests": requests}
    missing = [name for name, value in {"--rate": rates or None, **needed}.items() if value is None]
    if missing:
        fail("usage", f"{', '.join(missing)} not given: expected --rate, {', '.join(needed)}, or else --trace")
    if any(not 0 < rate < float("inf") for rate in rates):
        fail("usage", f"--rate {min(rates):g}: expected a number of requests per second above 0")
    assert inputs and outputs and requests
    loads = []
    for number, rate in enumerate(rates):
        own = seed_of(given.seed, number)  # the same seed's prompts would be in the endpoint's cache
        planned = list(synthetic(rate, requests, given.warmup, inputs, outputs, own))
        loads.append(_Load(planned, rate, f"Poisson, {rate:g} req/s, {inputs} to {outputs} tokens", own))
    return loads


def _replayed(given: LoadOptions, trace: Path) -> _Load:
    from kvstore_serving.load.trace import TraceError, planned_of, read_trace

    speed, warmup = given.speed, given.warmup
    if given.rate or given.input_tokens or given.output_tokens:
        fail("usage", "--trace has its own times and lengths: leave out --rate, --input-tokens and --output-tokens")
    if not 0 < speed < float("inf"):
        fail("usage", f"--speed {speed:g}: expected a number above 0; 2 is twice as fast")
    limit = None if given.requests is None else warmup + given.requests
    unit = unit_of(given.time_unit)
    try:
        found = read_trace(trace, limit, block_tokens=given.block_tokens, time_unit=unit)
    except TraceError as error:
        fail("usage", f"--trace {error}")
    if len(found) <= warmup:
        fail("usage", f"--trace {trace} has {len(found)} requests: --warmup {warmup} leaves none to count")
    say_what_is_odd(trace, found)
    planned = planned_of(
        found,
        speed=speed,
        warmup=warmup,
        max_input_tokens=given.max_input_tokens,
        max_output_tokens=given.max_output_tokens,
    )
    kind = f"blocks of {found.block_tokens} tokens, timestamps in {found.time_unit}"
    return _Load([*planned], None, f"trace {trace.name}, speed {speed:g}, {kind}", given.seed)


# ---- a run -------------------------------------------------------------------------------------------------------


def check_reached(url: str) -> None:
    """End the command now if no server listens at the address, so that there is no run in which every request fails."""
    import asyncio

    from kvstore_serving.failures import in_words
    from kvstore_serving.load.client import REACH_S, reach

    try:
        asyncio.run(reach(url))
    except asyncio.TimeoutError:
        fail("unreachable", f"no server listens at {url}: no connection within {REACH_S:g} s")
    except OSError as error:
        fail("unreachable", f"no server listens at {url}: {in_words(error)}")


async def _send(each: _Load, given: LoadOptions, bodies: RequestBodies, on_progress: OnProgress) -> LoadRun:
    gc.freeze()  # garbage collections during the run then do not scan the trace
    stop = stop_on_signals()
    api_key = given.api_key or os.environ.get(API_KEY_VARIABLE)
    return await send(
        given.url, each.planned, bodies, given.vocab, each.seed, on_progress, given.timeout, api_key=api_key, stop=stop
    )


def stop_on_signals() -> asyncio.Event:
    """Return an event that Ctrl-C and SIGTERM set while the running loop runs."""
    import asyncio

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def send(
    url: str,
    planned: Sequence[Planned],
    bodies: RequestBodies,
    vocabulary: int,
    seed: int,
    on_progress: OnProgress,
    timeout_s: float = LOAD_TIMEOUT_S,
    *,
    api_key: str | None = None,
    stop: asyncio.Event | None = None,
) -> LoadRun:
    """Send these requests at their planned times. `stop`: when it is set, the run ends early."""
    import asyncio

    from kvstore_serving.load.client import Client
    from kvstore_serving.load.prompts import Prompts
    from kvstore_serving.load.run import raise_file_limit, run_load

    raise_file_limit()
    whole, answers = bodies.whole_output, bodies.answers
    async with Client(
        url, bodies.api, timeout_s=timeout_s, api_key=api_key, whole_output=whole, answers=answers
    ) as client:
        prompts, stop = Prompts(vocabulary, seed), stop or asyncio.Event()
        return await run_load(planned, client, prompts, bodies, stop=stop, on_progress=on_progress)


@contextmanager
def _progress(each: _Load) -> Iterator[OnProgress]:
    """Show the number of ended requests, with the numbers of sent, running and failed requests."""
    from kvstore_cli.progress import progress_bar

    name, total = "trace" if each.rate_rps is None else f"{each.rate_rps:g} req/s", len(each.planned)
    with progress_bar(name, True, "requests ended") as progress:
        yield lambda now: progress(now.ended, total, f"sent {now.sent}, running {now.running}, failed {now.failed}")


# ---- the result --------------------------------------------------------------------------------------------------


def _write(
    runs: Sequence[tuple[LoadReport, Sequence[RequestOutcome]]], output: Path | None, chart: Path | None
) -> None:
    import msgspec

    from kvstore_serving.files import replace_file

    try:
        if output is not None:
            lines = [outcome.line() | {"rate_rps": report.rate_rps} for report, each in runs for outcome in each]
            replace_file(output, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        if chart is not None:
            from kvstore_serving.load.chart import draw

            draw(chart, runs)
    except OSError as error:
        fail("failed", f"{error.filename}: {error.strerror}")


def _failure(reports: Sequence[LoadReport]) -> CommandFailed | None:
    """Return the failure that the exit status reports, or None if the runs are complete."""
    last = reports[-1]
    if last.interrupted:
        given_up = f"{last.requests} requests are counted, {last.unfinished} were running and are not"
        return CommandFailed("failed", f"interrupted: {given_up}")
    if not any(report.completed for report in reports):
        first = last.errors[0]
        return CommandFailed("failed", f"all requests failed, {first.count} with {first.kind}: {first.message}")
    return None
