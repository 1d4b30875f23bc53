"""Shows how much the predictions of `bench_predicted_apart` depend on the profile, by predictions for prefills that
take a few percent more or less time than measured.

    python -m benchmarks.planning.sensitivity [FILE] [--json]

FILE: the result; by default the committed one. The predictions are for the same requests at the same times. A prefill
engine that is busy most of the time has a queue, so longer prefills delay all requests in the queue.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.planning.bench_predicted import INPUT, OUTPUT, SCALE_TPOT, SCALE_TTFT, WARM_UP, idle
from benchmarks.planning.bench_predicted_apart import AS_IT_RUNS
from benchmarks.results_reader import Result
from benchmarks.run_all import RESULTS
from kvstore_cli.plan_options import NODE, make_links
from kvstore_serving.load.arrivals import seed_of
from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import NodePool
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape
from kvstore_serving.planning.profile import Profile
from kvstore_serving.planning.simulator import Fleet, simulate
from kvstore_serving.planning.verify import planned_load, workload_of
from kvstore_serving.planning.workload import Lengths, Synthetic

SCALES: Final = (0.9, 0.95, 1.0, 1.05, 1.1)


def sensitivity(result: Result) -> list[dict[str, Any]]:
    """Return for each rate its `rate_rps`, the `measured` attainment, and the `predicted` attainment by the factor of
    the prefills' times."""
    found, requests = (result.data["parameters"][name] for name in ("profile", "requests"))
    [degree] = found["degrees"]
    ttft_s, tpot_s, _ = idle(degree)
    slo = Slo(SCALE_TTFT * ttft_s, SCALE_TPOT * tpot_s)
    recipe, one = Synthetic(Lengths(INPUT), Lengths(OUTPUT)), Engines(Shape(1, 1), 1)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(result.measured_group(AS_IT_RUNS)):
        rate = case.parameters["rate_rps"]
        planned = planned_load(recipe, rate, requests, WARM_UP, seed_of(0, number))
        workload, predicted = workload_of(planned, recipe), {}
        for scale in SCALES:
            prefill = {**degree["prefill"]}
            for name in ("fixed_s", "per_token_s", "per_token_squared_s"):
                prefill[name] *= scale
            scaled = {**found, "degrees": [{**degree, "prefill": prefill}]}
            profile = msgspec.convert(scaled, Profile, strict=False)  # JSON has only strings as keys
            links = make_links("store", NODE, 1.0, None, 1, "1GiB", profile.store)
            fleet = Fleet([NodePool(profile, 2, 2)], links, EnginePlacement(one, one))
            ttft, tpot = simulate(fleet, workload, 1.0, warm_up=WARM_UP).held(slo)
            predicted[scale] = float((ttft & tpot).mean())
        rows.append({"rate_rps": rate, "measured": case.parameters["measured"], "predicted": predicted})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "bench_predicted_apart.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        rows = sensitivity(Result(json.loads(options.file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.file}: expected a result of bench_predicted_apart: {error!r}")
    if options.json:
        print(json.dumps(rows))
        return 0
    table = Table(
        "requests/s",
        *(f"x {scale:g}" for scale in SCALES),
        "measured",
        title="predicted attainment, by the factor of the prefills' times",
    )
    for row in rows:
        found = (f"{share:.0%}" for share in row["predicted"].values())
        table.add_row(f"{row['rate_rps']:.2f}", *found, f"{row['measured']:.0%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
