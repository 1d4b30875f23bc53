"""Compares what the simulator predicts with what engines do: the same requests, at the same times, at several rates."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore_serving.load.records import Planned
from kvstore_serving.load.report import LoadReport, Slo
from kvstore_serving.planning.simulator import Fleet, Run, simulate
from kvstore_serving.planning.workload import Workload


class Compared(msgspec.Struct, frozen=True):
    """One rate: shares of requests that attain their SLOs, and medians in seconds, predicted and measured. `error`: of
    the attainment, in points of a percent."""

    rate_rps: float
    predicted: float
    measured: float
    measured_ci95: tuple[float, float] | None
    error: float
    predicted_ttft_s: float
    measured_ttft_s: float | None
    predicted_tpot_s: float
    measured_tpot_s: float | None


class Verified(msgspec.Struct, frozen=True):
    """The result of `kvstore plan verify`. Errors are absolute, in points of a percent."""

    compared: list[Compared]
    mean_error: float
    worst_error: float
    slo: Slo


def workload_of(planned: Sequence[Planned]) -> Workload:
    """-> the requests of a load, as the simulator takes them; at a rate of 1 it plays them at their own times."""
    return Workload(
        np.array([each.at_s for each in planned]),
        np.array([each.input_tokens for each in planned]),
        np.array([each.output_tokens for each in planned]),
        np.zeros(len(planned), dtype=np.int64),
        "load",
    )


def predict(fleet: Fleet, planned: Sequence[Planned], warm_up: int) -> Run:
    """-> the simulated run of a load, whose first `warm_up` requests are not counted."""
    return simulate(fleet, workload_of(planned), 1.0, warm_up=warm_up)


def compare(run: Run, report: LoadReport, rate_rps: float) -> Compared:
    """One rate."""
    predicted, measured = run.attainment(report.slo), report.attainment.joint or 0.0
    return Compared(
        rate_rps=rate_rps,
        predicted=predicted,
        measured=measured,
        measured_ci95=report.attainment.ci95,
        error=abs(predicted - measured) * 100,
        predicted_ttft_s=float(np.median(run.ttft_s)),
        measured_ttft_s=report.ttft_s.p50,
        predicted_tpot_s=float(np.median(run.tpot_s)),
        measured_tpot_s=report.tpot_s.p50,
    )


def verified(compared: Sequence[Compared], slo: Slo) -> Verified:
    """All rates."""
    errors = [each.error for each in compared]
    return Verified(list(compared), sum(errors) / len(errors), max(errors), slo)
