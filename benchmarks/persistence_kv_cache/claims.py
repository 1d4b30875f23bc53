"""The targets of the disk tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.ledger import Claim, Finding
from benchmarks.persistence_kv_cache import names
from benchmarks.results_reader import Result

_MODULE: Final = "benchmarks.persistence_kv_cache"
_TEST: Final = "test_disk_tier"


def _share(part: str, shape: str, at_least: float) -> Callable[[Result], Finding]:
    """The share of its limit's throughput, for every operation of a part with that shape."""

    def find(result: Result) -> Finding:
        cases = [case for case in result.group(part) if case.parameters["shape"] == shape]
        shares = {name: case.to_limit(name).inverse for case in cases for name in case.limits}
        if not shares:
            raise KeyError(shape)
        limits = {case.limits[name]: case.rate(case.limits[name]).median for case in cases for name in case.limits}
        return Finding(
            ", ".join(f"{name.removeprefix(names.HYBRID)} {share.median:.2f}" for name, share in shares.items()),
            ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in limits.items()),
            min(share.median for share in shares.values()) >= at_least,
        )

    return find


def _restart(result: Result) -> Finding:
    cases = result.group(names.RESTART_PART)
    if not cases:
        raise KeyError(names.RESTART_PART)
    reached, met = [], True
    for case in cases:
        blocks, seconds = case.parameters["blocks"], case.seconds(names.READABLE).median
        reached.append(f"{blocks} blocks: {seconds:.2f} s")
        met = met and seconds <= names.RESTART_TARGET_S * max(1.0, blocks / 100_000)
    rounds = min(len(case.data["seconds"][names.READABLE]) for case in cases)
    return Finding(", ".join(reached), "", met, rounds)


def _index(result: Result) -> Finding:
    cases = result.group(names.RESTART_PART)
    if not cases:
        raise KeyError(names.RESTART_PART)
    case = max(cases, key=lambda case: case.parameters["blocks"])
    index_bytes = case.parameters["index_bytes"] / case.parameters["blocks"]
    text = f"{index_bytes:.0f} bytes at {case.parameters['blocks']} blocks"
    return Finding(text, "", index_bytes <= names.INDEX_TARGET_BYTES, result.rounds)


def _claims() -> list[Claim]:
    found = []
    for shape in names.SHAPES:
        for part, what, target in (
            (names.WRITE_PART, f"disk: {shape}, `set` until on disk", names.WRITE_TARGET),
            (names.READ_PART, f"disk: {shape}, `get_into` and `stream_get` from disk", names.READ_TARGET),
            (
                names.HYBRID_PART,
                f"disk: {shape}, blocks in memory, beside a server without a disk tier",
                names.HYBRID_TARGET,
            ),
        ):
            beside = {names.WRITE_PART: "plain pwrite", names.READ_PART: "plain pread"}.get(part, "its throughput")
            found.append(Claim(_MODULE, f"{what}: ≥ {target} x {beside}", _TEST, "", _share(part, shape, target)))
    return found


PERSISTENCE_CLAIMS: Final = (
    *_claims(),
    Claim(
        _MODULE,
        f"disk: restart ≤ {names.RESTART_TARGET_S:g} s per 100 000 blocks until all are readable",
        _TEST,
        "",
        _restart,
    ),
    Claim(_MODULE, f"disk: index ≤ {names.INDEX_TARGET_BYTES} bytes of memory a block", _TEST, "--million", _index),
)
