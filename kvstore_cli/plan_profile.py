"""What the options of `kvstore plan profile` stand for: engines that are measured, or files that are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_cli.output import fail
from kvstore_cli.plan_options import parse_numbers
from kvstore_cli.progress import progress_bar

if TYPE_CHECKING:
    from kvstore_serving.planning.profile import Profile
    from kvstore_serving.planning.profiling import Sweep


def kv_bytes_of(given: int | None, config: Path | None) -> int:
    from kvstore_serving.planning.model_config import ConfigError, kv_bytes_per_token

    if (given is None) == (config is None):
        fail("usage", "give --kv-bytes-per-token or --config, the model's config.json; one of them")
    if given is not None:
        return given
    assert config is not None
    try:
        return kv_bytes_per_token(config)
    except ConfigError as error:
        fail("usage", f"--config {error}")


def make_sweep(lengths: str, prefills: str, decodes: str, decode_tokens: int, rounds: int, vocab: int) -> Sweep:
    from kvstore_serving.planning.profiling import Sweep

    return Sweep(
        parse_numbers("--lengths", lengths),
        parse_numbers("--prefill-batches", prefills),
        parse_numbers("--decode-batches", decodes),
        decode_tokens,
        rounds,
        vocab,
    )


def imported(coefficients: Path, capacities: str | None, model: str, kv_bytes_per_token: int, gpu: str) -> Profile:
    import csv

    from kvstore_serving.planning.profile import Profile, ProfileError, from_distserve

    if capacities is None:
        fail("usage", "--distserve: give --kv-tokens FILE, too: DistServe's max_num_tokens.csv")
    try:
        with Path(capacities).open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        degrees = from_distserve(coefficients.read_bytes(), rows, model)
        source = f"coefficients of DistServe's simulator, {coefficients.name}"
        return Profile(coefficients.stem, model, gpu, source, False, kv_bytes_per_token, degrees)
    except OSError as error:
        fail("usage", f"{error.filename}: {error.strerror}")
    except ProfileError as error:
        fail("usage", f"--distserve {coefficients}: {error}")
    except ValueError as error:
        fail("usage", f"--kv-tokens {capacities}: expected rows of model,tp,pp,max_num_tokens: {error}")


def measured(
    urls: list[str],
    tps: list[int] | None,
    sweep: Sweep,
    model: str,
    kv_bytes_per_token: int,
    gpu: str,
    kv_tokens: str | None,
    shown: bool,
) -> Profile:
    import asyncio

    from kvstore_serving.planning import profiling
    from kvstore_serving.planning.fitting import TooFew
    from kvstore_serving.planning.profile import Profile

    tps = tps or [1] * len(urls)
    if not urls:
        fail("usage", "--url not given: name a running engine, or a file with --distserve")
    if len(tps) != len(urls) or len(set(tps)) != len(tps):
        fail("usage", f"--tp was given {len(tps)} times; expected once for each of {len(urls)} --url, and each another")
    given = iter(parse_numbers("--kv-tokens", kv_tokens) if kv_tokens is not None else [])
    if kv_tokens is not None and kv_tokens.count(",") + 1 != len(urls):
        fail("usage", f"--kv-tokens {kv_tokens}: expected a number for each of {len(urls)} --url")
    degrees = []
    for url, tp in zip(urls, tps, strict=True):
        tokens = next(given, None) if kv_tokens is not None else asyncio.run(profiling.kv_tokens(url))
        if tokens is None:
            fail("failed", f"{url}/metrics does not say how many tokens its memory holds: give --kv-tokens N")
        try:
            with progress_bar(f"measuring {url}", shown, "runs") as progress:
                found = asyncio.run(profiling.measure(url, model, sweep, progress))
            degrees.append(found.degree(tp, 1, tokens))
        except profiling.MeasureError as error:
            fail("failed", f"{url}: {error}")
        except TooFew as error:
            fail("usage", f"--lengths and the batches: {error}")
    source = f"measured with `kvstore plan profile`, {sweep.rounds} rounds"
    return Profile(model, model, gpu, source, True, kv_bytes_per_token, degrees, stage_s=0.0)


def with_contention(profile: Profile, url: str, beside: str, sweep: Sweep, shown: bool) -> Profile:
    import asyncio

    import msgspec

    from kvstore_serving.planning import profiling

    try:
        with progress_bar(f"measuring {url} beside {beside}", shown, "rounds") as progress:
            contention = asyncio.run(profiling.measure_contention(url, beside, profile.model, sweep, progress))
    except profiling.MeasureError as error:
        fail("failed", f"{url} beside {beside}: {error}")
    return msgspec.structs.replace(profile, contention=contention)


def with_transfers(profile: Profile, store: list[str]) -> Profile:
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
