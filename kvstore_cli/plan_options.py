"""The checks of options that several commands of `kvstore plan` share. A failed check ends the command with a
message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore_cli.output import fail

if TYPE_CHECKING:
    from kvstore_serving.planning.fleet import NetworkLinks, Via
    from kvstore_serving.planning.profile import Profile, StoreTimes

NODE: Final = 12.5e9  # the rate of a node's link, in bytes a second
STORE: Final = 10e9  # the rate of a store node, in bytes a second, if no profile has it


def check_positive(option: str, value: float, what: str) -> None:
    if not 0 < value < math.inf:
        fail("usage", f"{option} {value:g}: expected {what} above 0")


def check_percentile(percentile: float) -> None:
    if not 1 <= percentile <= 99.9:
        fail("usage", f"--percentile {percentile:g}: expected 1 to 99.9, for example 90 for 90 % of requests")


def profile_of(given: str) -> Profile:
    from kvstore_serving.planning.profile import ProfileError, read_profile

    try:
        return read_profile(given)
    except ProfileError as error:
        fail("usage", f"--profile {error}")


def parse_bytes(option: str, text: str) -> int:
    from kvstore.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        fail("usage", f"{option} {error}")


def check_writable(chart: Path | None, *others: Path | None) -> None:
    """Check the files before the search, so that the command does not fail after it."""
    from kvstore_serving import files
    from kvstore_serving.load.chart import CHART_FORMATS

    if chart is not None and chart.suffix not in CHART_FORMATS:
        fail("usage", f"--chart {chart}: expected a file name that ends with {' or '.join(CHART_FORMATS)}")
    for file in (chart, *others):
        try:
            if file is not None:
                files.check_writable(file)
        except OSError as error:
            fail("usage", f"{file}: {error.strerror}")


def make_links(
    via: str,
    node: float,
    inside: float,
    store: float | None,
    store_nodes: int | None,
    store_memory: str,
    measured: StoreTimes | None,
) -> NetworkLinks:
    """Return the links. `measured`: the times of transfers in the engine's profile. Their latency is used, and their
    rate is used if `store` is None."""
    from kvstore_serving.planning.fleet import NetworkLinks

    if via not in ("store", "direct"):
        fail("usage", f"--via {via}: expected store or direct")
    if store is None:
        store = STORE if measured is None else measured.bytes_per_s
    for option, value in (("--node", node), ("--inside", inside), ("--store", store)):
        check_positive(f"{option}-bytes-per-s", value, "a number of bytes per second")
    memory = parse_bytes("--store-memory", store_memory)
    check_positive("--store-memory", memory, "a size")
    latencies = (0.0, 0.0) if measured is None else (measured.read.latency_s, measured.write.latency_s)
    way: Via = "direct" if via == "direct" else "store"
    return NetworkLinks(way, node, inside, store, store_nodes or 1, memory, *latencies)


def parse_numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
        if min(found) >= 1:
            return found
    except ValueError:
        pass
    fail("usage", f"{option} {text!r}: expected numbers of 1 or more, separated by commas, such as 128,512")


def check_finite(option: str, value: float, most: float = math.inf) -> None:
    """Check that this is a finite number from 0 to `most`. The ranges of options do not exclude `nan`."""
    if not 0 <= value < math.inf or value > most:
        limit = "" if most == math.inf else f", at most {most:g}"
        fail("usage", f"{option} {value:g}: expected a number, 0 or more{limit}")
