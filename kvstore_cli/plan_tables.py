"""The output of `kvstore plan` for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.sizes import format_size
from kvstore_cli.output import printable
from kvstore_cli.plain_table import MS, columns, print_table, scaled

if TYPE_CHECKING:
    from kvstore_serving.planning.document import Colocated, PlanDocument
    from kvstore_serving.planning.outage import OutageCost
    from kvstore_serving.planning.pipeline import PipelinePlan
    from kvstore_serving.planning.placement import StageGpus
    from kvstore_serving.planning.profile import (
        DecodeTimes,
        Degree,
        PrefillTimes,
        Profile,
        StoreTimes,
        TransferTimes,
    )
    from kvstore_serving.planning.queueing import Queue
    from kvstore_serving.planning.roles import Shifted
    from kvstore_serving.planning.verify import Verified
    from kvstore_serving.planning.watching import Proposal


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.0%} … {ends[1]:.0%}"


def _until(cost: OutageCost) -> str:
    return f"more than {cost.run_s:.0f}" if cost.recovered_s is None else f"{cost.recovered_s:.0f}"


def _stages(stages: Sequence[StageGpus]) -> str:
    return "; ".join(f"node {seat.node}: GPU {', '.join(map(str, seat.gpus))}" for seat in stages)


# The error of the predicted attainment in checks with real engines on CPUs, in points: the mean, and the worst.
# docs/planning.md has the same figures from the benchmarks' results.
OFF_ONE_ENGINE: Final = (3.9, 10.0)
OFF_APART: Final = (4.7, 18.0)  # with a profile that was measured with --store and --beside
OFF_ALONE: Final = (20.0, 42.5)  # with another profile
LARGEST_ERROR: Final = 0.1  # of a fit: beyond it, the formula does not fit the engine


# fmt: off
_USED: Final = columns(("", "0"), ("busy", "1", ".0%"), ("peak memory", "2", ".0%"))
_CHANGES: Final = columns(("change", "change"), ("req/s", "goodput_rps", ".3g"), ("of the plan's", "ratio", ".0%"))
_CAPACITIES: Final = columns(
    ("kept", lambda at: format_size(at.kept_bytes) + (", as assumed" if at.assumed else "")),
    ("hits", "hit_rate", ".0%"), ("req/s", "goodput_rps", ".3g"), ("of the plan's", "ratio", ".0%"),
)
_OUTAGES: Final = columns(
    ("phase", "phase"), ("engines", "engines"), ("away s", "outage_s", "g"), ("requests that miss SLOs", "missed"),
    ("recovered after s", _until),
)
_PLACEMENT: Final = columns(
    ("phase", "0"), ("GPU", "1.gpu"), ("tp", "1.tp"), ("pp", "1.pp"), ("engines", "1.instances"), ("GPUs", "1.gpus"),
    ("price/hour", "1.price_per_hour", ".4g"),
)
_GOODPUT: Final = columns(
    ("", "0"), ("req/s", "1.goodput_rps", ".3g"), ("GPUs", "1.gpus"),
    ("req/s/GPU", "1.goodput_rps_per_gpu.value", ".3g"),
    ("its 95\xa0% interval", "1.goodput_rps_per_gpu.ci95", lambda ends: f"{ends[0]:.3g} … {ends[1]:.3g}"),
    ("price/hour", "1.price_per_hour", ".4g"), ("req/s/price", "1.goodput_rps_per_price.value", ".3g"),
)
_SEATS: Final = columns(("engine", "0"), ("GPU", "1"), ("GPUs of each stage", "2", _stages, True))
_ERROR_COLUMNS: Final = columns(("error", "1.error", ".1%"), ("at worst", "1.worst_error", ".1%"))
_OFF: Final = columns(
    ("ms", "1.seconds", scaled(1e3, ".2f")), ("fitted ms", "1.fitted_s", scaled(1e3, ".2f")),
    ("off", "1.error", "+.1%"),
)
_FITS: Final = columns(
    ("tp", "0"), ("phase", "2"), ("a ms", "1.fixed_s", scaled(1e3, ".2f")), ("b us", "3", scaled(1e6, ".3g")),
    ("c", "4"), *_ERROR_COLUMNS,
)
_HELD: Final = columns(("tp", "0"), ("pp", "1"), ("tokens", "2"))
_SAMPLES: Final = columns(("phase", "0"), ("requests", "1.requests"), ("tokens each", "1.tokens", "g"), *_OFF)
_TRANSFER_FITS: Final = columns(
    ("", "0"), ("a ms", "1.latency_s", scaled(1e3, ".3f")),
    ("b GB/s", "1.per_byte_s", lambda seconds: f"{1e-9 / seconds:.3g}"), *_ERROR_COLUMNS,
)
_TRANSFERS: Final = columns(("", "0"), ("bytes", "1.nbytes", format_size), *_OFF)
_ATTAINED_COLUMNS: Final = columns(
    ("req/s", "rate_rps", ".4g"), ("predicted", "predicted", ".1%"), ("95\xa0%", "predicted_ci95", _interval),
    ("measured", "measured", ".1%"), ("95\xa0%", "measured_ci95", _interval), ("off, points", "error", ".1f"),
)
_MEDIANS: Final = columns(
    ("req/s", "rate_rps", ".4g"), ("TTFT, predicted", "predicted_ttft_s", MS), ("measured", "measured_ttft_s", MS),
    ("TPOT, predicted", "predicted_tpot_s", MS), ("measured", "measured_tpot_s", MS),
)
_QUEUE: Final = columns(("ms", "0"), ("mean", "1.mean", MS), ("p90", "1.p90", MS), ("p99", "1.p99", MS))
# fmt: on


def print_queue(queue: Queue) -> None:
    """Print the results of the closed forms."""
    rows = (("wait", queue.wait_s), ("time to the first token", queue.ttft_s))
    print_table(f"Utilisation {queue.utilisation:.1%}", _QUEUE, rows)


def print_pipeline(plan: PipelinePlan) -> None:
    """Print how much of the KV cache can live in another memory."""
    gain = "unlimited" if plan.capacity_gain is None else f"{plan.capacity_gain:.2f} x"
    lost = plan.step_s / plan.step_alone_s - 1
    without = f"{lost:.0%} longer than without the pipeline" if lost > 0 else "as without the pipeline"
    print(
        f"{plan.alpha:.1%} of the KV cache can live elsewhere ({plan.alpha_bandwidth:.1%} by the ratio of the "
        f"bandwidths alone): capacity {gain}\n"
        f"the lender holds {format_size(plan.lender_bytes)}; {format_size(plan.resident_bytes)} stay in the engine\n"
        f"a step takes {plan.step_s * 1000:.2f} ms, {without}; the link is busy for {plan.link_share:.0%} of it"
    )
    if plan.alpha == 0:
        print("nothing can move: starting the copies takes as long as the step")
    elif plan.alpha < 1 and plan.knee_bytes_per_s is not None:
        print(f"with a link of {plan.knee_bytes_per_s / 1e9:.3g} GB/s or more, the whole KV cache could")


def verdict(plan: PlanDocument) -> list[str]:
    """Return the answer in sentences: what serves the requested rate for the lowest price, or the most for its
    price."""
    priced = any(pool.price != 1 for pool in plan.basis.pools)

    def cost(gpus: int, price: float) -> str:
        return f"{gpus} GPUs" + (f" for {price:.4g} an hour" if priced else "")

    other = plan.colocated
    apart = f"P/D with {cost(plan.gpus, plan.price_per_hour)} serves {plan.goodput_rps:.3g} req/s"
    if other.placement is None or not other.goodput_rps_per_price:
        found = [apart, "Colocated engines cannot hold the SLOs at any rate"]
    else:
        both = f"Colocated engines with {cost(other.gpus, other.price_per_hour)} serve {other.goodput_rps:.3g} req/s"
        if plan.rate_rps is None:
            apart_first = plan.goodput_rps_per_price.value >= other.goodput_rps_per_price.value
        elif plan.enough and other.enough:
            apart_first = plan.price_per_hour < other.price_per_hour
        else:
            apart_first = plan.enough or (not other.enough and plan.goodput_rps >= other.goodput_rps)
        neither = plan.rate_rps is not None and not plan.enough and not other.enough
        first, than = (apart, both) if apart_first else (both, apart)
        verb = "is" if apart_first else "are"
        better = f"which {verb} nearer to it" if neither else f"and {verb} the better buy"
        found = [f"{first}, {better}", than]
    if plan.rate_rps is not None and not plan.enough and not other.enough:
        found.append("These nodes cannot serve the requested rate")
    asked = "" if plan.rate_rps is None else f"Requested: {plan.rate_rps:.3g} req/s. "
    profiles = list({pool.profile.name: pool.profile for pool in plan.basis.pools}.values())
    return [f"{asked}{'. '.join(found)}.", _trust(profiles), *filter(None, map(misfit, profiles))]


def _trust(profiles: Sequence[Profile]) -> str:
    """Return how far predictions from profiles of this kind were off. The figures are of measured profiles."""
    check = "Check the plan on your engines with `kvstore plan verify` before you buy."
    published = [printable(profile.name) for profile in profiles if not profile.measured]
    if published:
        return (
            f"These are simulations with published times ({', '.join(published)}). They were never compared with "
            f"engines that have such times, so no figure says how far they are off. {check}"
        )
    given = {
        "--store": all(profile.store is not None for profile in profiles),
        "--beside": all(max(profile.contention.prefill, profile.contention.decode) > 1 for profile in profiles),
    }
    lacks = [option for option, has in given.items() if not has]
    apart = OFF_ALONE if lacks else OFF_APART
    how = f" with a profile without {' and '.join(lacks)}, as here" if lacks else ""
    return (
        "These are simulations. They were compared with engines on CPUs that `kvstore plan profile` had measured, "
        f"never on GPUs. On CPUs, their attainment was off by {OFF_ONE_ENGINE[0]:g} points in the mean and "
        f"{OFF_ONE_ENGINE[1]:g} at worst for one engine, and by {apart[0]:g} and {apart[1]:g} for P/D{how}. {check}"
    )


def misfit(profile: Profile) -> str:
    """Return a warning if the formula does not fit the measured times of the engine or of transfers, and nothing if it
    does."""
    fits: list[tuple[str, PrefillTimes | DecodeTimes | TransferTimes]] = []
    for degree in profile.degrees:
        fits += [("prefill", degree.prefill), *(("decode", fit) for fit in degree.decode)]
    if profile.store is not None:
        fits += [("store read", profile.store.read), ("store write", profile.store.write)]
    worst: dict[str, float] = {}
    for what, fit in fits:
        if (fit.error or 0.0) > LARGEST_ERROR:
            worst[what] = max(fit.error or 0.0, worst.get(what, 0.0))
    if not worst:
        return ""
    missed = ", ".join(f"{what} {error:.0%}" for what, error in worst.items())
    lengths = ", or with --lengths that are nearer to your prompts" if worst.keys() & {"prefill", "decode"} else ""
    return (
        f"Do not trust plans from the profile {printable(profile.name)}: its formula misses measured times in the mean "
        f"by more than {LARGEST_ERROR:.0%}: {missed}. Measure again while the machine does nothing else{lengths}."
    )


def print_plan(plan: PlanDocument) -> None:
    """Print a plan."""
    for line in verdict(plan):
        print(textwrap.fill(line, 80))
    print()
    print(
        f"{', '.join(printable(each) for each in plan.profiles)}; {printable(plan.workload)}, "
        f"{plan.hit_rate:.0%} of prompts' tokens in the store; {plan.percentile:g} % of requests within "
        f"TTFT {plan.slo.ttft_s:g} s and TPOT {plan.slo.tpot_s:g} s\n"
    )
    _print_placement(plan)
    asked = "" if plan.rate_rps is None else f" ({plan.rate_rps:.3g} requested)"
    print(f"\ngoodput {plan.goodput_rps:.3g} req/s{asked}; the first limit as the rate grows: {plan.binding}")
    if not plan.enough:
        print("these nodes cannot serve the rate: the placement is the one that serves most")
    queue, waited_s = plan.closed_form, plan.time_s.get("prefill_queue", 0.0)
    if queue is None:
        print("a prefill engine can compute this many prompts only in batches: no closed form gives their wait")
    else:
        print(
            f"if all prompts had the mean length, a prefill engine would be {queue.utilisation:.0%} busy, and they "
            f"would wait {queue.wait_s.mean * 1000:.0f} ms on average, {queue.wait_s.p90 * 1000:.0f} ms at P90 "
            f"(M/D/1); in the simulation, prompts wait {waited_s * 1000:.0f} ms on average"
        )
    store = plan.store
    print(
        f"the store must deliver {store.read_bytes_per_s / 1e9:.3g} GB/s and accept "
        f"{store.write_bytes_per_s / 1e9:.3g} GB/s at {store.rate_rps:.3g} req/s, and hold "
        f"{format_size(store.capacity_bytes)} ({format_size(store.kept_bytes)} of it for later prompts): "
        f"{store.nodes} node(s)\n"
    )
    parts = ((part.replace("_", " "), seconds) for part, seconds in plan.time_s.items())
    print_table("Mean time of a request at the goodput", columns(("part", "0"), ("ms", "1", MS)), parts)
    print()
    used: list[tuple[str, float, float | None]]
    used = [(phase, share, plan.memory[phase]) for phase, share in plan.busy.items()]
    used += [(f"{link} link", share, None) for link, share in plan.links.items()]
    print_table("Used at the goodput", _USED, used)
    if plan.sensitivity:
        print()
        print_table("Goodput of these engines if one thing changes", _CHANGES, plan.sensitivity)
    if plan.capacities:
        print()
        print_table("Goodput of these engines by what the store keeps", _CAPACITIES, plan.capacities)
    if plan.outages:
        print()
        print_table(f"One engine fails, at {plan.outages[0].rate_rps:.3g} req/s", _OUTAGES, plan.outages)


def _print_placement(plan: PlanDocument) -> None:
    """Print the engines, what they serve and cost, and their nodes."""
    placed, other = plan.placement, plan.colocated
    priced = any(pool.price != 1 for pool in plan.basis.pools)  # if all GPUs cost 1, the price is the number of GPUs
    engines = {"prefill": placed.prefill, "decode": placed.decode, "instead, colocated": other.placement}
    held = [(name if each else "colocated: none", each) for name, each in engines.items()]
    print_table("Placement", _PLACEMENT[: None if priced else -1], held)
    print()
    ways: dict[str, PlanDocument | Colocated] = {"P/D": plan, "colocated": other}
    known = [(name, each) for name, each in ways.items() if each.goodput_rps_per_gpu and each.goodput_rps_per_price]
    print_table("Goodput", _GOODPUT[: None if priced else -2], known)
    print()
    seats = (
        (f"{phase} {number}", of_phase.gpu, stages)
        for phase, of_phase in (("prefill", placed.prefill), ("decode", placed.decode))
        for number, stages in enumerate(of_phase.seats)
    )
    print_table("Where the engines are", _SEATS, seats)


def _fits(degree: Degree) -> Iterator[tuple[object, ...]]:
    fit = degree.prefill
    yield degree.tp, fit, "prefill", fit.per_token_s, f"{fit.per_token_squared_s * 1e9:.3g} ns"
    for each in degree.decode:
        yield (
            degree.tp,
            each,
            "decode" if each.from_batch == 1 else f"decode, B >= {each.from_batch}",
            each.per_context_token_s,
            f"{each.per_request_s * 1e6:.3g} us",
        )


def print_profile(profile: Profile) -> None:
    """Print the fitted times next to the measured times."""
    fits = [fit for degree in profile.degrees for fit in _fits(degree)]
    print_table(f"{printable(profile.name)}: {printable(profile.source)}", _FITS, fits)
    print(
        "prefill of prompts of L tokens each: a + b sum(L) + c sum(L^2)\n"
        "step of decoding of B requests: a + b sum(context) + c B"
    )
    for degree in profile.degrees:
        if degree.prefill.residuals:
            print()
            residuals = [("prefill", each) for each in degree.prefill.residuals]
            residuals += [("decode", each) for fit in degree.decode for each in fit.residuals]
            print_table(f"Measured, tp {degree.tp}", _SAMPLES, residuals)
    if warning := misfit(profile):
        print(f"\n{textwrap.fill(warning, 80)}")
    contention = profile.contention
    if contention.prefill > 1 or contention.decode > 1:
        print(
            f"\nwhile another engine of its node works, a prefill takes {contention.prefill:.2f} times as long, "
            f"and a decoding step {contention.decode:.2f} times as long"
        )
    if profile.store is not None:
        _print_transfers(profile.store)
    print()
    held = ((degree.tp, pp, tokens) for degree in profile.degrees for pp, tokens in degree.kv_tokens.items())
    print_table("Tokens that fit the memory of an engine", _HELD, held)


def _print_transfers(store: StoreTimes) -> None:
    print()
    ways = (("read", store.read), ("write", store.write))
    print_table("Transfers of one client: a + bytes / b", _TRANSFER_FITS, ways)
    print()
    print_table("Measured transfers", _TRANSFERS, ((way, each) for way, fit in ways for each in fit.residuals))


def print_verified(verified: Verified) -> None:
    """Print the predicted and the measured results."""
    print_table("SLO attainment", _ATTAINED_COLUMNS, verified.compared)
    print()
    print_table("Medians, ms", _MEDIANS, verified.compared)
    last = verified.compared[-1]
    measured = "" if last.measured_hit_rate is None else f", {last.measured_hit_rate:.0%} by the engines' own count"
    print(
        f"\n{printable(verified.workload)}; {last.predicted_hit_rate:.0%} of prompts' tokens in the store{measured}\n"
        f"mean error {verified.mean_error:.1f} points, worst {verified.worst_error:.1f}"
    )
    shares = [each.split_share for each in verified.compared if each.split_share is not None]
    if not shares and verified.apart:
        print("the endpoint is not a kvstore proxy: whether two engines shared these requests is not known")
    elif shares and verified.apart and min(shares) < 1:
        print(
            f"the proxy split {_percents(shares)} of the requests, and one engine served each of the others "
            "(colocated), but the prediction is for split requests: start the proxy with --policy split"
        )
    elif shares and not verified.apart and max(shares) > 0:
        print(
            f"the proxy split {_percents(shares)} of the requests, but the prediction is for colocated engines: start "
            "the proxy with --policy colocate"
        )


def _percents(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def print_roles(shifted: Shifted) -> None:
    """Print the engines that got new roles."""
    for url, before, after in shifted.changed:
        print(f"{printable(url)}: {before} -> {after}")
    print(f"{shifted.prefill} prefill and {shifted.decode} decode engines; {len(shifted.changed)} changed")


def print_proposal(proposal: Proposal, command: str) -> None:
    """Print the result of one interval of `kvstore plan watch`."""
    load = proposal.load
    print(
        f"{load.rate_rps:.3g} req/s, {load.input_tokens:.0f} to {load.output_tokens:.0f} tokens, "
        f"{load.hit_rate:.0%} of prompts cached" + (f"; changed: {', '.join(proposal.drift)}" if proposal.drift else "")
    )
    now, best = proposal.now, proposal.best
    if best is None:
        return
    if now is not None and now.prefill + now.decode > best.prefill + best.decode:
        print(f"now {now.prefill} engines that do both serve {now.goodput_rps:.3g} req/s")
    elif now is not None:
        print(f"now {now.prefill} prefill and {now.decode} decode engines serve {now.goodput_rps:.3g} req/s")
    if proposal.change:
        gain = "" if proposal.gain is None else f", {proposal.gain:.2f} x"
        print(
            f"{best.prefill} prefill and {best.decode} decode engines would serve {best.goodput_rps:.3g} req/s{gain}: "
            f"{command}"
        )
    else:
        print("no other split of roles would serve more")
    if not proposal.enough:
        print(f"these {best.prefill + best.decode} engines cannot serve the load: add engines (`kvstore plan search`)")
