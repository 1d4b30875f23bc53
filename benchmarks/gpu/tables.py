"""The Markdown tables of docs/gpu.md, each a function of the results in benchmarks/results/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.gpu.names import COMPUTED as TOY_COMPUTED
from benchmarks.gpu.steps import STEPS
from benchmarks.remote_kv_cache.first_token import COMPUTED
from benchmarks.remote_kv_cache.tables import SWAP
from benchmarks.render.cells import Row, cases, text
from benchmarks.render.ledger import age
from benchmarks.render.tables import NOTHING, Column, Each, Table, markdown, section
from benchmarks.results_reader import Result, Results

PREFIX: Final = "gpu_"


def of_steps(results: Results) -> dict[str, Result]:
    """Return the results of a GPU machine for each step, in the order of the steps."""
    return {name: results[PREFIX + name] for name in STEPS if PREFIX + name in results}


def machine(results: Results) -> str:
    """A table with the time, the machine and the commit of each step's run."""
    steps = of_steps(results)
    if not steps:
        return NOTHING
    lines = dict.fromkeys(_machine_line(result) for result in steps.values())
    rows = [
        (
            name + " (**small sizes**)" * result.data.get("quick", False),
            result.data["date"],
            age(result),
            f"{result.data.get('seconds', 0):.0f}",
            _left_out(result),
        )
        for name, result in steps.items()
    ]
    said = markdown(("step", "date", "commit", "seconds", "left out"), rows, figures=False)
    return "\n\n".join([*lines, said])


def _machine_line(result: Result) -> str:
    where, versions = result.data["rig"], result.data["versions"]
    cards = where["gpus"] or []
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB, driver {gpu['driver']})" for gpu in cards]
    nodes = where["numa_nodes"]
    pages = where["huge_pages"]
    numa = f"{len(nodes)} NUMA node{'s' * (len(nodes) > 1)}" if nodes else "NUMA not told"
    named = [f"{name} {versions[name]}" for name in ("torch", "cuda", "triton", "vllm") if name in versions]
    return (
        f"{', '.join(gpus) or 'No GPU'}; {where['cpu']}, {where['cores']} cores, {numa}, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB, huge pages: {pages['anonymous']} for a process's own memory, "
        f"{pages['shared_memory']} for shared memory; {where['kernel']}, Python {where['python']}; {', '.join(named)}."
    )


def _left_out(result: Result) -> str:
    return "; ".join(f"{what}: {why.splitlines()[0][:100]}" for what, why in result.data["skipped"].items())


def tests(results: Results) -> str:
    """A table of the number of tests that passed, by step."""
    rows = []
    for name, result in of_steps(results).items():
        if counts := result.data.get("counts"):
            rows.append((STEPS[name].about, *(str(counts[what]) for what in ("passed", "failed", "skipped"))))
    return markdown(("tests on the device", "passed", "failed", "skipped"), rows) if rows else NOTHING


def _clients(row: Row) -> list[Row]:
    """A row for each kind of transfer of a server."""
    kinds = dict.fromkeys(name.rpartition(" x")[0] for name in row.data.operations)
    return [row.at(kind) for kind in kinds]


def _of_clients(count: int) -> Column:
    def cell(row: Row) -> str:
        each = row.at(f"{row.name} x{count}")
        return text("{rate:.1f}", each) + (text(" ({share:.0%})", each) if each.name in each.data.limits else "")

    return f"{count} client{'s' * (count > 1)}", cell


def copied(result: Result) -> str:
    """A sentence that names the code that makes the copies."""
    copies = result.cases[0].parameters.get("copies", "")
    return f"The copies are made by {copies}." if copies else ""


def cores(result: Result) -> str:
    """The rates of all clients together, and their share of the limit of the same run."""
    counts = result.cases[-1].parameters["clients"]
    return Table(
        lambda result: [each for row in cases()(result) for each in _clients(row)],
        ("server", "{case}"),
        ("GB/s, all clients together (share of the limit)", "{name}"),
        *map(_of_clients, counts),
    )(result)


def first_tokens(computed: str, *groups: str) -> Table:
    """A table of the seconds to the first token for each source of the prompt, and the speed-up over computing."""

    def cell(row: Row) -> str:
        sooner = f" (x {row.at(computed).s.median / row.s.median:.1f})" if row.name.startswith("from") else ""
        return f"{row.s.median:.3f}{sooner}"

    def ways(row: Row) -> list[str]:
        return list(dict.fromkeys(name for each in cases(*groups)(row.result) for name in each.data.operations))

    columns = (("prompt, tokens", "{p[prompt_tokens]}"), ("its KV, GiB", "{p[kv_bytes]:Gi.2f}"))
    return Table(cases(*groups), *columns, Each(ways, cell, "{name}, s"))


def vllm(results: Results) -> str:
    """The results of real engines: a chart, and a table for each part with the checks of its answers."""
    said = ["![Seconds to the first token, vLLM](charts/gpu_vllm.svg)"] if PREFIX + "vllm" in results else []
    for step in ("vllm", "vllm_variants"):
        if (result := results.get(PREFIX + step)) is None:
            continue
        for part in dict.fromkeys(case.parameters["group"] for case in result.cases):
            said.append(f"*{part}*:\n\n" + first_tokens(COMPUTED, part)(result))
        checks = result.parameters.get("checks") or result.cases[-1].parameters["checks"]
        said.append(
            f"Answers: {checks['answers_equal']} equal to those without the store, {checks['answers_tied']} with equal "
            f"logits, {checks['answers_wrong']} wrong; cached tokens as expected: "
            f"{'yes' if checks['cached_as_expected'] else '**no**'}."
        )
    return "\n\n".join(said) or NOTHING


GPU_TABLES: Final = {
    "gpu_swap": section("gpu_swap", *SWAP, copied),
    "gpu_cores": section("gpu_cores", cores),
    "gpu_first_token": section(
        "gpu_first_token",
        "![Seconds to the first token, toy transformer](charts/gpu_first_token.svg)",
        first_tokens(TOY_COMPUTED),
    ),
}
# Tables that use several results.
GPU_OVERVIEWS: Final[dict[str, Callable[[Results], str]]] = {
    "gpu_machine": machine,
    "gpu_tests": tests,
    "gpu_vllm": vllm,
}
