"""`kvstore plan search`: its options, and the search that they describe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.options import JsonOption, ended_by_sigterm, need_modules, takes
from kvstore_cli.output import example, fail, show
from kvstore_cli.plan_options import (
    NODE,
    STORE,
    check_finite,
    check_percentile,
    check_positive,
    check_writable,
    make_links,
    parse_bytes,
    profile_of,
)
from kvstore_cli.progress import progress_bar
from kvstore_cli.traces import TRACE_HELP, BlockTokensOption, TimeUnitOption, say_what_is_odd, unit_of

if TYPE_CHECKING:
    from kvstore_serving.planning.document import Placed, PlanDocument
    from kvstore_serving.planning.fleet import NodePool
    from kvstore_serving.planning.hit_curve import HitCurve
    from kvstore_serving.planning.search import Question
    from kvstore_serving.planning.workload import Recipe, Replayed

MOST_CV: Final = 20.0
_ENGINE_URL: Final = re.compile(r"https?://[^\s/?#]+")  # the form in `EngineRecord`
PART: Final = 100  # the least number of requests in a part of a trace
SEARCH_EXAMPLES: Final = example(
    "kvstore plan search --profile opt-13b-a100-80g --rate 6 --input-tokens 755 --output-tokens 200 \\",
    "    --slo-ttft 0.2 --slo-tpot 0.1 --percentile 90 --nodes 1 --gpus-per-node 4",
    "kvstore plan search --profile engine.json --trace conversation.jsonl.gz --slo-ttft 2 --slo-tpot 0.1 \\",
    "    --percentile 90 --nodes 4 --gpus-per-node 8 --chart plan.svg --pools pools.toml",
)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The options of `kvstore plan search`."""

    profile: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Profile of the engine, or the name of a shipped profile. Repeat it for each kind of GPU.",
        ),
    ]
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")]
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time per token after the first.")]
    nodes: Annotated[list[int], typer.Option(min=1, help="Number of nodes; once for each --profile.")]
    gpus_per_node: Annotated[list[int], typer.Option(min=1, help="GPUs of a node; once for each --profile.")]
    percentile: Annotated[float, typer.Option(help="Percentage of requests that must attain both SLOs.")] = 90.0
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests per second. Default: as many as possible for the price.")
    ] = None
    input_tokens: Annotated[float | None, typer.Option(metavar="N", help="Mean number of tokens in a prompt.")] = None
    output_tokens: Annotated[float | None, typer.Option(metavar="N", help="Mean number of tokens in an answer.")] = None
    input_cv: Annotated[
        float, typer.Option(min=0, help="Coefficient of variation of prompts' lengths (log-normal); 0: all equal.")
    ] = 0.0
    output_cv: Annotated[float, typer.Option(min=0, help="The same for answers.")] = 0.0
    arrival_cv: Annotated[
        float, typer.Option(min=0, help="The same for gaps between arrivals (gamma); 1: Poisson; more: bursts.")
    ] = 1.0
    hit_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of each prompt that the store has.")] = 0.0
    hit_curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the hit rate for --store-keeps from a result of benchmarks.eviction."),
    ] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Trace: {TRACE_HELP}.")] = None
    block_tokens: BlockTokensOption = None
    time_unit: TimeUnitOption = None
    speed: Annotated[float, typer.Option(help="Multiply the trace's rate by this number.")] = 1.0
    requests: Annotated[int | None, typer.Option(min=10, help="Only the first requests of the trace.")] = None
    hits: Annotated[
        bool, typer.Option("--hits/--no-hits", help="Whether the store has the shared parts of the trace's prompts.")
    ] = True
    price: Annotated[
        list[float] | None, typer.Option(min=0, help="Price of a GPU for an hour; once for each --profile. Default: 1.")
    ] = None
    via: Annotated[str, typer.Option(help="How blocks move: store, or direct (from GPU to GPU).")] = "store"
    node_bytes_per_s: Annotated[
        float, typer.Option(metavar="BYTES/S", help="Bandwidth of a node's link, each way.")
    ] = NODE
    inside_bytes_per_s: Annotated[
        float, typer.Option(metavar="BYTES/S", help="Bandwidth between GPUs of a node, for direct.")
    ] = 200e9
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S", help=f"Bandwidth of a store node, each way. Default: as in the profile, or {STORE:g}."
        ),
    ] = None
    store_nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the store. Default: as many as needed.")] = (
        None
    )
    store_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a store node.")] = "512GiB"
    store_keeps: Annotated[
        str | None, typer.Option(metavar="SIZE", help="How much the store keeps for later prompts. Default: all.")
    ] = None
    keep_seconds: Annotated[
        float, typer.Option(min=0, help="With --hit-rate: how long a block is kept for later prompts.")
    ] = 600.0
    max_batch: Annotated[int, typer.Option(min=1, help="The most requests that an engine decodes at once.")] = 256
    chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens in a step of a colocated engine; 0: no chunks, but whole prompts.")
    ] = 2048
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity/--no-sensitivity", help="Simulate what changes the goodput.")
    ] = True
    outage: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Also simulate an engine of each phase that fails for this long."),
    ] = None
    seeds: Annotated[
        int, typer.Option(min=1, max=10, help="Number of runs, which give the interval of the goodput.")
    ] = 5
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that simulate. Default: one for each core.")
    ] = None
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart into FILE.svg or FILE.png.")] = None
    pools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the engines as a file for `kvstore proxy --pools`.")
    ] = None
    prefill_url: Annotated[
        str, typer.Option(metavar="URL", help="With --pools: URL of prefill engines; {} is the number.")
    ] = "http://prefill-{}:8000"
    decode_url: Annotated[str, typer.Option(metavar="URL", help="With --pools: URL of decode engines.")] = (
        "http://decode-{}:8000"
    )
    as_json: JsonOption = False


@takes(SearchOptions)
def search(given: SearchOptions) -> None:
    """Search for a placement: the engines of both phases, their parallelism and goodput, and what the store must
    deliver.

    Give either --trace, or --rate with --input-tokens and --output-tokens.
    """
    need_modules("plan", "simpy", *(["matplotlib.figure"] if given.chart else []))
    from kvstore_cli.plan_tables import print_plan
    from kvstore_serving.planning.goodput import crew
    from kvstore_serving.planning.outage import OutageTooLong
    from kvstore_serving.planning.plan import make_plan
    from kvstore_serving.planning.search import NothingFits

    _check(given)
    question = _question(given)
    with (
        ended_by_sigterm(),
        progress_bar("simulating", True, "runs", grows=True) as progress,
        crew(progress, given.processes) as workers,
    ):
        try:
            plan = make_plan(question, workers, sensitivity=given.sensitivity, outage_s=given.outage)
        except NothingFits as error:
            fail("failed", str(error))
        except OutageTooLong as error:
            fail("usage", f"--outage: {error}")
    _write(plan, question, given)
    show(plan, given.as_json, lambda: print_plan(plan))


def _check(given: SearchOptions) -> None:
    check_positive("--slo-ttft", given.slo_ttft, "a number of seconds")
    check_positive("--slo-tpot", given.slo_tpot, "a number of seconds")
    check_percentile(given.percentile)
    if given.outage is not None:
        check_positive("--outage", given.outage, "a number of seconds")
    spread = {"--input-cv": given.input_cv, "--output-cv": given.output_cv, "--arrival-cv": given.arrival_cv}
    for option, value in spread.items():
        check_finite(option, value, MOST_CV)
    check_finite("--hit-rate", given.hit_rate, 1.0)
    check_finite("--keep-seconds", given.keep_seconds)
    check_writable(given.chart, given.pools)
    _check_urls(given.prefill_url, given.decode_url)


def _question(given: SearchOptions) -> Question:
    from kvstore_serving.load.report import Slo
    from kvstore_serving.planning.goodput import Goal
    from kvstore_serving.planning.search import Question

    pools = _pools(given.profile, given.nodes, given.gpus_per_node, given.price)
    profile = pools[0].profile
    links = make_links(
        given.via, given.node_bytes_per_s, given.inside_bytes_per_s, given.store_bytes_per_s, given.store_nodes,
        given.store_memory, profile.store,
    )  # fmt: skip
    kept = None if given.store_keeps is None else parse_bytes("--store-keeps", given.store_keeps)
    asked: float | None
    curve: HitCurve | None = None
    recipe: Recipe
    if given.trace is not None:
        kept_tokens = None if kept is None else int(kept // profile.kv_bytes_per_token)
        recipe, asked = _replayed(given, given.trace, kept_tokens)
        seeds = recipe.parts
    else:
        hit_rate = given.hit_rate
        if given.hit_curve is not None:
            curve = _curve(given.hit_curve, hit_rate, kept)
            assert kept is not None
            hit_rate = curve.at(kept / profile.kv_bytes_per_token)
        recipe = _synthetic(given, hit_rate)
        asked, seeds = given.rate, given.seeds
    return Question(
        pools=pools,
        links=links,
        recipe=recipe,
        goal=Goal(Slo(given.slo_ttft, given.slo_tpot), given.percentile),
        rate_rps=asked,
        max_batch=given.max_batch,
        chunk_tokens=given.chunk_tokens,
        seeds=range(seeds),
        fixed_store=given.store_nodes is not None,
        keep_s=given.keep_seconds,
        kept_bytes=kept if given.trace is None else None,
        hit_curve=curve,
    )


def _check_urls(*urls: str) -> None:
    """Check URLs that have `{}` in place of the engine's number."""
    for option, url in zip(("--prefill-url", "--decode-url"), urls, strict=True):
        try:
            fine = url.format(0) != url.format(1)
        except (LookupError, ValueError):
            fine = False
        if not fine or not _ENGINE_URL.fullmatch(url):
            fail("usage", f"{option} {url!r}: expected http://HOST:PORT with {{}} in place of the engine's number")
    if urls[0] == urls[1]:
        fail("usage", f"--prefill-url and --decode-url are both {urls[0]!r}: two engines would have the same URL")


def _pools(profiles: list[str], nodes: list[int], gpus: list[int], prices: list[float] | None) -> list[NodePool]:
    from kvstore_serving.planning.fleet import NodePool

    prices = prices or [1.0] * len(profiles)
    for price in prices:
        check_positive("--price", price, "a price")
    for option, values in (("--nodes", nodes), ("--gpus-per-node", gpus), ("--price", prices)):
        if len(values) != len(profiles):
            fail(
                "usage",
                f"{option} was given {len(values)} times; expected it once for each of {len(profiles)} --profile",
            )
    found = [profile_of(each) for each in profiles]
    if len({(each.model, each.kv_bytes_per_token) for each in found}) > 1:
        names = ", ".join(f"{each.name}: {each.model}" for each in found)
        fail("usage", f"--profile: expected engines of the same model, found {names}")
    return [NodePool(*each) for each in zip(found, nodes, gpus, prices, strict=True)]


def _synthetic(given: SearchOptions, hit_rate: float) -> Recipe:
    from kvstore_serving.planning.workload import Lengths, Synthetic

    only_traces = (given.requests, given.block_tokens, given.time_unit)
    if given.speed != 1.0 or any(value is not None for value in only_traces) or not given.hits:
        fail("usage", "--speed, --requests, --no-hits, --block-tokens and --time-unit need --trace")
    if given.input_tokens is None or given.output_tokens is None:
        fail("usage", "expected --input-tokens, --output-tokens and usually --rate, or else --trace")
    if given.rate is not None:
        check_positive("--rate", given.rate, "a number of requests per second")
    for option, value in (("--input-tokens", given.input_tokens), ("--output-tokens", given.output_tokens)):
        if not 1 <= value < math.inf:
            fail("usage", f"{option} {value:g}: expected 1 or more")
    inputs, outputs = Lengths(given.input_tokens, given.input_cv), Lengths(given.output_tokens, given.output_cv)
    return Synthetic(inputs, outputs, given.arrival_cv, hit_rate)


def _replayed(given: SearchOptions, trace: Path, kept_tokens: int | None) -> tuple[Replayed, float]:
    import msgspec

    from kvstore_serving.planning.workload import Replayed, rate_of

    own = (given.input_tokens, given.output_tokens, given.rate, given.hit_curve)
    spread = given.input_cv or given.output_cv or given.arrival_cv != 1.0
    if any(value is not None for value in own) or given.hit_rate or spread:
        fail(
            "usage",
            "--trace has its own rate, lengths and hits: leave out the options that set them, such as --rate",
        )
    check_positive("--speed", given.speed, "a factor")
    unit = unit_of(given.time_unit)
    recipe = Replayed(
        str(trace), given.requests, kept_tokens, given.hits, block_tokens=given.block_tokens, time_unit=unit
    )
    try:
        rate = rate_of(trace, given.requests, given.block_tokens, unit)
        say_what_is_odd(trace, recipe.read())
        parts = min(given.seeds, max(1, recipe.requests // PART))
        return msgspec.structs.replace(recipe, parts=parts), rate * given.speed
    except ValueError as error:  # includes `TraceError`
        fail("usage", f"--trace {error}")


def _curve(file: Path, hit_rate: float, kept: int | None) -> HitCurve:
    from kvstore_serving.planning.hit_curve import CurveError, read_curve

    if hit_rate:
        fail("usage", "--hit-rate and --hit-curve were given; expected only one of them")
    if kept is None:
        fail("usage", "--hit-curve: expected --store-keeps SIZE, too, because the hit rate depends on this size")
    try:
        return read_curve(file)
    except CurveError as error:
        fail("usage", f"--hit-curve {error}")


def _write(plan: PlanDocument, question: Question, given: SearchOptions) -> None:
    from kvstore_serving.files import replace_file

    try:
        if given.chart is not None:
            from kvstore_serving.planning.chart import draw

            draw(given.chart, plan)
        if given.pools is not None:
            model = question.pools[0].profile.model
            replace_file(given.pools, _pools_file(plan, model, given.prefill_url, given.decode_url).encode())
    except OSError as error:
        fail("failed", f"{error.filename}: {error.strerror}")


def _pools_file(plan: PlanDocument, model: str, prefill_url: str, decode_url: str) -> str:
    """Return the text of a file for `kvstore proxy --pools`, with an entry for each engine. In the given URLs, `{}`
    stands for the engine's number, from 0."""
    lines = [
        f"# {plan.placement.prefill.instances} prefill and {plan.placement.decode.instances} decode engines for "
        f"{plan.goodput_rps:.3g} requests/s: `kvstore proxy --pools FILE`",
        *_entries("prefill", plan.placement.prefill, model, prefill_url),
        *_entries("decode", plan.placement.decode, model, decode_url),
    ]
    return "\n".join(lines) + "\n"


def _entries(role: str, placed: Placed, model: str, url: str) -> Iterator[str]:
    for number in range(placed.instances):
        yield ""
        yield "[[engines]]"
        yield f"url = {_quoted(url.format(number))}"
        yield f'roles = ["{role}"]'
        yield f"model = {_quoted(model)}"
        yield f"tensor_parallel_size = {placed.tp}"
        yield f"pipeline_parallel_size = {placed.pp}"


def _quoted(text: str) -> str:
    """Return the text as a TOML string, which is written as in JSON."""
    import msgspec

    return msgspec.json.encode(text).decode()
