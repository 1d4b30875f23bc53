"""`kvstore plan`: how many prefill and decode engines, with which parallelism, and what the store must deliver.

The work is done by `kvstore_serving.planning`, which needs the extra `serving`. This file checks the options, shows the
progress, and ends with the status that `kvstore_cli.output` defines. A plan that does not serve the rate that was asked
for is a result: it says so, and its status is 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore_cli.options import JsonOption, need_modules
from kvstore_cli.output import example, fail, show
from kvstore_cli.plan_options import (
    NODE,
    STORE,
    check_percentile,
    check_positive,
    make_links,
    parse_numbers,
    profile_of,
)
from kvstore_cli.plan_profile import PROFILE_EXAMPLES, profile
from kvstore_cli.plan_search import SEARCH_EXAMPLES, search
from kvstore_cli.plan_verify import VERIFY_EXAMPLES, verify

plan_app: Final = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Plan a fleet with prefill and decode apart."
)
plan_app.command(epilog=SEARCH_EXAMPLES)(search)
plan_app.command(epilog=VERIFY_EXAMPLES)(verify)


@plan_app.command(
    epilog=example(
        "kvstore plan queue --service-s 0.2 --rate 3",
        "kvstore plan queue --service-s 0.2 --rate 3 --intra 2 --speedup 1.7",
    )
)
def queue(
    service_s: Annotated[float, typer.Option(metavar="D", help="Seconds of one prefill on one device.")],
    rate: Annotated[float, typer.Option(metavar="R", help="Requests per second, at random times (Poisson).")],
    inter: Annotated[int | None, typer.Option(min=1, metavar="N", help="A pipeline of N devices.")] = None,
    intra: Annotated[int | None, typer.Option(min=1, metavar="N", help="N devices share every prefill.")] = None,
    speedup: Annotated[
        float | None, typer.Option(metavar="K", help="With --intra: they are K times as fast together.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait and time to the first token of prompts of one length, in closed form."""
    from kvstore_cli.plan_tables import print_queue
    from kvstore_serving.planning import queueing

    check_positive("--service-s", service_s, "seconds")
    check_positive("--rate", rate, "requests per second")
    if inter is not None and intra is not None:
        fail("usage", "--inter and --intra were given; expected one of them, or neither for one device")
    if (intra is None) != (speedup is None):
        fail("usage", "--intra N and --speedup K go together: N devices are K times as fast as one")
    try:
        if intra is not None and speedup is not None:
            if not 1 <= speedup <= intra:
                fail("usage", f"--speedup {speedup:g}: expected 1 to {intra}, the number of devices")
            found = queueing.intra_op(service_s, rate, speedup)
        elif inter is not None:
            found = queueing.inter_op(service_s, rate, inter)
        else:
            found = queueing.one_device(service_s, rate)
    except queueing.Unstable as error:
        fail("usage", f"--rate {rate:g}: {error}")
    show(found, as_json, lambda: print_queue(found))


@plan_app.command(
    epilog=example(
        "kvstore plan pipeline --kv-bytes 40e9 --link-bytes-per-s 272e9 --memory-bytes-per-s 1.55e12 \\",
        "    --other-s 0.017 --overhead-s 0.001",
    )
)
def pipeline(
    link_bytes_per_s: Annotated[float, typer.Option(metavar="B", help="From the lender's memory.")],
    memory_bytes_per_s: Annotated[float, typer.Option(metavar="B", help="Of the engine's own memory.")],
    other_s: Annotated[float, typer.Option(metavar="T", help="Seconds of the rest of a step: weights above all.")],
    overhead_s: Annotated[float, typer.Option(metavar="T", help="Seconds of a step in which no copy runs.")],
    kv_bytes: Annotated[
        float | None, typer.Option(metavar="M", help="KV that a step of decoding reads, in bytes.")
    ] = None,
    resident_bytes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Instead: the engine's memory for KV. Computed is what fits with a lender."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of the model: two of them are counted as buffers that stay.")
    ] = None,
    lost_share: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of the time that copies run, how much computing loses: 0 to below 1."),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """How much of a decode engine's KV cache can live in another memory without a longer step."""
    from kvstore_cli.plan_tables import print_pipeline
    from kvstore_serving.planning.pipeline import Hardware, largest_kv, plan_pipeline

    if (kv_bytes is None) == (resident_bytes is None):
        fail("usage", "expected either --kv-bytes or --resident-bytes")
    if kv_bytes is not None:
        check_positive("--kv-bytes", kv_bytes, "bytes")
    if resident_bytes is not None:
        check_positive("--resident-bytes", resident_bytes, "bytes")
    check_positive("--link-bytes-per-s", link_bytes_per_s, "bytes per second")
    check_positive("--memory-bytes-per-s", memory_bytes_per_s, "bytes per second")
    for option, value in (("--other-s", other_s), ("--overhead-s", overhead_s)):
        if not 0 <= value < math.inf:
            fail("usage", f"{option} {value:g}: expected seconds, 0 or more")
    if not 0 <= lost_share < 1:
        fail("usage", f"--lost-share {lost_share:g}: expected a share, 0 or more and less than 1")
    hardware = Hardware(link_bytes_per_s, memory_bytes_per_s, other_s, overhead_s, layers, lost_share)
    if resident_bytes is not None:
        kv_bytes = largest_kv(resident_bytes, hardware)
        if kv_bytes is None:
            fail(
                "usage",
                f"--link-bytes-per-s {link_bytes_per_s:g}: so fast, beside this memory, that any amount of KV fits",
            )
    assert kv_bytes is not None
    found = plan_pipeline(kv_bytes, hardware)
    show(found, as_json, lambda: print_pipeline(found))


plan_app.command(epilog=PROFILE_EXAMPLES)(profile)


@plan_app.command(
    epilog=example("kvstore plan watch --proxy http://proxy:8000 --profile engine.json --slo-ttft 1 --slo-tpot 0.1")
)
def watch(
    proxy: Annotated[str, typer.Option(metavar="URL", help="The proxy whose load is watched.")],
    profile: Annotated[str, typer.Option(metavar="FILE", help="Profile of the engines, or the name of a shipped one.")],
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")],
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time per later token.")],
    percentile: Annotated[float, typer.Option(help="So many percent of requests must attain both SLOs.")] = 90.0,
    shape: Annotated[
        str | None, typer.Option(metavar="TP,PP", help="Of every engine. Default: the profile's first.")
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Of the load that counts.")] = 60.0,
    drift: Annotated[float, typer.Option(min=0.01, help="A change by this share is one.")] = 0.2,
    node_bytes_per_s: Annotated[float, typer.Option(metavar="BYTES/S", help="Of a node's link, each way.")] = NODE,
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(metavar="BYTES/S", help=f"Of the store, each way. Default: as in the profile, or {STORE:g}."),
    ] = None,
    pools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The proxy's --pools file, for the command that is proposed.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the first interval with requests.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a proxy's load, and propose other roles of its engines when it has changed.

    With --json, each line is a document.
    """
    need_modules("plan", "simpy", "aiohttp")
    from kvstore_cli.plan_watch import watch_load
    from kvstore_serving.load.report import Slo
    from kvstore_serving.planning.goodput import Goal
    from kvstore_serving.planning.placement import Shape
    from kvstore_serving.planning.watching import Watched

    check_positive("--slo-ttft", slo_ttft, "seconds")
    check_positive("--slo-tpot", slo_tpot, "seconds")
    check_percentile(percentile)
    found = profile_of(profile)
    degrees = found.shapes[0] if shape is None else tuple(parse_numbers("--shape", shape))
    if degrees not in found.shapes:
        shapes = ", ".join(f"{tp},{pp}" for tp, pp in found.shapes)
        fail("usage", f"--shape {shape}: not in the profile, which has {shapes}")
    links = make_links("store", node_bytes_per_s, 1.0, store_bytes_per_s, 1, "1GiB", found.store)
    watched = Watched(found, Shape(*degrees), links, Goal(Slo(slo_ttft, slo_tpot), percentile))
    watch_load(proxy, watched, interval, drift, pools, once=once, as_json=as_json)


@plan_app.command(epilog=example("kvstore plan roles pools.toml --prefill 3 --decode 5"))
def roles(
    pools: Annotated[Path, typer.Argument(metavar="FILE", help="The file that `kvstore proxy --pools` follows.")],
    prefill: Annotated[int, typer.Option(min=1, help="Engines that prefill.")],
    decode: Annotated[int, typer.Option(min=1, help="Engines that decode.")],
    as_json: JsonOption = False,
) -> None:
    """Shift the roles of a proxy's engines: as few as possible get another one. The proxy follows the file."""
    need_modules("plan", "uvicorn", "starlette", "aiohttp")
    from kvstore_cli.plan_tables import print_roles
    from kvstore_serving.planning.roles import RolesError, shift_roles

    try:
        shifted = shift_roles(pools, prefill, decode)
    except RolesError as error:
        fail("usage", str(error))
    show(shifted, as_json, lambda: print_roles(shifted))
