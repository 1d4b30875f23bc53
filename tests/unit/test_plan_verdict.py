"""The first lines of `kvstore plan search`: what to buy, and how far to trust it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore_cli.plan_tables import OFF_ALONE, OFF_APART, OFF_ONE_ENGINE, verdict
from kvstore_serving.planning.document import PlanDocument
from kvstore_serving.planning.profile import Contention, StoreTimes, TransferTimes, read_profile
from tests.support.harness import ROOT
from tests.unit.test_cli_tables import Filler


def plan(rate_rps: float | None, apart: dict[str, Any], colocated: dict[str, Any], price: float = 1.0) -> PlanDocument:
    """Return a plan with these figures of both ways. Each has gpus, goodput_rps, enough."""
    made: PlanDocument = Filler(True).of(PlanDocument)

    def priced(figures: dict[str, Any]) -> dict[str, Any]:
        cost = figures["gpus"] * price
        value = msgspec.structs.replace(made.goodput_rps_per_gpu, value=figures["goodput_rps"] / cost)
        return {**figures, "price_per_hour": cost, "goodput_rps_per_price": value}

    pools = [msgspec.structs.replace(pool, price=price) for pool in made.basis.pools]
    return msgspec.structs.replace(
        made,
        rate_rps=rate_rps,
        basis=msgspec.structs.replace(made.basis, pools=pools),
        colocated=msgspec.structs.replace(made.colocated, **priced(colocated)),
        **priced(apart),
    )


@pytest.mark.parametrize(
    ("rate_rps", "apart", "colocated", "first"),
    [
        (6.0, (4, 10.8, True), (2, 6.15, True), "Requested: 6 req/s. Colocated engines with 2 GPUs serve 6.15 req/s"),
        (6.0, (2, 6.3, True), (4, 7.0, True), "Requested: 6 req/s. P/D with 2 GPUs serves 6.3 req/s"),
        (6.0, (4, 6.3, True), (4, 5.0, False), "Requested: 6 req/s. P/D with 4 GPUs serves 6.3 req/s"),
        (6.0, (4, 5.0, False), (4, 6.0, True), "Requested: 6 req/s. Colocated engines with 4 GPUs serve 6 req/s"),
        (9.0, (4, 5.0, False), (4, 4.0, False), "Requested: 9 req/s. P/D with 4 GPUs serves 5 req/s"),
        (None, (4, 10.0, True), (2, 6.0, True), "Colocated engines with 2 GPUs serve 6 req/s"),
        (None, (4, 14.0, True), (2, 6.0, True), "P/D with 4 GPUs serves 14 req/s"),
    ],
)
def test_the_verdict_names_the_better_buy_first(
    rate_rps: float | None, apart: tuple[int, float, bool], colocated: tuple[int, float, bool], first: str
) -> None:
    names = ("gpus", "goodput_rps", "enough")
    said = verdict(plan(rate_rps, dict(zip(names, apart, strict=True)), dict(zip(names, colocated, strict=True))))[0]
    assert said.startswith(first), said
    assert said.split("better buy")[0].split("nearer to it")[0].startswith(first)
    assert ("better buy" in said) is (rate_rps != 9.0)
    assert ("cannot serve the requested rate" in said) is (rate_rps == 9.0)


def test_prices_are_named_where_they_differ_from_one() -> None:
    some = {"gpus": 2, "goodput_rps": 3.0, "enough": True}
    assert "2 GPUs for 7 an hour" in verdict(plan(2.0, some, {**some, "gpus": 4}, price=3.5))[0]
    assert "an hour" not in verdict(plan(2.0, some, some))[0]


def judged(**changed: Any) -> list[str]:
    """Return the verdict of a plan from a profile with these fields."""
    some = {"gpus": 2, "goodput_rps": 3.0, "enough": True}
    made = plan(2.0, some, some)
    pools = [
        msgspec.structs.replace(pool, profile=msgspec.structs.replace(pool.profile, name="engine", **changed))
        for pool in made.basis.pools
    ]
    return verdict(msgspec.structs.replace(made, basis=msgspec.structs.replace(made.basis, pools=pools)))


STORE = StoreTimes(TransferTimes(0.001, 1e-9), TransferTimes(0.001, 1e-9))


@pytest.mark.parametrize(
    ("contention", "store", "apart", "row", "lacks"),
    [
        (Contention(1.5, 1.2), STORE, OFF_APART, "P/D, profiled with the store", ""),
        (Contention(), STORE, OFF_ALONE, "P/D, profiled alone", "--beside"),
        (Contention(1.5, 1.2), None, OFF_ALONE, "P/D, profiled alone", "--store"),
        (Contention(), None, OFF_ALONE, "P/D, profiled alone", "--store and --beside"),
    ],
)
def test_the_verdict_says_how_far_such_predictions_were_off(
    contention: Contention, store: StoreTimes | None, apart: tuple[float, float], row: str, lacks: str
) -> None:
    said = judged(measured=True, contention=contention, store=store)[1]
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for (mean, worst), begins in ((OFF_ONE_ENGINE, "one engine"), (apart, row)):
        assert f"{mean:g} " in said and f"{worst:g} " in said, said
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {begins}"))
        assert f"| {mean} points | {worst} points |" in line
    named = said.partition(" with a profile without ")[2].partition(", as here")[0]
    assert named == lacks, said
    assert "On CPUs, " in said and "never on GPUs" in said


def test_no_error_is_named_for_published_profiles() -> None:
    said = judged(measured=False)[1]
    assert "published times (engine)" in said and "no figure says how far" in said
    assert "points" not in said and "CPU" not in said


def test_a_profile_whose_formula_does_not_fit_is_named() -> None:
    (degree, *_) = read_profile("opt-13b-a100-80g").degrees
    for error, warned in ((0.1, False), (0.14, True)):
        fit = msgspec.structs.replace(degree.prefill, error=error)
        words = judged(measured=True, store=None, degrees=[msgspec.structs.replace(degree, prefill=fit)])[2:]
        assert bool(words) is warned
    assert "Do not trust plans from the profile engine" in words[0] and "14%" in words[0]


def test_transfers_that_the_formula_does_not_fit_are_named() -> None:
    slow = msgspec.structs.replace(STORE, write=msgspec.structs.replace(STORE.write, error=0.3))
    assert judged(measured=True, store=STORE)[2:] == []
    (warning,) = judged(measured=True, store=slow)[2:]
    assert ": store write 30%." in warning and "--lengths" not in warning
