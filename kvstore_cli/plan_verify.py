"""`kvstore plan verify`: its options and its runs. The load of each rate is sent to the engines, and also simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.load import check_reached, check_url, send, stop_on_signals
from kvstore_cli.options import JsonOption, need_modules, takes
from kvstore_cli.output import CommandFailed, example, fail, show
from kvstore_cli.plan_options import NODE, STORE, check_positive, make_links, parse_numbers, profile_of
from kvstore_cli.progress import progress_bar
from kvstore_cli.traces import TRACE_HELP, BlockTokensOption, TimeUnitOption, say_what_is_odd, unit_of

if TYPE_CHECKING:
    from kvstore_serving.load.records import Planned
    from kvstore_serving.load.report import Slo
    from kvstore_serving.load.run import RunProgress
    from kvstore_serving.planning.document import PlanDocument
    from kvstore_serving.planning.placement import EnginePlacement
    from kvstore_serving.planning.profile import Profile
    from kvstore_serving.planning.simulator import Fleet
    from kvstore_serving.planning.verify import Compared
    from kvstore_serving.planning.workload import Recipe

VERIFY_REQUESTS: Final = 200  # the number in a run with synthetic requests
# Options for values that a plan contains, in the order in which errors name them.
_OF_PLANS: Final = (
    *("profile", "slo_ttft", "slo_tpot", "colocated", "prefill", "decode", "gpus_per_node", "max_batch"),
    *("chunk_tokens", "node_bytes_per_s", "store_bytes_per_s", "input_tokens", "output_tokens"),
)
VERIFY_EXAMPLES: Final = example(
    "kvstore plan search … --json >plan.json",
    "kvstore plan verify --plan plan.json --url http://proxy:8000 --model M",
    "kvstore plan verify --profile engine.json --url http://engine-1:8000 --model M --input-tokens 512 \\",
    "    --output-tokens 64 --slo-ttft 1 --slo-tpot 0.1 --rate 1 --rate 1.5 --rate 2 --rate 2.5 --rate 3",
)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `kvstore plan verify`."""

    url: Annotated[str, typer.Option(metavar="URL", help="The engine, or the proxy in front of engines.")]
    model: Annotated[str, typer.Option(help="Name of the model, as the endpoint serves it.")]
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of `plan search --json`: engines, load, SLOs, and the rates of its curve."
        ),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Send this trace, at each rate: {TRACE_HELP}.")
    ] = None
    block_tokens: BlockTokensOption = None
    time_unit: TimeUnitOption = None
    rate: Annotated[
        list[float] | None,
        typer.Option(metavar="R", help="Requests per second; give five or more rates, for one run each."),
    ] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Requests of each run. Default: the whole trace, or {VERIFY_REQUESTS}.")
    ] = None
    hits: Annotated[
        bool, typer.Option("--hits/--no-hits", help="Whether the store has the shared parts of prompts.")
    ] = True
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="Profile of the engines.")] = None
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer.")] = None
    slo_ttft: Annotated[float | None, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")] = (
        None
    )
    slo_tpot: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="SLO of the time per token after the first.")
    ] = None
    colocated: Annotated[
        str | None, typer.Option(metavar="TP,PP,N", help="N engines that do both phases. Default: 1,1,1.")
    ] = None
    prefill: Annotated[str | None, typer.Option(metavar="TP,PP,N", help="N prefill engines; with --decode.")] = None
    decode: Annotated[str | None, typer.Option(metavar="TP,PP,N", help="N decode engines.")] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs of a node. Default: each engine has nodes of its own.")
    ] = None
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="The most requests that an engine decodes at once. Default: 256.")
    ] = None
    chunk_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens in a step of an engine that does both phases. Default: 2048.")
    ] = None
    node_bytes_per_s: Annotated[
        float | None, typer.Option(metavar="BYTES/S", help=f"Bandwidth of a node's link, each way. Default: {NODE:g}.")
    ] = None
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S", help=f"Bandwidth of the store, each way. Default: as in the profile, or {STORE:g}."
        ),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, and not counted.")] = 10
    vocab: Annotated[int, typer.Option(min=16, metavar="TOKENS", help="Prompts have token ids below this.")] = 1024
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and prompts.")] = 0
    as_json: JsonOption = False


@takes(VerifyOptions)
def verify(given: VerifyOptions) -> None:
    """Compare the attainment that the simulator predicts with that of real engines, at several rates.

    Give either --plan, or --profile with the SLOs and a load. The load is either --trace, or --input-tokens with
    --output-tokens.
    """
    need_modules("plan", "simpy", "aiohttp")
    from kvstore_cli.plan_tables import print_verified
    from kvstore_serving.planning.verify import verified
    from kvstore_serving.planning.workload import without_hits

    check_url(given.url)
    read = None if given.plan is None else _planned_by(given, given.plan)
    slo, fleet = _engines(given) if read is None else (read.slo, read.fleet)
    recipe = _recipe(given, read)
    if not given.hits:
        recipe = without_hits(recipe)
    rates = _rates(given.rate, read)
    compared = compare_rates(given, fleet, slo, recipe, rates)
    failure = None
    if len(compared) < len(rates):
        failure = CommandFailed("failed", f"interrupted: {len(compared)} of {len(rates)} rates are compared")
        if not compared:
            raise failure
    result = verified(compared, slo, recipe, apart=fleet.placement.colocated is None)
    show(result, given.as_json, lambda: print_verified(result), failure)


def _planned_by(given: VerifyOptions, plan: Path) -> PlanDocument:
    """Return the plan. Ends the command if an option is given whose value the plan contains."""
    own = [name for name in _OF_PLANS if getattr(given, name) is not None]
    if own:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in own)
        fail("usage", f"--plan has its own engines, links, lengths and SLOs: leave out {options}")
    return _read(plan)


def _engines(given: VerifyOptions) -> tuple[Slo, Fleet]:
    from kvstore_serving.load.report import Slo

    if given.profile is None or given.slo_ttft is None or given.slo_tpot is None:
        needed = {"--profile": given.profile, "--slo-ttft": given.slo_ttft, "--slo-tpot": given.slo_tpot}
        missing = [name for name, value in needed.items() if value is None]
        fail("usage", f"{', '.join(missing)} not given: give --plan, or else --profile with both SLOs and a load")
    for option, value in (("--slo-ttft", given.slo_ttft), ("--slo-tpot", given.slo_tpot)):
        check_positive(option, value, "a number of seconds")
    return Slo(given.slo_ttft, given.slo_tpot), _fleet(given, profile_of(given.profile))


def _recipe(given: VerifyOptions, read: PlanDocument | None) -> Recipe:
    from kvstore_serving.planning.workload import Lengths, Synthetic

    if given.trace is not None:
        if given.input_tokens is not None or given.output_tokens is not None:
            fail("usage", "--trace has its own lengths: leave out --input-tokens and --output-tokens")
        return _traced(given, given.trace, read)
    if given.block_tokens is not None or given.time_unit is not None:
        fail("usage", "--block-tokens and --time-unit need --trace")
    if read is not None:
        return read.basis.load
    if given.input_tokens is None or given.output_tokens is None:
        fail("usage", "expected a load: --input-tokens with --output-tokens, --trace, or a --plan with a load")
    return Synthetic(Lengths(given.input_tokens), Lengths(given.output_tokens))


def compare_rates(
    given: VerifyOptions, fleet: Fleet, slo: Slo, recipe: Recipe, rates: Sequence[float]
) -> list[Compared]:
    """Measure and predict the attainment at each rate. After an interrupt, the rates that were complete are returned.
    Ends the command if the endpoint cannot be used or the load cannot be sent."""
    import asyncio

    from kvstore_serving.load.arrivals import seed_of
    from kvstore_serving.load.client import RequestBodies
    from kvstore_serving.load.report import make_report
    from kvstore_serving.load.run import LoadRun
    from kvstore_serving.planning.verify import compare, decisions_at, split_share

    async def measured(planned: list[Planned], seed: int, ended: Callable[[RunProgress], None]) -> LoadRun:
        stop = stop_on_signals()
        return await send(given.url, planned, bodies, given.vocab, seed, ended, stop=stop)

    seeds = [seed_of(given.seed, number) for number in range(len(rates))]
    loads = [_planned(given, recipe, rate, seed) for rate, seed in zip(rates, seeds, strict=True)]
    check_reached(given.url)
    bodies = RequestBodies(given.model, "completions")
    found = []
    for rate, seed, planned in zip(rates, seeds, loads, strict=True):
        with progress_bar(f"{rate:g} req/s", True, "requests") as progress:

            def ended(now: RunProgress, total: int = len(planned)) -> None:
                progress(now.ended, total)

            before = asyncio.run(decisions_at(given.url))
            run = asyncio.run(measured(planned, seed, ended))
            after = asyncio.run(decisions_at(given.url))
        if run.interrupted:
            break
        report = make_report(run, slo, rate_rps=rate, source="verify", url=given.url, model=given.model, seed=seed)
        if not report.completed:
            fail("failed", f"all requests failed, {report.errors[0].kind}: {report.errors[0].message}")
        found.append(compare(fleet, recipe, planned, run.outcomes, report, split_share(before, after)))
    return found


# ---- options -----------------------------------------------------------------------------------------------------


def _read(file: Path) -> PlanDocument:
    from kvstore_serving.planning.document import PlanError, read_plan

    try:
        return read_plan(file)
    except PlanError as error:
        fail("usage", f"--plan {error}")


def _traced(given: VerifyOptions, trace: Path, read: PlanDocument | None) -> Recipe:
    """Return a trace that replaces the plan's load. The store keeps as much as the plan assumed or, without a plan,
    everything."""
    from kvstore_serving.load.trace import TraceError, read_trace
    from kvstore_serving.planning.workload import Replayed

    unit = unit_of(given.time_unit)
    limit = None if given.requests is None else given.warmup + given.requests
    try:
        say_what_is_odd(trace, read_trace(trace, limit, block_tokens=given.block_tokens, time_unit=unit))
    except TraceError as error:
        fail("usage", f"--trace {error}")
    kept = None if read is None else round(read.store.kept_bytes / read.basis.pools[0].profile.kv_bytes_per_token)
    return Replayed(str(trace), kept_tokens=kept, block_tokens=given.block_tokens, time_unit=unit)


def _rates(given: Sequence[float] | None, read: PlanDocument | None) -> list[float]:
    from kvstore_serving.planning.verify import LEAST_RATES

    rates = list(dict.fromkeys(given or ([] if read is None else [point.rate_rps for point in read.curve])))
    for value in rates:
        check_positive("--rate", value, "a number of requests per second")
    if len(rates) < LEAST_RATES:
        fail(
            "usage",
            f"--rate: {len(rates)} different rates; expected {LEAST_RATES} or more, so that a curve is compared and "
            "not only a few points. Without --rate, the rates of --plan are used",
        )
    return rates


def _planned(given: VerifyOptions, recipe: Recipe, rate: float, seed: int) -> list[Planned]:
    from kvstore_serving.planning.verify import planned_load
    from kvstore_serving.planning.workload import Synthetic

    requests = VERIFY_REQUESTS if given.requests is None and isinstance(recipe, Synthetic) else given.requests
    try:
        planned = planned_load(recipe, rate, requests, given.warmup, seed)
    except ValueError as error:  # includes `TraceError`
        fail("usage", f"the load's trace {error}; to use another trace, give --trace FILE")
    if len(planned) <= given.warmup:
        fail("usage", f"the load has {len(planned)} requests: --warmup {given.warmup} leaves none to count")
    return planned


def _fleet(given: VerifyOptions, profile: Profile) -> Fleet:
    """Return the fleet. Without --gpus-per-node, each engine has nodes of its own."""
    from kvstore_serving.planning.fleet import NodePool
    from kvstore_serving.planning.simulator import Fleet

    placement = _placement(given.colocated, given.prefill, given.decode)
    for engines in placement.phases:
        if (engines.shape.tp, engines.shape.pp) not in profile.shapes:
            shapes = ", ".join(f"{tp},{pp}" for tp, pp in profile.shapes)
            fail("usage", f"tp {engines.shape.tp} with pp {engines.shape.pp} is not in the profile, which has {shapes}")
    largest = max(engines.shape.tp for engines in placement.phases)
    gpus = largest if given.gpus_per_node is None else given.gpus_per_node
    if gpus < largest:
        fail("usage", f"--gpus-per-node {gpus}: expected at least the tensor parallelism of an engine, {largest}")
    node = NODE if given.node_bytes_per_s is None else given.node_bytes_per_s
    links = make_links("store", node, 1.0, given.store_bytes_per_s, 1, "1GiB", profile.store)
    max_batch = 256 if given.max_batch is None else given.max_batch
    chunk_tokens = 2048 if given.chunk_tokens is None else given.chunk_tokens
    return Fleet([NodePool(profile, placement.gpus, gpus)], links, placement, max_batch, chunk_tokens)


def _placement(colocated: str | None, prefill: str | None, decode: str | None) -> EnginePlacement:
    from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape

    def engines(option: str, text: str) -> Engines:
        numbers = parse_numbers(option, text)
        if len(numbers) != 3:
            fail("usage", f"{option} {text!r}: expected TP,PP,N, such as 1,1,2 for two engines")
        return Engines(Shape(numbers[0], numbers[1]), numbers[2])

    if prefill is None and decode is None:
        return EnginePlacement(colocated=engines("--colocated", colocated or "1,1,1"))
    if prefill is None or decode is None or colocated is not None:
        fail("usage", "give --prefill with --decode, or else --colocated")
    return EnginePlacement(engines("--prefill", prefill), engines("--decode", decode))
