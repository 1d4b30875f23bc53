"""`kvstore plan profile`: its options, and the two ways to make a profile, by measuring engines or by reading files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.load import check_reached, check_url
from kvstore_cli.options import JsonOption, need_modules, size_option, takes
from kvstore_cli.output import example, fail, show
from kvstore_cli.plan_options import check_writable, parse_numbers
from kvstore_cli.progress import progress_bar

if TYPE_CHECKING:
    from kvstore_serving.planning.profile import Profile
    from kvstore_serving.planning.profiling import ProfileGrid

PROFILE_EXAMPLES: Final = example(
    "kvstore plan profile --url http://engine-1:8000 --model M --config M/config.json --output engine.json",
    "kvstore plan profile --distserve profiler-a100-80g.json --kv-tokens max_num_tokens.csv \\",
    "    --model facebook/opt-13b --kv-bytes-per-token 819200 --output opt-13b.json",
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The options of `kvstore plan profile`."""

    model: Annotated[str, typer.Option(help="Name of the model, as the engine serves it.")]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The profile to write.")]
    kv_bytes_per_token: Annotated[
        int | None, size_option("KV of a token: 2 x layers x KV heads x head size x bytes of an element.")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of --kv-bytes-per-token: the model's config.json.")
    ] = None
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running engine that does nothing else; one for each --tp."),
    ] = None
    tp: Annotated[list[int] | None, typer.Option(min=1, help="Tensor parallelism of each --url. Default: 1.")] = None
    gpu: Annotated[str, typer.Option(help="Name of the engine's hardware, for people.")] = "measured"
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Lengths of the measured prompts and contexts, in tokens.")
    ] = "128,512,1024,2048"
    prefill_batches: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of prompts at once.")] = "1,2,4"
    decode_batches: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of requests that decode at once.")] = (
        "1,2,4,8"
    )
    decode_tokens: Annotated[int, typer.Option(min=4, help="Tokens of each answer when decoding is measured.")] = 32
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the median counts.")] = 3
    vocab: Annotated[int, typer.Option(min=16, metavar="TOKENS", help="Prompts have token ids below this.")] = 1024
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|FILE", help="Tokens that the engine's memory holds, for each --url. Default: what vLLM reports."
        ),
    ] = None
    store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Also measure transfers to and from this store, as in --endpoint. Removes only its own blocks.",
        ),
    ] = None
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Another engine of the same node: measure how much it slows the first --url down.",
        ),
    ] = None
    distserve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing; use coefficients of DistServe's simulator.")
    ] = None
    as_json: JsonOption = False


@takes(ProfileOptions)
def profile(given: ProfileOptions) -> None:
    """Measure how long an engine takes to prefill and to decode, fit the times, and write the profile."""
    need_modules("plan", "aiohttp")
    from kvstore_cli.plan_tables import print_profile
    from kvstore_serving.planning.profile import write_profile

    check_writable(None, given.output)
    kv_bytes = _kv_bytes(given.kv_bytes_per_token, given.config)
    if given.distserve is not None and given.beside is not None:
        fail("usage", "--beside and --distserve were given; expected only one: --distserve measures nothing")
    found = _measured(given, kv_bytes) if given.distserve is None else _imported(given, given.distserve, kv_bytes)
    if given.store is not None:
        found = _with_transfers(found, given.store)
    try:
        write_profile(found, given.output)
    except OSError as error:
        fail("failed", f"{error.filename}: {error.strerror}")
    show(found, given.as_json, lambda: print_profile(found))


def _kv_bytes(given: int | None, config: Path | None) -> int:
    from kvstore_serving.planning.model_config import ModelConfigError, kv_bytes_per_token

    if (given is None) == (config is None):
        fail("usage", "expected either --kv-bytes-per-token, or --config with the model's config.json")
    if given is not None:
        return given
    assert config is not None
    try:
        return kv_bytes_per_token(config)
    except ModelConfigError as error:
        fail("usage", f"--config {error}; or give --kv-bytes-per-token instead")


def _imported(given: ProfileOptions, coefficients: Path, kv_bytes: int) -> Profile:
    import csv

    from kvstore_serving.planning.profile import Profile, ProfileError, from_distserve

    model, capacities = given.model, given.kv_tokens
    if capacities is None:
        fail("usage", "--distserve: expected DistServe's max_num_tokens.csv as --kv-tokens FILE, too")
    try:
        with Path(capacities).open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        degrees = from_distserve(coefficients.read_bytes(), rows, model)
        source = f"coefficients of DistServe's simulator, {coefficients.name}"
        return Profile(coefficients.stem, model, given.gpu, source, False, kv_bytes, degrees)
    except OSError as error:
        fail("usage", f"{error.filename}: {error.strerror}")
    except ProfileError as error:
        fail("usage", f"--distserve {coefficients}: {error}")
    except ValueError as error:
        fail("usage", f"--kv-tokens {capacities}: expected rows of model,tp,pp,max_num_tokens: {error}")


def _measured(given: ProfileOptions, kv_bytes: int) -> Profile:
    import asyncio

    from kvstore_serving.planning import profiling
    from kvstore_serving.planning.fitting import TooFew
    from kvstore_serving.planning.profile import Profile

    sweep = profiling.ProfileGrid(
        parse_numbers("--lengths", given.lengths),
        parse_numbers("--prefill-batches", given.prefill_batches),
        parse_numbers("--decode-batches", given.decode_batches),
        given.decode_tokens,
        given.rounds,
        given.vocab,
    )
    urls, model, kv_tokens = given.url or [], given.model, given.kv_tokens
    tps = given.tp or [1] * len(urls)
    if not urls:
        fail("usage", "--url not given: expected the URL of a running engine, or --distserve FILE")
    if len(tps) != len(urls) or len(set(tps)) != len(tps):
        fail(
            "usage",
            f"--tp was given {len(tps)} times; expected it once for each of {len(urls)} --url, each "
            "time with another degree",
        )
    told = iter(parse_numbers("--kv-tokens", kv_tokens) if kv_tokens is not None else [])
    if kv_tokens is not None and kv_tokens.count(",") + 1 != len(urls):
        fail("usage", f"--kv-tokens {kv_tokens}: expected one number for each of {len(urls)} --url")
    for url in urls:
        check_url(url)
        check_reached(url)
    degrees = []
    for url, tp in zip(urls, tps, strict=True):
        tokens = next(told, None) if kv_tokens is not None else asyncio.run(profiling.kv_tokens(url))
        if tokens is None:
            fail("failed", f"{url}/metrics does not say how many tokens its memory holds: give --kv-tokens N")
        try:
            with progress_bar(f"measuring {url}", True, "runs") as progress:
                found = asyncio.run(profiling.measure(url, model, sweep, progress))
            degrees.append(found.degree(tp, 1, tokens))
        except profiling.MeasureError as error:
            fail("failed", f"{url}: {error}")
        except TooFew as error:
            fail("usage", f"--lengths, --prefill-batches, --decode-batches: {error}")
    source = f"measured with `kvstore plan profile`, {sweep.rounds} rounds"
    measured = Profile(model, model, given.gpu, source, True, kv_bytes, degrees, stage_s=0.0)
    return measured if given.beside is None else _with_contention(measured, urls[0], given.beside, sweep)


def _with_contention(profile: Profile, url: str, beside: str, sweep: ProfileGrid) -> Profile:
    import asyncio

    import msgspec

    from kvstore_serving.planning import profiling

    try:
        with progress_bar(f"measuring {url} while {beside} works", True, "rounds") as progress:
            contention = asyncio.run(profiling.measure_contention(url, beside, profile.model, sweep, progress))
    except profiling.MeasureError as error:
        fail("failed", f"{url}, while {beside} works: {error}")
    return msgspec.structs.replace(profile, contention=contention)


def _with_transfers(profile: Profile, store: list[str]) -> Profile:
    import msgspec

    from kvstore_cli.options import store_errors
    from kvstore_serving.planning.fitting import fit_transfer
    from kvstore_serving.planning.profile import StoreTimes
    from kvstore_serving.planning.transfers import measure_transfers

    with store_errors():
        try:
            reads, writes = measure_transfers(store, profile.kv_bytes_per_token)
        except ValueError as error:
            fail("usage", f"--store {','.join(store)}: {error}")
    return msgspec.structs.replace(profile, store=StoreTimes(fit_transfer(reads), fit_transfer(writes)))
