"""The output of `kvstore plan` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from kvstore.sizes import format_size
from kvstore_cli.output import printable
from kvstore_cli.plain_table import plain_table

if TYPE_CHECKING:
    from kvstore_serving.planning.document import Colocated, Plan
    from kvstore_serving.planning.goodput import Goodput
    from kvstore_serving.planning.pipeline import PipelinePlan
    from kvstore_serving.planning.profile import (
        DecodeTimes,
        PrefillTimes,
        Profile,
        Residual,
        StoreTimes,
        TransferResidual,
        TransferTimes,
    )
    from kvstore_serving.planning.queueing import Queue
    from kvstore_serving.planning.roles import Shifted
    from kvstore_serving.planning.verify import Verified
    from kvstore_serving.planning.watching import Proposal


def print_queue(queue: Queue) -> None:
    """Print the closed forms."""
    table = plain_table(f"Utilisation {queue.utilisation:.1%}", "ms", "mean", "p90", "p99")
    for name, times in (("wait", queue.wait_s), ("time to the first token", queue.ttft_s)):
        table.add_row(name, *(f"{value * 1000:.1f}" for value in (times.mean, times.p90, times.p99)))
    Console(highlight=False).print(table)


def print_pipeline(plan: PipelinePlan) -> None:
    """Print how much of the KV cache can live elsewhere."""
    gain = "without bound" if plan.capacity_gain is None else f"{plan.capacity_gain:.2f} x"
    lost = plan.step_s / plan.step_alone_s - 1
    without = f"{lost:.0%} longer than without" if lost > 0 else "with or without"
    print(
        f"{plan.alpha:.1%} of the KV cache can live elsewhere (the ratio of the bandwidths alone says "
        f"{plan.alpha_bandwidth:.1%}): capacity {gain}\n"
        f"the lender holds {format_size(plan.lender_bytes)}, {format_size(plan.resident_bytes)} stay\n"
        f"a step takes {plan.step_s * 1000:.2f} ms, {without}; the link is busy {plan.link_share:.0%} of it"
    )
    if plan.alpha == 0:
        print("nothing can leave: starting the copies takes as long as the step")
    elif plan.alpha < 1 and plan.knee_bytes_per_s is not None:
        print(f"from {plan.knee_bytes_per_s / 1e9:.3g} GB/s of the link on, all of it could")


def print_plan(plan: Plan) -> None:
    """Print a plan."""
    console = Console(highlight=False)
    print(
        f"{', '.join(printable(each) for each in plan.profiles)}; {printable(plan.workload)}, "
        f"{plan.hit_rate:.0%} of prompts' tokens in the store; {plan.percentile:g} % of requests within "
        f"TTFT {plan.slo.ttft_s:g} s and TPOT {plan.slo.tpot_s:g} s\n"
    )
    _print_placement(console, plan)
    asked = "" if plan.rate_rps is None else f" of {plan.rate_rps:.3g} that were asked for"
    print(f"\ngoodput {plan.goodput_rps:.3g} req/s{asked}; what is short first: {plan.binding}")
    if not plan.enough:
        print("these nodes cannot serve the rate: the placement is the one that serves most")
    queue, waited_s = plan.closed_form, plan.time_s.get("prefill_queue", 0.0)
    if queue is None:
        print("so many prompts a prefill engine can only compute in batches: no closed form says how long they wait")
    else:
        print(
            f"prompts all of the mean length would keep a prefill engine {queue.utilisation:.0%} busy and wait "
            f"{queue.wait_s.mean * 1000:.0f} ms in the mean, {queue.wait_s.p90 * 1000:.0f} ms at P90 (M/D/1); "
            f"simulated, they wait {waited_s * 1000:.0f} ms in the mean"
        )
    store = plan.store
    print(
        f"the store must deliver {store.read_bytes_per_s / 1e9:.3g} GB/s and take {store.write_bytes_per_s / 1e9:.3g} "
        f"GB/s at {store.rate_rps:.3g} req/s, and hold {format_size(store.capacity_bytes)}, "
        f"{format_size(store.kept_bytes)} of it for later prompts: {store.nodes} node(s)\n"
    )
    times = plain_table("Mean time of a request at the goodput", "part", "ms")
    for part, seconds in plan.time_s.items():
        times.add_row(part.replace("_", " "), f"{seconds * 1000:.1f}")
    console.print(times)
    print()
    used = plain_table("Used at the goodput", "", "busy", "memory, at most")
    for phase, share in plan.busy.items():
        used.add_row(phase, f"{share:.0%}", f"{plan.memory[phase]:.0%}")
    for link, share in plan.links.items():
        used.add_row(f"{link} link", f"{share:.0%}", "")
    console.print(used)
    if plan.sensitivity:
        print()
        changes = plain_table("Goodput of these engines if one thing changes", "change", "req/s", "of the plan's")
        for each in plan.sensitivity:
            changes.add_row(each.change, f"{each.goodput_rps:.3g}", f"{each.ratio:.0%}")
        console.print(changes)
    if plan.capacities:
        print()
        kept = plain_table("Goodput of these engines by what the store keeps", "kept", "hits", "req/s", "of the plan's")
        for at in plan.capacities:
            size = format_size(at.kept_bytes) + (", as assumed" if at.assumed else "")
            kept.add_row(size, f"{at.hit_rate:.0%}", f"{at.goodput_rps:.3g}", f"{at.ratio:.0%}")
        console.print(kept)
    if plan.outages:
        print()
        columns = ("engines", "away s", "requests that miss SLOs", "until, s")
        lost = plain_table(f"One engine fails, at {plan.outages[0].rate_rps:.3g} req/s", "phase", *columns)
        for cost in plan.outages:
            until = f"more than {cost.run_s:.0f}" if cost.recovered_s is None else f"{cost.recovered_s:.0f}"
            lost.add_row(cost.phase, str(cost.engines), f"{cost.outage_s:g}", str(cost.missed), until)
        console.print(lost)


def _print_placement(console: Console, plan: Plan) -> None:
    """Which engines, what they serve and cost, and where they are."""
    placed, other = plan.placement, plan.colocated
    priced = any(pool.price != 1 for pool in plan.basis.pools)  # in units of a GPU, a price says nothing new
    columns = ("GPU", "tp", "pp", "engines", "GPUs", *(("price an hour",) if priced else ()))
    table = plain_table("Placement", "phase", *columns)
    for name, engines in (
        ("prefill", placed.prefill),
        ("decode", placed.decode),
        ("instead, colocated", other.placement),
    ):
        if engines is None:
            table.add_row("colocated: none holds them")
            continue
        cells = [name, printable(engines.gpu), *map(str, (engines.tp, engines.pp, engines.instances, engines.gpus))]
        table.add_row(*cells, *([f"{engines.price_per_hour:.4g}"] if priced else []))
    console.print(table)
    print()
    columns = ("req/s", "GPUs", "req/s a GPU", "95 %", *(("price an hour", "req/s a price") if priced else ()))
    table = plain_table("Goodput", "", *columns)
    ways: dict[str, Plan | Colocated] = {"apart": plan, "colocated": other}
    for name, each in ways.items():
        if each.goodput_rps_per_gpu is not None and each.goodput_rps_per_price is not None:
            cells = [name, f"{each.goodput_rps:.3g}", str(each.gpus), *_goodput(each.goodput_rps_per_gpu)]
            price = [f"{each.price_per_hour:.4g}", f"{each.goodput_rps_per_price.value:.3g}"]
            table.add_row(*cells, *(price if priced else []))
    console.print(table)
    print()
    seats = plain_table("Where the engines are", "engine", "GPU", "node: its GPUs; for each stage")
    for phase, of_phase in (("prefill", placed.prefill), ("decode", placed.decode)):
        for number, stages in enumerate(of_phase.seats):
            where = "; ".join(f"{seat.node}: {', '.join(map(str, seat.gpus))}" for seat in stages)
            seats.add_row(f"{phase} {number}", printable(of_phase.gpu), where)
    console.print(seats)


def _goodput(goodput: Goodput) -> tuple[str, str]:
    interval = "" if goodput.ci95 is None else f"{goodput.ci95[0]:.3g} … {goodput.ci95[1]:.3g}"
    return f"{goodput.value:.3g}", interval


def print_profile(profile: Profile) -> None:
    """Print the fitted times, and what was measured beside them."""
    console = Console(highlight=False)
    columns = ("phase", "a ms", "b us", "c", "error", "at worst")
    times = plain_table(f"{printable(profile.name)}: {printable(profile.source)}", "tp", *columns)
    for degree in profile.degrees:
        prefill = degree.prefill
        times.add_row(
            str(degree.tp), "prefill: a + b sum(L) + c sum(L^2)", f"{prefill.fixed_s * 1e3:.2f}",
            f"{prefill.per_token_s * 1e6:.3g}", f"{prefill.per_token_squared_s * 1e9:.3g} ns", *_errors(prefill),
        )  # fmt: skip
        for decode in degree.decode:
            times.add_row(
                str(degree.tp), f"decode from {decode.from_batch}: a + b sum(context) + c B",
                f"{decode.fixed_s * 1e3:.2f}", f"{decode.per_context_token_s * 1e6:.3g}",
                f"{decode.per_request_s * 1e6:.3g} us", *_errors(decode),
            )  # fmt: skip
    console.print(times)
    for degree in profile.degrees:
        if degree.prefill.residuals:
            print()
            columns = ("phase", "requests", "tokens each", "ms", "fitted ms", "off")
            samples = plain_table(f"Measured, tp {degree.tp}", *columns)
            residuals = [("prefill", each) for each in degree.prefill.residuals]
            residuals += [("decode", each) for fit in degree.decode for each in fit.residuals]
            for phase, residual in residuals:
                samples.add_row(phase, str(residual.requests), f"{residual.tokens:g}", *_off(residual))
            console.print(samples)
    contention = profile.contention
    if contention.prefill > 1 or contention.decode > 1:
        print(
            f"\nwhile another engine of its node works, a prefill takes {contention.prefill:.2f} times as long, "
            f"a step of decoding {contention.decode:.2f} times"
        )
    if profile.store is not None:
        _print_transfers(console, profile.store)
    print(f"\nA memory of {profile.degrees[0].kv_tokens} tokens, by pipeline degree (tp {profile.degrees[0].tp})")


def _print_transfers(console: Console, store: StoreTimes) -> None:
    print()
    fits = plain_table("Transfers of one client: a + bytes / b", "", "a ms", "b GB/s", "error", "at worst")
    samples = plain_table("Measured transfers", "", "bytes", "ms", "fitted ms", "off")
    for way, fit in (("read", store.read), ("write", store.write)):
        fits.add_row(way, f"{fit.latency_s * 1e3:.3f}", f"{1e-9 / fit.per_byte_s:.3g}", *_errors(fit))
        for each in fit.residuals:
            samples.add_row(way, format_size(each.nbytes), *_off(each))
    console.print(fits)
    print()
    console.print(samples)


def _off(residual: Residual | TransferResidual) -> tuple[str, ...]:
    return f"{residual.seconds * 1e3:.2f}", f"{residual.fitted_s * 1e3:.2f}", f"{residual.error:+.1%}"


def _errors(fit: PrefillTimes | DecodeTimes | TransferTimes) -> tuple[str, ...]:
    return tuple("" if error is None else f"{error:.1%}" for error in (fit.error, fit.worst_error))


def print_verified(verified: Verified) -> None:
    """Print what was predicted and what was measured."""
    console = Console(highlight=False)
    table = plain_table("SLO attainment", "req/s", "predicted", "95 %", "measured", "95 %", "off, points")
    for each in verified.compared:
        table.add_row(
            f"{each.rate_rps:.4g}", f"{each.predicted:.1%}", _interval(each.predicted_ci95), f"{each.measured:.1%}",
            _interval(each.measured_ci95), f"{each.error:.1f}",
        )  # fmt: skip
    console.print(table)
    print()
    medians = plain_table("Medians, ms", "req/s", "TTFT, predicted", "measured", "TPOT, predicted", "measured")
    for each in verified.compared:
        times = (each.predicted_ttft_s, each.measured_ttft_s, each.predicted_tpot_s, each.measured_tpot_s)
        medians.add_row(f"{each.rate_rps:.4g}", *("" if time is None else f"{time * 1e3:.1f}" for time in times))
    console.print(medians)
    last = verified.compared[-1]
    measured = "" if last.measured_hit_rate is None else f", {last.measured_hit_rate:.0%} as the engines say"
    print(
        f"\n{printable(verified.workload)}; {last.predicted_hit_rate:.0%} of prompts' tokens in the store{measured}\n"
        f"mean error {verified.mean_error:.1f} points, worst {verified.worst_error:.1f}"
    )


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.0%} … {ends[1]:.0%}"


def print_roles(shifted: Shifted) -> None:
    """Print which engines got another role."""
    for url, before, after in shifted.changed:
        print(f"{printable(url)}: {before} -> {after}")
    print(f"{shifted.prefill} prefill and {shifted.decode} decode engines; {len(shifted.changed)} shifted")


def print_proposal(proposal: Proposal, command: str) -> None:
    """Print one look of `kvstore plan watch`."""
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
        print("no other roles would serve more")
    if not proposal.enough:
        print(f"these {best.prefill + best.decode} engines cannot serve the load: add engines (`kvstore plan search`)")
