"""Makes the headlines of docs/benchmarks.md: the figures that readers look for first, each next to its limit or to a
rival's figure.

A figure and its limit or rival come from one result, so they were measured in the same run. The last column says
whether the figure is stale. Each row links to the section of docs/benchmarks-appendix.md that has commits, dates,
commands and the spread of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.eviction.tables import ARC, BENCHMARK, DEFAULT, OPTIMUM, TRACE_GROUP
from benchmarks.persistence_kv_cache import names as disk
from benchmarks.remote_kv_cache.bench_demo import FIRST as COMPUTED
from benchmarks.remote_kv_cache.bench_demo import SECOND as LOADED
from benchmarks.remote_kv_cache.bench_hand_over import ALONE as NO_ARRIVALS
from benchmarks.remote_kv_cache.bench_hand_over import APART, BETWEEN_TOKENS, CHUNKS
from benchmarks.remote_kv_cache.bench_proxy_capacity import DIRECT, ONE_P50, RATE, THROUGH
from benchmarks.remote_kv_cache.bench_transfer_out import ANSWERED, SWAPPED
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import MEMCPY, PLAIN_GET, PLAIN_SET, REDIS_GETS, REDIS_SETS
from benchmarks.render.ledger import MISSED, Claim, reservations, staleness, verdict
from benchmarks.render.tables import NOTHING, markdown
from benchmarks.results_reader import CaseResult, Result, Results

APPENDIX: Final = "benchmarks-appendix.md"
CAPACITY: Final = 5.0  # percent of the trace's distinct blocks
LENGTH: Final = 4096  # tokens of the prompts that arrive while others decode


@dataclass(frozen=True)
class Headline:
    """A row of the table. It has the name of the figure, the section of the appendix, the name of the result, and the
    function that finds the figure and its limit or rival. `find` raises `KeyError` if the case was not measured."""

    what: str
    section: str
    needs: str
    find: Callable[[Result], tuple[str, str]]

    def row(self, results: Results) -> tuple[str, str, str, str]:
        """Return the cells of the row."""
        what = f"[{self.what}]({APPENDIX}#{self.section})"
        try:
            result = results[self.needs]
            figure, held_against = self.find(result)
        except KeyError:
            return what, "not measured", "", ""
        return what, figure, held_against, "; ".join([staleness(result), *reservations(result)])


def _gb(case: CaseResult, *names: str) -> str:
    """Return the highest rate of these operations."""
    return f"{max(case.rate(name).median for name in names if name in case.operations):.1f} GB/s"


def _ms(case: CaseResult, name: str, spec: str = ".0f") -> str:
    return f"{case.seconds(name).median * 1e3:{spec}} ms"


def _over_tcp(operation: str, plain: str, redis: Sequence[str]) -> Callable[[Result], tuple[str, str]]:
    def find(result: Result) -> tuple[str, str]:
        case = result.case(HEADLINE.name)
        return _gb(case, operation), f"plain socket {_gb(case, plain)}, Redis {_gb(case, *redis)}"

    return find


def _shared(result: Result) -> tuple[str, str]:
    case = result.case(HEADLINE.name)
    return _gb(case, "get_into"), f"one memcpy {_gb(case, MEMCPY)}"


def _from_disk(result: Result) -> tuple[str, str]:
    case = result.case(f"{disk.READ_PART}, {HEADLINE.name}")
    direct = _gb(case, disk.PLAIN_READ_DIRECT)
    return _gb(case, disk.SERVER_READS[0]), f"plain file {_gb(case, *disk.PLAIN_READS)}, with O_DIRECT {direct}"


def _lookup(result: Result) -> tuple[str, str]:
    case = result.case("lookup")
    trip = _ms(case, case.limits["contains 512"], ".2f")
    redis = _ms(case, "redis EXISTS pipeline 512", ".2f")
    return _ms(case, "contains 512", ".2f"), f"plain round trip {trip}, Redis {redis}"


def _first_token(result: Result) -> tuple[str, str]:
    case = result.cases[0]
    return _ms(case, LOADED), f"computed {_ms(case, COMPUTED)}"


def _sending(result: Result) -> tuple[str, str]:
    case = result.cases[0]

    def prompts_per_s(name: str) -> str:
        return f"{case.parameters['prompts'] / case.seconds(name).median:.2f} prompts/s"

    beside = f"without kvstore {prompts_per_s(WITHOUT)}, CPU tier alone {prompts_per_s(SWAPPED)}"
    return prompts_per_s(ANSWERED), beside


def _between_tokens(result: Result) -> tuple[str, str]:
    case = result.case(f"{BETWEEN_TOKENS}, prompts of {LENGTH} tokens")
    beside = f"two engines, chunked prefill {_ms(case, CHUNKS, '.1f')}, no prompts {_ms(case, NO_ARRIVALS, '.1f')}"
    return _ms(case, APART, ".1f"), beside


def _proxy(result: Result) -> tuple[str, str]:
    def each_s(name: str) -> float:
        return result.case(RATE).seconds(name).median

    one = result.case(ONE_P50)
    added = one.seconds(THROUGH).median - one.seconds(DIRECT).median
    beside = f"the engine alone {1 / each_s(DIRECT):.0f} requests/s; the proxy adds {added * 1e3:.1f} ms to a request"
    return f"{1 / each_s(THROUGH):.0f} requests/s", beside


def _hit_rate(result: Result) -> tuple[str, str]:
    case = result.measured_group(TRACE_GROUP)[0].parameters
    at = case["capacities"].index(CAPACITY)
    rates = {name: f"{column[at]:.1%}" for name, column in case["hit_rate"].items()}
    return rates[DEFAULT], f"LRU {rates['lru']}, ARC {rates[ARC]}, with all requests known in advance {rates[OPTIMUM]}"


# fmt: off
HEADLINES: Final = (
    Headline("Read over TCP", "set-and-get-end-to-end", "bench_server", _over_tcp("get_into", PLAIN_GET, REDIS_GETS)),
    Headline("Write over TCP", "set-and-get-end-to-end", "bench_server", _over_tcp("set", PLAIN_SET, REDIS_SETS)),
    Headline("Read on one host, shared memory", "on-one-host-shared-memory", "bench_shared_memory", _shared),
    Headline("Read from disk", "the-disk-tier-through-the-server", "bench_disk_tier", _from_disk),
    Headline("Look up 512 keys", "lookups", "bench_lookup", _lookup),
    Headline("First token, document of 7800 tokens, SmolLM2, engine restarted", "the-demo", "bench_demo", _first_token),
    Headline("Prefill while all blocks are sent, small model", "what-sending-costs", "bench_transfer_out", _sending),
    Headline(f"P/D: p99 between tokens while prompts of {LENGTH} tokens arrive", "disaggregated-prefilldecode",
        "bench_hand_over", _between_tokens,
    ),
    Headline("Proxy on one core", "disaggregated-prefilldecode", "bench_proxy_capacity", _proxy),
    Headline(f"Hit rate, Mooncake's trace, memory for {CAPACITY:g} % of its blocks", "eviction", BENCHMARK, _hit_rate),
)
# fmt: on
IN_README: Final = (HEADLINES[0].what, HEADLINES[2].what, HEADLINES[5].what)


def headline_table(results: Results, headlines: Sequence[Headline] = HEADLINES) -> str:
    """Return the table of the headlines."""
    rows = [headline.row(results) for headline in headlines]
    return markdown(("what", "kvstore", "limit or rival, same run", "stale"), rows, figures=False)


def readme_lines(results: Results) -> str:
    """Return the three headlines of README.md, and a short description of the machine."""
    lines = []
    for headline in HEADLINES:
        if headline.what in IN_README:
            _, figure, held_against, stale = headline.row(results)
            old = " (stale)" if stale.startswith("yes") else ""
            lines.append(f"* {headline.what}: **{figure}**{old}; {held_against}")
    rig = next(iter(results.values())).data["rig"]
    return "\n".join([*lines, "", f"Each line is one run, on loopback, with {rig['cores']} cores."])


def missed_list(claims: Sequence[Claim], results: Results) -> str:
    """Return the missed targets, one on each line, and the number of stale figures among them."""
    lines, stale = [], 0
    for claim in claims:
        found = claim.look(results)
        if found is None or found.met:
            continue
        result = results[claim.result]
        said = verdict(found, result)
        stale += staleness(result) == "yes"
        lines.append(f"* {claim.target}" + ("" if said == MISSED else f" ({said})"))
    return "\n".join([*lines, "", f"Stale: {stale} of {len(lines)}."]) if lines else "None."


def machine(results: Results) -> str:
    """Return a line that describes the machine of the results. Results of a GPU machine are left out, as they are in
    docs/gpu.md."""
    mine = [result for name, result in results.items() if not name.startswith("gpu_")]
    if not mine:
        return NOTHING
    rig = mine[0].data["rig"]
    memory = f"{rig['memory_bytes'] / 2**30:.0f} GiB of memory"
    return f"One machine: {rig['cpu']}, {rig['cores']} cores, {memory}, {rig['kernel']}; {rig['network']}."
