"""Descriptions of tables and targets turn a result into the right text."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.render.cells import NotMeasured, Row, cases, operations, text
from benchmarks.render.headline import Headline, headline_table, machine, missed_list
from benchmarks.render.ledger import Claim, at_least, at_most, found
from benchmarks.render.renamed import renamed
from benchmarks.render.tables import NOTHING, Each, Mixed, Table, section
from benchmarks.results_reader import Result


def case(name: str, seconds: dict[str, float], **parameters: Any) -> dict[str, Any]:
    """Return a case whose limit is `plain`. Its rounds vary by 10 % around their median."""
    limited = [each for each in seconds if each != "plain"]
    ratios = {each: seconds[each] / seconds["plain"] for each in limited}
    return {
        "case": name,
        "parameters": parameters,
        "bytes": dict.fromkeys(seconds, 10**9),
        "seconds": {each: [value] * 5 for each, value in seconds.items()},
        "median": seconds,
        "min": {each: value * 0.9 for each, value in seconds.items()},
        "max": {each: value * 1.1 for each, value in seconds.items()},
        "limit": dict.fromkeys(limited, "plain"),
        "ratio_to_limit": {each: {"median": x, "min": x * 0.9, "max": x * 1.1} for each, x in ratios.items()},
        "ratio_to": {},
    }


FIRST = case("first", {"plain": 0.5, "get": 1.0, "set": 0.25}, group="a", blocks=3, tries={"get": 7})
SECOND = case("second", {"plain": 0.5, "get": 2.0}, group="b", blocks=4)
WHOLE = {"benchmark": "bench_server", "command": "", "parameters": {"where": "here"}, "cases": [FIRST, SECOND]}
RESULT = Result(WHOLE)


def row(name: str) -> Row:
    return Row(RESULT, RESULT.cases[0], name)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{case}: {name}, {p[blocks]} blocks {run[where]}", "first: get, 3 blocks here"),
        ("{s:ms.0f} ms, {rate:.2f} of {limit.rate:.2f} GB/s", "1000 ms, 1.00 of 2.00 GB/s"),
        ("{x:.2f~}", "2.00 (1.80 … 2.20)"),
        ("{x:.1f~ x}", "2.0 x (1.8 … 2.2)"),
        ("{share:.0%}", "50%"),
        ("{mine[tries]}", "7"),
    ],
)
def test_a_template_shows_a_rows_values(template: str, said: str) -> None:
    assert text(template, row("get")) == said


def test_a_missing_value_is_empty_and_a_misspelt_name_an_error() -> None:
    table = Table(cases(), ("case", "{case}"), Each(("get", "set"), "{rate:.2f}"), ("x", "{limit.rate:.1f}"))
    assert table(RESULT).splitlines()[2:] == ["| first | 1.00 | 4.00 |  |", "| second | 0.50 |  |  |"]
    with pytest.raises(NotMeasured):
        text("{x:.2f}", row("plain"))
    with pytest.raises(KeyError, match="blcks"):
        Table(cases(), ("blocks", "{p[blcks]}"))(RESULT)


def test_rows_are_chosen_by_group_case_name_and_limit() -> None:
    assert [each.case for each in cases("b", "a")(RESULT)] == ["second", "first"]
    assert [each.name for each in operations(case="first", limited=True)(RESULT)] == ["get", "set"]
    assert [each.case for each in operations(where=lambda each: each.name == "set")(RESULT)] == ["first"]
    with pytest.raises(KeyError, match="third"):
        operations(case="third")(RESULT)


def test_rows_of_several_kinds_can_share_a_table() -> None:
    kinds = ((operations("a", names=("get",)), ("{name}", "{s:.1f} s")), (cases("b"), ("blocks", "{p[blocks]}")))
    assert Mixed(("{case}", "what"), kinds)(RESULT).splitlines()[0::2] == ["| first | what |", "| get | 1.0 s |"]


def test_a_section_without_result_or_rows_says_so() -> None:
    made = section("test_x", Table(cases("c"), ("case", "{case}")))
    assert made({}) == made({"test_x": RESULT}) == NOTHING
    assert section("test_x", Table(cases("a"), ("case", "{case}")), "By {run[where]}.")({"test_x": RESULT}).endswith(
        "| first |\n\nBy here."
    )


def test_a_target_is_met_if_all_rows_meet_it_with_right_answers() -> None:
    find = found(operations(names=("get",)), "{case} {x:.1f} x", "{limit.name}", at_most(2.5))
    look = Claim("get ≤ 2.5 x", "bench_server", find).look
    reached = look({"bench_server": RESULT})
    assert reached is not None and (reached.reached, reached.limit) == ("first 2.0 x, second 4.0 x", "plain")
    assert not reached.met
    one = Claim(
        "get", "bench_server", found(operations("a", names=("get",)), "", "", at_least(0.5), own_rounds=True)
    ).look
    reached = one({"bench_server": RESULT})
    assert reached is not None and reached.met and reached.rounds == 5
    checks = {"answers_wrong": 1, "cached_as_expected": True}
    reached = one({"bench_server": Result({**RESULT.data, "parameters": {"checks": checks}})})
    assert reached is not None and not reached.met


def test_a_target_without_its_case_was_not_measured() -> None:
    nowhere = Claim("get", "bench_server", found(operations("c"), "", "", at_most(1))).look
    assert nowhere({"bench_server": RESULT}) is None
    assert nowhere({}) is None
    unfound = Claim("get", "bench_server", found(cases(), "", "", at_most(1)), "--quick")
    assert unfound.command == "python -m benchmarks.remote_kv_cache.bench_server --quick"


LOAD = {"average_before": 0.1, "busy_before": 0.01}
MEASURED = Result({**WHOLE, "rounds": 3, "quick": False, "load": LOAD, "commit": None})


def test_a_headline_has_its_figure_its_rival_and_its_limits() -> None:
    def find(result: Result) -> tuple[str, str]:
        case = result.case("first")
        return f"{case.rate('get').median:.1f} GB/s", f"plain {case.rate('plain').median:.1f} GB/s"

    def absent(result: Result) -> tuple[str, str]:
        return result.case("third").name, ""

    table = headline_table(
        {"bench_server": MEASURED},
        (
            Headline("Read", "read", "bench_server", find),
            Headline("Write", "write", "bench_server", absent),
            Headline("Look up", "look-up", "bench_lookup", find),
        ),
    )
    assert table.splitlines()[2:] == [
        "| [Read](benchmarks-appendix.md#read) | 1.0 GB/s | plain 2.0 GB/s | not known; 3 rounds |",
        "| [Write](benchmarks-appendix.md#write) | not measured |  |  |",
        "| [Look up](benchmarks-appendix.md#look-up) | not measured |  |  |",
    ]


def test_the_list_of_missed_targets_marks_those_not_established() -> None:
    met = Claim("get ≤ 9 x", "bench_server", found(operations(names=("get",)), "", "", at_most(9)))
    missed = Claim("get ≤ 1 x", "bench_server", found(operations(names=("get",)), "", "", at_most(1)))
    unknown = Claim("get", "bench_server", found(cases("c"), "", "", at_most(1)))
    few, enough = MEASURED, Result({**MEASURED.data, "rounds": 5})
    assert missed_list((met, missed, unknown), {"bench_server": few}).splitlines()[0] == "* get ≤ 1 x (not established)"
    assert missed_list((met, missed), {"bench_server": enough}).splitlines() == ["* get ≤ 1 x", "", "Stale: 0 of 1."]
    assert missed_list((met,), {"bench_server": enough}) == "None."


def test_the_machine_is_one_line_that_is_not_the_gpus() -> None:
    rig = {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34, "kernel": "Linux", "network": "loopback"}
    results = {"gpu_vllm": RESULT, "bench_server": Result({**WHOLE, "rig": rig})}
    assert machine(results) == "One machine: a CPU, 2 cores, 16 GiB of memory, Linux; loopback."
    assert machine({"gpu_vllm": RESULT}) == NOTHING


def test_old_names_in_earlier_results_are_shown_as_todays() -> None:
    assert renamed("| prefill and decode apart | 1.0 |") == "| disaggregated prefill/decode | 1.0 |"
    assert renamed("one engine") == "one engine"
