"""`kvstore plan search`: its options, and what they stand for."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.options import JsonOption
from kvstore_cli.output import example, fail, show
from kvstore_cli.plan_options import (
    NODE,
    STORE,
    check_finite,
    check_percentile,
    check_positive,
    check_writable,
    make_links,
    need_modules,
    parse_bytes,
    profile_of,
)
from kvstore_cli.progress import progress_bar

if TYPE_CHECKING:
    from kvstore_serving.planning.document import Plan
    from kvstore_serving.planning.fleet import Pool
    from kvstore_serving.planning.hit_curve import HitCurve
    from kvstore_serving.planning.search import Question
    from kvstore_serving.planning.workload import Recipe, Replayed

MOST_CV: Final = 20.0
_ENGINE_URL: Final = re.compile(r"https?://[^\s/?#]+")  # as engines register: `EngineRecord`
PART: Final = 100  # requests of a part of a trace, at least
SEARCH_EXAMPLES: Final = example(
    "kvstore plan search --profile opt-13b-a100-80g --rate 6 --input-tokens 755 --output-tokens 200 \\",
    "    --slo-ttft 0.2 --slo-tpot 0.1 --percentile 90 --nodes 1 --gpus-per-node 4",
    "kvstore plan search --profile engine.json --trace conversation.jsonl.gz --slo-ttft 2 --slo-tpot 0.1 \\",
    "    --percentile 90 --nodes 4 --gpus-per-node 8 --chart plan.svg --pools pools.toml",
)


def search(
    profile: Annotated[
        list[str],
        typer.Option(
            metavar="FILE", help="Profile of the engine, or the name of a shipped one. Several: kinds of GPU."
        ),
    ],
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")],
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time per later token.")],
    nodes: Annotated[list[int], typer.Option(min=1, help="Nodes; for each --profile.")],
    gpus_per_node: Annotated[list[int], typer.Option(min=1, help="GPUs of a node; for each --profile.")],
    percentile: Annotated[float, typer.Option(help="So many percent of requests must attain both SLOs.")] = 90.0,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests per second. Without it: the most for the price.")
    ] = None,
    input_tokens: Annotated[float | None, typer.Option(metavar="N", help="Mean tokens of a prompt.")] = None,
    output_tokens: Annotated[float | None, typer.Option(metavar="N", help="Mean tokens of an answer.")] = None,
    input_cv: Annotated[
        float, typer.Option(min=0, help="Coefficient of variation of prompts' lengths (log-normal); 0: all alike.")
    ] = 0.0,
    output_cv: Annotated[float, typer.Option(min=0, help="The same of answers.")] = 0.0,
    arrival_cv: Annotated[
        float, typer.Option(min=0, help="The same of gaps between arrivals (gamma); 1: Poisson; more: bursts.")
    ] = 1.0,
    hit_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of each prompt that the store has.")] = 0.0,
    hit_curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take it from a result of benchmarks.eviction, along --store-keeps."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace in Mooncake's JSONL format (also .gz).")
    ] = None,
    speed: Annotated[float, typer.Option(help="The trace's rate, so many times.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=10, help="Only the first requests of the trace.")] = None,
    hits: Annotated[
        bool, typer.Option("--hits/--no-hits", help="Whether prompts of the trace find what they share in the store.")
    ] = True,
    price: Annotated[
        list[float] | None, typer.Option(min=0, help="Of a GPU for an hour; for each --profile. Default: 1.")
    ] = None,
    via: Annotated[str, typer.Option(help="How blocks move: store, or direct (from GPU to GPU).")] = "store",
    node_bytes_per_s: Annotated[float, typer.Option(metavar="BYTES/S", help="Of a node's link, each way.")] = NODE,
    inside_bytes_per_s: Annotated[
        float, typer.Option(metavar="BYTES/S", help="Between GPUs of a node, for direct.")
    ] = 200e9,
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(metavar="BYTES/S", help=f"Of a store node, each way. Default: as in the profile, or {STORE:g}."),
    ] = None,
    store_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the store. Default: as many as it takes.")
    ] = None,
    store_memory: Annotated[str, typer.Option(metavar="SIZE", help="Of a store node.")] = "512GiB",
    store_keeps: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The store keeps so much for later prompts; default: all.")
    ] = None,
    keep_seconds: Annotated[
        float, typer.Option(min=0, help="With --hit-rate: a block is kept so long for later prompts.")
    ] = 600.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests that an engine decodes at once.")] = 256,
    chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Colocated engines: tokens of a step; 0: whole prompts, not in chunks.")
    ] = 2048,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity/--no-sensitivity", help="Look at what changes the goodput.")
    ] = True,
    outage: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="And say what an engine of each phase costs that is away for so long."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Runs of the interval of the goodput.")] = 5,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each core.")] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart into FILE.svg or FILE.png.")] = None,
    pools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the engines as `kvstore proxy --pools FILE` takes them.")
    ] = None,
    prefill_url: Annotated[
        str, typer.Option(metavar="URL", help="With --pools: of prefill engines; {} is the number.")
    ] = "http://prefill-{}:8000",
    decode_url: Annotated[
        str, typer.Option(metavar="URL", help="With --pools: of decode engines.")
    ] = "http://decode-{}:8000",
    as_json: JsonOption = False,
) -> None:
    """Search the placement: parallelism and engines of both phases, goodput, and what the store must deliver.

    Give --rate with --input-tokens and --output-tokens, or --trace.
    """
    need_modules("simpy", *(["matplotlib.figure"] if chart else []))
    from kvstore_cli.plan_tables import print_plan
    from kvstore_serving.load.report import Slo
    from kvstore_serving.planning.goodput import Goal, crew
    from kvstore_serving.planning.outage import OutageTooLong
    from kvstore_serving.planning.plan import make_plan
    from kvstore_serving.planning.search import NothingFits, Question

    check_positive("--slo-ttft", slo_ttft, "seconds")
    check_positive("--slo-tpot", slo_tpot, "seconds")
    check_percentile(percentile)
    if outage is not None:
        check_positive("--outage", outage, "seconds")
    for option, value in (("--input-cv", input_cv), ("--output-cv", output_cv), ("--arrival-cv", arrival_cv)):
        check_finite(option, value, MOST_CV)
    check_finite("--hit-rate", hit_rate, 1.0)
    check_finite("--keep-seconds", keep_seconds)
    check_writable(chart, pools)
    _check_urls(prefill_url, decode_url)
    found_pools = _pools(profile, nodes, gpus_per_node, price)
    links = make_links(
        via, node_bytes_per_s, inside_bytes_per_s, store_bytes_per_s, store_nodes, store_memory,
        found_pools[0].profile.store,
    )  # fmt: skip
    kept = None if store_keeps is None else parse_bytes("--store-keeps", store_keeps)
    kept_tokens = None if kept is None else int(kept // found_pools[0].profile.kv_bytes_per_token)
    curve: HitCurve | None = None
    recipe: Recipe
    asked: float | None
    if trace is not None:
        given = {"--input-tokens": input_tokens, "--output-tokens": output_tokens, "--rate": rate}
        spread = input_cv or output_cv or arrival_cv != 1.0
        if any(value is not None for value in given.values()) or hit_rate or hit_curve is not None or spread:
            fail("usage", "--trace has its own rate, lengths and hits: leave out --rate, --input-tokens and the like")
        recipe, asked = _replayed(trace, speed, requests, hits, kept_tokens, seeds)
        seeds = recipe.parts
    else:
        if speed != 1.0 or requests is not None or not hits:
            fail("usage", "--speed, --requests and --no-hits go with --trace")
        if hit_curve is not None:
            curve = _curve(hit_curve, hit_rate, kept)
            assert kept is not None
            hit_rate = curve.at(kept / found_pools[0].profile.kv_bytes_per_token)
        recipe = _synthetic(rate, input_tokens, output_tokens, input_cv, output_cv, arrival_cv, hit_rate)
        asked = rate
    question = Question(
        pools=found_pools,
        links=links,
        recipe=recipe,
        goal=Goal(Slo(slo_ttft, slo_tpot), percentile),
        rate_rps=asked,
        max_batch=max_batch,
        chunk_tokens=chunk_tokens,
        seeds=range(seeds),
        fixed_store=store_nodes is not None,
        keep_s=keep_seconds,
        kept_bytes=kept if trace is None else None,
        hit_curve=curve,
    )
    with progress_bar("simulating", not as_json, "runs") as progress, crew(progress, processes) as workers:
        try:
            plan = make_plan(question, workers, sensitivity=sensitivity, outage_s=outage)
        except NothingFits as error:
            fail("failed", str(error))
        except OutageTooLong as error:
            fail("usage", f"--outage: {error}")
    _write(plan, question, chart, pools, prefill_url, decode_url)
    show(plan, as_json, lambda: print_plan(plan))


def _check_urls(*urls: str) -> None:
    """URLs with `{}`, where the number of the engine goes."""
    for option, url in zip(("--prefill-url", "--decode-url"), urls, strict=True):
        try:
            fine = url.format(0) != url.format(1)
        except (LookupError, ValueError):
            fine = False
        if not fine or not _ENGINE_URL.fullmatch(url):
            fail("usage", f"{option} {url!r}: expected http://HOST:PORT with {{}} where the engine's number goes")
    if urls[0] == urls[1]:
        fail("usage", f"--prefill-url and --decode-url are both {urls[0]!r}: two engines would have one URL")


def _pools(profiles: list[str], nodes: list[int], gpus: list[int], prices: list[float] | None) -> list[Pool]:
    from kvstore_serving.planning.fleet import Pool

    prices = prices or [1.0] * len(profiles)
    for price in prices:
        check_positive("--price", price, "a price")
    for option, values in (("--nodes", nodes), ("--gpus-per-node", gpus), ("--price", prices)):
        if len(values) != len(profiles):
            fail(
                "usage", f"{option} was given {len(values)} times; expected once for each of {len(profiles)} --profile"
            )
    found = [profile_of(each) for each in profiles]
    if len({(each.model, each.kv_bytes_per_token) for each in found}) > 1:
        names = ", ".join(f"{each.name}: {each.model}" for each in found)
        fail("usage", f"--profile: expected engines of one model, found {names}")
    return [Pool(*each) for each in zip(found, nodes, gpus, prices, strict=True)]


def _synthetic(
    rate: float | None,
    input_tokens: float | None,
    output_tokens: float | None,
    input_cv: float,
    output_cv: float,
    arrival_cv: float,
    hit_rate: float,
) -> Recipe:
    from kvstore_serving.planning.workload import Lengths, Synthetic

    if input_tokens is None or output_tokens is None:
        fail("usage", "a workload is --input-tokens, --output-tokens and mostly --rate; or else --trace")
    if rate is not None:
        check_positive("--rate", rate, "requests per second")
    for option, value in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if not 1 <= value < math.inf:
            fail("usage", f"{option} {value:g}: expected 1 or more")
    return Synthetic(Lengths(input_tokens, input_cv), Lengths(output_tokens, output_cv), arrival_cv, hit_rate)


def _replayed(
    trace: Path, speed: float, requests: int | None, hits: bool, kept_tokens: int | None, seeds: int
) -> tuple[Replayed, float]:
    import msgspec

    from kvstore_serving.planning.workload import Replayed, rate_of

    check_positive("--speed", speed, "a number; 2 is twice the rate")
    recipe = Replayed(str(trace), requests, kept_tokens, hits)
    try:
        parts = min(seeds, max(1, recipe.requests // PART))
        return msgspec.structs.replace(recipe, parts=parts), rate_of(trace, requests) * speed
    except ValueError as error:  # a `TraceError` is one
        fail("usage", f"--trace {error}")


def _curve(file: Path, hit_rate: float, kept: int | None) -> HitCurve:
    from kvstore_serving.planning.hit_curve import CurveError, read_curve

    if hit_rate:
        fail("usage", "--hit-rate and --hit-curve were given; expected one of them")
    if kept is None:
        fail("usage", "--hit-curve: give --store-keeps SIZE, too: the hit rate is that of this size")
    try:
        return read_curve(file)
    except CurveError as error:
        fail("usage", f"--hit-curve {error}")


def _write(
    plan: Plan, question: Question, chart: Path | None, pools: Path | None, prefill_url: str, decode_url: str
) -> None:
    try:
        if chart is not None:
            from kvstore_serving.planning.chart import draw

            draw(chart, plan)
        if pools is not None:
            from kvstore_serving.planning.proxy_config import pools_file

            pools.write_text(pools_file(plan, question.pools[0].profile.model, prefill_url, decode_url))
    except OSError as error:
        fail("failed", f"{error.filename}: {error.strerror}")
