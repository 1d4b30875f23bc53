"""`kvstore plan verify`: its options, and its runs. Each rate is sent to the engines, and simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.load import check_url
from kvstore_cli.options import JsonOption
from kvstore_cli.output import example, fail, show
from kvstore_cli.plan_options import NODE, STORE, check_positive, make_links, need_modules, parse_numbers, profile_of
from kvstore_cli.progress import progress_bar

if TYPE_CHECKING:
    from kvstore_serving.load.records import Planned
    from kvstore_serving.load.report import Slo
    from kvstore_serving.load.run import Run
    from kvstore_serving.planning.document import Plan
    from kvstore_serving.planning.placement import Placement
    from kvstore_serving.planning.simulator import Fleet
    from kvstore_serving.planning.verify import Compared
    from kvstore_serving.planning.workload import Recipe

TIMEOUT_S: Final = 600.0
REQUESTS: Final = 200  # of a run with synthetic requests
VERIFY_EXAMPLES: Final = example(
    "kvstore plan search … --json >plan.json",
    "kvstore plan verify --plan plan.json --url http://proxy:8000 --model M",
    "kvstore plan verify --profile engine.json --url http://engine-1:8000 --model M --input-tokens 512 \\",
    "    --output-tokens 64 --slo-ttft 1 --slo-tpot 0.1 --rate 1 --rate 1.5 --rate 2 --rate 2.5 --rate 3",
)


@dataclass(frozen=True)
class Against:
    """The endpoint, and what is sent there. `requests`: of each rate; None: all of a trace."""

    url: str
    model: str
    recipe: Recipe
    requests: int | None
    warmup: int
    vocabulary: int
    seed: int
    slo: Slo


def verify(
    url: Annotated[str, typer.Option(metavar="URL", help="The engine, or the proxy before engines.")],
    model: Annotated[str, typer.Option(help="Name of the model, as the endpoint serves it.")],
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `plan search --json` printed: engines, load, SLOs, and the rates of its curve."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send this trace (Mooncake's format), at each rate.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(metavar="R", help="Requests per second; five or more: one run each.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Requests of each run. Default: the whole trace, or {REQUESTS}.")
    ] = None,
    hits: Annotated[
        bool, typer.Option("--hits/--no-hits", help="Whether prompts find in the store what they share with others.")
    ] = True,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="Profile of the engines.")] = None,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer.")] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(metavar="SECONDS", help="SLO of the time per later token.")] = None,
    colocated: Annotated[
        str | None, typer.Option(metavar="TP,PP,N", help="N engines that do both. Default: 1,1,1.")
    ] = None,
    prefill: Annotated[str | None, typer.Option(metavar="TP,PP,N", help="N prefill engines; with --decode.")] = None,
    decode: Annotated[str | None, typer.Option(metavar="TP,PP,N", help="N decode engines.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs of a node. Default: each engine has nodes of its own.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Most requests that an engine decodes at once. Default: 256.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of a step of an engine that does both. Default: 2048.")
    ] = None,
    node_bytes_per_s: Annotated[
        float | None, typer.Option(metavar="BYTES/S", help=f"Of a node's link, each way. Default: {NODE:g}.")
    ] = None,
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(metavar="BYTES/S", help=f"Of the store, each way. Default: as in the profile, or {STORE:g}."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, and not counted.")] = 10,
    vocab: Annotated[int, typer.Option(min=16, metavar="TOKENS", help="Prompts have token ids below this.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and prompts.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare the attainment that the simulator predicts with that of real engines, at several rates.

    Give --plan; or --profile with the SLOs, and --trace or --input-tokens with --output-tokens.
    """
    need_modules("simpy", "aiohttp")
    from kvstore_cli.plan_tables import print_verified
    from kvstore_serving.load.report import Slo
    from kvstore_serving.planning.verify import verified
    from kvstore_serving.planning.workload import Lengths, Synthetic, without_hits

    check_url(url)
    own: dict[str, object] = {
        "--profile": profile, "--slo-ttft": slo_ttft, "--slo-tpot": slo_tpot, "--colocated": colocated,
        "--prefill": prefill, "--decode": decode, "--gpus-per-node": gpus_per_node, "--max-batch": max_batch,
        "--chunk-tokens": chunk_tokens, "--node-bytes-per-s": node_bytes_per_s,
        "--store-bytes-per-s": store_bytes_per_s,
    }  # fmt: skip
    lengths = {"--input-tokens": input_tokens, "--output-tokens": output_tokens}
    read: Plan | None = None
    recipe: Recipe
    if plan is not None:
        if given := [option for option, value in (own | lengths).items() if value is not None]:
            fail("usage", f"--plan has its own engines, links, lengths and SLOs: leave out {', '.join(given)}")
        read = _read(plan)
        slo, fleet, recipe = read.slo, read.fleet, read.basis.load
    else:
        if profile is None or slo_ttft is None or slo_tpot is None:
            missing = [name for name in ("--profile", "--slo-ttft", "--slo-tpot") if own[name] is None]
            fail("usage", f"{', '.join(missing)} not given: give --plan, or else --profile with both SLOs and a load")
        for option, value in (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot)):
            check_positive(option, value, "seconds")
        slo = Slo(slo_ttft, slo_tpot)
        fleet = _fleet(
            profile, _placement(colocated, prefill, decode), gpus_per_node,
            NODE if node_bytes_per_s is None else node_bytes_per_s,
            store_bytes_per_s, 256 if max_batch is None else max_batch, 2048 if chunk_tokens is None else chunk_tokens,
        )  # fmt: skip
    if trace is not None:
        if input_tokens is not None or output_tokens is not None:
            fail("usage", "--trace has its own lengths: leave out --input-tokens and --output-tokens")
        recipe = _traced(trace, read)
    elif read is None:
        if input_tokens is None or output_tokens is None:
            fail("usage", "a load is --input-tokens with --output-tokens, or --trace, or what --plan has")
        recipe = Synthetic(Lengths(input_tokens), Lengths(output_tokens))
    if not hits:
        recipe = without_hits(recipe)
    if requests is None and isinstance(recipe, Synthetic):
        requests = REQUESTS
    rates = _rates(rate, read)
    against = Against(url, model, recipe, requests, warmup, vocab, seed, slo)
    result = verified(compare_rates(fleet, against, rates, shown=not as_json), slo, recipe)
    show(result, as_json, lambda: print_verified(result))


def compare_rates(fleet: Fleet, against: Against, rates: Sequence[float], shown: bool) -> list[Compared]:
    """Measure and predict each rate. Ends the command if the endpoint cannot be used, or the load cannot be sent."""
    from kvstore_serving.load.arrivals import seed_of
    from kvstore_serving.load.client import reach
    from kvstore_serving.load.report import make_report
    from kvstore_serving.planning.verify import compare

    loads = [_planned(against, rate, seed_of(against.seed, number)) for number, rate in enumerate(rates)]
    try:
        asyncio.run(reach(against.url))
    except (OSError, asyncio.TimeoutError) as error:
        fail("unreachable", f"nobody listens at {against.url}: {error}")
    found = []
    for number, (rate, planned) in enumerate(zip(rates, loads, strict=True)):
        seed = seed_of(against.seed, number)
        with progress_bar(f"{rate:g} req/s", shown, "requests") as progress:
            run = asyncio.run(_send(against, planned, seed, lambda done: progress(done, len(planned))))  # noqa: B023
        report = make_report(
            run, against.slo, rate_rps=rate, source="verify", url=against.url, model=against.model, seed=seed
        )
        if not report.completed:
            fail("failed", f"all requests failed, {report.errors[0].kind}: {report.errors[0].message}")
        found.append(compare(fleet, against.recipe, planned, run.outcomes, report))
    return found


async def _send(against: Against, planned: Sequence[Planned], seed: int, ended: Callable[[int], None]) -> Run:
    from kvstore_serving.load.client import Bodies, Client
    from kvstore_serving.load.prompts import Prompts
    from kvstore_serving.load.run import raise_file_limit, run_load

    raise_file_limit()
    bodies = Bodies(against.model, "completions")
    client = Client(against.url, "completions", timeout_s=TIMEOUT_S, api_key=None, whole_output=bodies.whole_output)
    async with client:
        return await run_load(
            planned,
            client,
            Prompts(against.vocabulary, seed),
            bodies,
            stop=asyncio.Event(),
            on_progress=lambda now: ended(now.ended),
        )


# ---- options -----------------------------------------------------------------------------------------------------


def _read(file: Path) -> Plan:
    from kvstore_serving.planning.document import PlanError, read_plan

    try:
        return read_plan(file)
    except PlanError as error:
        fail("usage", f"--plan {error}")


def _traced(trace: Path, read: Plan | None) -> Recipe:
    """A trace in place of the plan's load. The store keeps of it as much as the plan assumed, else all."""
    from kvstore_serving.planning.workload import Replayed

    if read is None:
        return Replayed(str(trace))
    kept = read.store.kept_bytes / read.basis.pools[0].profile.kv_bytes_per_token
    return Replayed(str(trace), kept_tokens=round(kept))


def _rates(given: Sequence[float] | None, read: Plan | None) -> list[float]:
    from kvstore_serving.planning.verify import LEAST_RATES

    rates = list(dict.fromkeys(given or ([] if read is None else [point.rate_rps for point in read.curve])))
    for value in rates:
        check_positive("--rate", value, "requests per second")
    if len(rates) < LEAST_RATES:
        fail(
            "usage",
            f"--rate: {len(rates)} rates; expected {LEAST_RATES} or more, different ones, so that a curve is compared "
            "and not a few points. Without --rate, those of --plan are taken",
        )
    return rates


def _planned(against: Against, rate: float, seed: int) -> list[Planned]:
    from kvstore_serving.planning.verify import planned_load

    try:
        planned = planned_load(against.recipe, rate, against.requests, against.warmup, seed)
    except ValueError as error:  # a `TraceError` is one
        fail("usage", f"the load's trace {error}; --trace FILE gives another one")
    if len(planned) <= against.warmup:
        fail("usage", f"{len(planned)} requests, of which --warmup {against.warmup} leaves none to count")
    return planned


def _fleet(
    profile: str,
    placement: Placement,
    gpus_per_node: int | None,
    node_bytes_per_s: float,
    store_bytes_per_s: float | None,
    max_batch: int,
    chunk_tokens: int,
) -> Fleet:
    """gpus_per_node: None: each engine has nodes of its own."""
    from kvstore_serving.planning.fleet import Pool
    from kvstore_serving.planning.simulator import Fleet

    found = profile_of(profile)
    for engines in placement.phases:
        if (engines.shape.tp, engines.shape.pp) not in found.shapes:
            shapes = ", ".join(f"{tp},{pp}" for tp, pp in found.shapes)
            fail("usage", f"tp {engines.shape.tp}, pp {engines.shape.pp} are not in the profile, which has {shapes}")
    largest = max(engines.shape.tp for engines in placement.phases)
    gpus = largest if gpus_per_node is None else gpus_per_node
    if gpus < largest:
        fail("usage", f"--gpus-per-node {gpus}: expected {largest} or more, the tensor parallelism of an engine")
    links = make_links("store", node_bytes_per_s, 1.0, store_bytes_per_s, 1, "1GiB", found.store)
    return Fleet([Pool(found, placement.gpus, gpus)], links, placement, max_batch, chunk_tokens)


def _placement(colocated: str | None, prefill: str | None, decode: str | None) -> Placement:
    from kvstore_serving.planning.placement import Engines, Placement, Shape

    def engines(option: str, text: str) -> Engines:
        numbers = parse_numbers(option, text)
        if len(numbers) != 3:
            fail("usage", f"{option} {text!r}: expected TP,PP,N, such as 1,1,2 for two engines")
        return Engines(Shape(numbers[0], numbers[1]), numbers[2])

    if prefill is None and decode is None:
        return Placement(colocated=engines("--colocated", colocated or "1,1,1"))
    if prefill is None or decode is None or colocated is not None:
        fail("usage", "give --prefill with --decode, or else --colocated")
    return Placement(engines("--prefill", prefill), engines("--decode", decode))
