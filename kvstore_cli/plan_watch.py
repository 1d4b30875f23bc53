"""The loop of `kvstore plan watch`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from kvstore_cli.output import fail, print_json
from kvstore_cli.plan_tables import print_proposal
from kvstore_cli.progress import progress_bar
from kvstore_serving.planning.goodput import crew
from kvstore_serving.planning.metrics_page import MetricsError, metrics_of
from kvstore_serving.planning.watching import (
    OfferedLoad,
    Proposal,
    ProxyCounters,
    Watched,
    counters,
    drift,
    load_between,
    propose,
)


def watch_load(
    proxy: str, watched: Watched, interval_s: float, share: float, pools: Path | None, *, once: bool, as_json: bool
) -> None:
    """Poll the proxy every `interval_s` seconds until Ctrl-C. If the proxy does not answer, wait for it."""
    planned: OfferedLoad | None = None
    engines = 0
    before = _look(proxy, required=True)
    try:
        while True:
            time.sleep(interval_s)
            after = _look(proxy, required=once)
            if before is None or after is None:
                before = after
                continue
            load, before = load_between(before, after), after
            if load is None:
                continue
            if len(after.roles) < 2:
                said = f"the proxy has {len(after.roles)} engine(s): expected two or more, whose roles can be changed"
                if once:
                    fail("failed", said)
                print(f"{said}; waiting for them", file=sys.stderr)
                continue
            changed = [] if planned is None else drift(planned, load, share)
            if planned is not None and len(after.roles) != engines:
                changed.append(f"{engines} -> {len(after.roles)} engines")
            engines = len(after.roles)
            proposal = Proposal(load, changed)
            if planned is None or changed:
                proposal = _proposed(watched, load, after, changed, as_json)
                planned = load
            best = proposal.best
            command = (
                ""
                if best is None
                else f"kvstore plan roles {pools or 'POOLS'} --prefill {best.prefill} --decode {best.decode}"
            )
            if as_json:
                print_json(proposal)
            else:
                print_proposal(proposal, command)
            sys.stdout.flush()
            if once:
                return
    except KeyboardInterrupt:
        return


def _look(proxy: str, required: bool) -> ProxyCounters | None:
    try:
        return counters(asyncio.run(metrics_of(proxy)), time.monotonic())
    except MetricsError as error:
        if required:
            fail("unreachable", str(error))
        print(f"{error}; waiting for it", file=sys.stderr)
        return None
    except ValueError as error:
        fail("failed", f"{proxy}: {error}")


def _proposed(watched: Watched, load: OfferedLoad, seen: ProxyCounters, changed: list[str], as_json: bool) -> Proposal:
    with progress_bar("simulating", not as_json, "runs", grows=True) as progress, crew(progress) as workers:
        return propose(watched, load, len(seen.roles), seen.split, changed, workers)
