"""`kvstore plan`: plans the number of prefill and decode engines, their parallelism, and what the store must deliver.

`kvstore_serving.planning` does the work, which needs the extra `serving`. This file checks the options, shows the
progress, and ends with the status that `kvstore_cli.output` defines. A plan that does not serve the requested rate is a
result: its output says so, and its status is 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore_cli.options import JsonOption, need_modules, size_option
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
    rich_markup_mode=None, no_args_is_help=True, help="Plan a fleet with disaggregated prefill/decode."
)
# In the order of work; then two formulas.
plan_app.command(epilog=PROFILE_EXAMPLES)(profile)
plan_app.command(epilog=SEARCH_EXAMPLES)(search)
plan_app.command(epilog=VERIFY_EXAMPLES)(verify)


@plan_app.command(
    epilog=example("kvstore plan watch --proxy http://proxy:8000 --profile engine.json --slo-ttft 1 --slo-tpot 0.1")
)
def watch(
    proxy: Annotated[str, typer.Option(metavar="URL", help="The proxy whose load is watched.")],
    profile: Annotated[
        str, typer.Option(metavar="FILE", help="Profile of the engines, or the name of a shipped profile.")
    ],
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time to the first token.")],
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="SLO of the time per token after the first.")],
    percentile: Annotated[float, typer.Option(help="Percentage of requests that must attain both SLOs.")] = 90.0,
    shape: Annotated[
        str | None, typer.Option(metavar="TP,PP", help="Shape of every engine. Default: the profile's first shape.")
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Length of the interval over which the load is measured.")
    ] = 60.0,
    drift: Annotated[float, typer.Option(min=0.01, help="Smallest relative change of the load that counts.")] = 0.2,
    node_bytes_per_s: Annotated[
        float, typer.Option(metavar="BYTES/S", help="Bandwidth of a node's link, each way.")
    ] = NODE,
    store_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S", help=f"Bandwidth of the store, each way. Default: as in the profile, or {STORE:g}."
        ),
    ] = None,
    pools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The proxy's --pools file, for the proposed command.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the first interval with requests.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a proxy's load, and propose new roles for its engines when the load has changed.

    With --json, each line is a JSON document.
    """
    need_modules("plan", "simpy", "aiohttp")
    from kvstore_cli.plan_watch import watch_load
    from kvstore_serving.load.report import Slo
    from kvstore_serving.planning.goodput import Goal
    from kvstore_serving.planning.placement import Shape
    from kvstore_serving.planning.watching import Watched

    check_positive("--slo-ttft", slo_ttft, "a number of seconds")
    check_positive("--slo-tpot", slo_tpot, "a number of seconds")
    check_percentile(percentile)
    found = profile_of(profile)
    degrees = found.shapes[0] if shape is None else tuple(parse_numbers("--shape", shape))
    if degrees not in found.shapes:
        shapes = ", ".join(f"{tp},{pp}" for tp, pp in found.shapes)
        fail("usage", f"--shape {shape} is not in the profile, which has {shapes}")
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
    """Change the roles of as few of a proxy's engines as possible. The proxy follows the file."""
    need_modules("plan", "uvicorn", "starlette", "aiohttp")
    from kvstore_cli.plan_tables import print_roles
    from kvstore_serving.planning.roles import RolesError, shift_roles

    try:
        shifted = shift_roles(pools, prefill, decode)
    except RolesError as error:
        fail("usage", str(error))
    show(shifted, as_json, lambda: print_roles(shifted))


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
    intra: Annotated[int | None, typer.Option(min=1, metavar="N", help="N devices that share every prefill.")] = None,
    speedup: Annotated[
        float | None, typer.Option(metavar="K", help="With --intra: the N devices are K times as fast as one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute, in closed form, the wait and the time to the first token for prompts of one length."""
    from kvstore_cli.plan_tables import print_queue
    from kvstore_serving.planning import queueing

    check_positive("--service-s", service_s, "a number of seconds")
    check_positive("--rate", rate, "a number of requests per second")
    if inter is not None and intra is not None:
        fail("usage", "--inter and --intra were given; expected only one of them, or neither for a single device")
    if (intra is None) != (speedup is None):
        fail("usage", "--intra N and --speedup K must be given together: N devices are K times as fast as one")
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
    link_bytes_per_s: Annotated[
        float, typer.Option(metavar="B", help="Bandwidth of the link from the lender's memory.")
    ],
    memory_bytes_per_s: Annotated[float, typer.Option(metavar="B", help="Bandwidth of the engine's own memory.")],
    other_s: Annotated[float, typer.Option(metavar="T", help="Seconds of the rest of a step, mostly for the weights.")],
    overhead_s: Annotated[float, typer.Option(metavar="T", help="Seconds of a step in which no copy runs.")],
    kv_bytes: Annotated[int | None, size_option("KV that a step of decoding reads.")] = None,
    resident_bytes: Annotated[
        int | None, size_option("Instead of --kv-bytes: the engine's memory for KV, to compute what fits.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model; two stay in memory as buffers.")
    ] = None,
    lost_share: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of the copies' time that computing loses: 0 to below 1."),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Compute how much of a decode engine's KV cache can live in another memory without making its steps longer."""
    from kvstore_cli.plan_tables import print_pipeline
    from kvstore_serving.planning.pipeline import Hardware, largest_kv, plan_pipeline

    if (kv_bytes is None) == (resident_bytes is None):
        fail("usage", "expected either --kv-bytes or --resident-bytes")
    check_positive("--link-bytes-per-s", link_bytes_per_s, "a number of bytes per second")
    check_positive("--memory-bytes-per-s", memory_bytes_per_s, "a number of bytes per second")
    for option, value in (("--other-s", other_s), ("--overhead-s", overhead_s)):
        if not 0 <= value < math.inf:
            fail("usage", f"{option} {value:g}: expected a number of seconds, 0 or more")
    if not 0 <= lost_share < 1:
        fail("usage", f"--lost-share {lost_share:g}: expected a share, 0 or more and less than 1")
    hardware = Hardware(link_bytes_per_s, memory_bytes_per_s, other_s, overhead_s, layers, lost_share)
    read_bytes: float | None = kv_bytes
    if resident_bytes is not None:
        read_bytes = largest_kv(resident_bytes, hardware)
        if read_bytes is None:
            fail(
                "usage",
                f"--link-bytes-per-s {link_bytes_per_s:g}: a link this fast lets any amount of KV fit; give --kv-bytes",
            )
    assert read_bytes is not None
    found = plan_pipeline(read_bytes, hardware)
    show(found, as_json, lambda: print_pipeline(found))
