"""Charts and tables from the committed results, and from nothing else: `python -m benchmarks.draw`.

Reads benchmarks/results/*.json, writes docs/charts/*.svg, and replaces what stands between `<!-- begin:NAME -->` and
`<!-- end:NAME -->` in docs/benchmarks.md and docs/planning.md. What was not measured says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Final

from benchmarks.cluster_sim.tables import CLUSTER_TABLES
from benchmarks.eviction.tables import EVICTION_TABLES
from benchmarks.kv_pipeline.claims import PIPELINE_CLAIMS
from benchmarks.kv_pipeline.tables import PIPELINE_COMPUTED, PIPELINE_TABLES
from benchmarks.ledger import claims_table, missed_table, rig_table
from benchmarks.persistence_kv_cache.claims import PERSISTENCE_CLAIMS
from benchmarks.persistence_kv_cache.tables import PERSISTENCE_TABLES
from benchmarks.planning.claims import PLANNING_CLAIMS
from benchmarks.planning.tables import PLANNING_COMPUTED, PLANNING_TABLES
from benchmarks.remote_kv_cache.claims import REMOTE_CLAIMS
from benchmarks.remote_kv_cache.engine_tables import ENGINE_TABLES
from benchmarks.remote_kv_cache.security_claims import SECURITY_CLAIMS
from benchmarks.remote_kv_cache.tables import REMOTE_TABLES
from benchmarks.results_reader import Results, read_results

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "planning.md")
CLAIMS: Final = (*REMOTE_CLAIMS, *SECURITY_CLAIMS, *PERSISTENCE_CLAIMS, *PLANNING_CLAIMS, *PIPELINE_CLAIMS)
LEDGER: Final = {
    "claims": lambda results: claims_table(CLAIMS, results),
    "missed": lambda results: missed_table(CLAIMS, results),
    "rig": rig_table,
}
TABLES: Final = (
    REMOTE_TABLES | ENGINE_TABLES | EVICTION_TABLES | PERSISTENCE_TABLES | CLUSTER_TABLES | PLANNING_TABLES
    | PIPELINE_TABLES
)  # fmt: skip
COMPUTED: Final = PLANNING_COMPUTED | PIPELINE_COMPUTED
_MARKED: Final = re.compile(r"(<!-- begin:(\w+) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)


def fill(document: str, results: Results) -> str:
    """The document with its tables made again. Raises `KeyError` for a marker without a table."""

    def table(match: re.Match[str]) -> str:
        if match[2] in LEDGER:
            return f"{match[1]}{LEDGER[match[2]](results)}\n{match[3]}"
        if match[2] in COMPUTED:
            return f"{match[1]}{COMPUTED[match[2]]()}\n{match[3]}"
        needed, make = TABLES[match[2]]
        return f"{match[1]}{make(results) if needed in results else 'Not measured yet.'}\n{match[3]}"

    return _MARKED.sub(table, document)


def draw_charts(results: Results, folder: Path) -> list[Path]:
    """Write all charts. -> the files written."""
    from benchmarks.cluster_sim.charts import CLUSTER_CHARTS
    from benchmarks.eviction.charts import EVICTION_CHARTS
    from benchmarks.kv_pipeline.charts import PIPELINE_CHARTS
    from benchmarks.persistence_kv_cache.charts import PERSISTENCE_CHARTS
    from benchmarks.planning.charts import PLANNING_CHARTS
    from benchmarks.remote_kv_cache.charts import REMOTE_CHARTS
    from benchmarks.remote_kv_cache.engine_charts import ENGINE_CHARTS

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    everything = (
        REMOTE_CHARTS | ENGINE_CHARTS | EVICTION_CHARTS | PERSISTENCE_CHARTS | CLUSTER_CHARTS | PLANNING_CHARTS
        | PIPELINE_CHARTS
    )  # fmt: skip
    for name, (needed, make) in everything.items():
        if needed in results:
            path = folder / f"{name}.svg"
            make(results, path)
            written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--charts", type=Path, default=ROOT / "docs" / "charts", metavar="FOLDER")
    parser.add_argument("--document", type=Path, nargs="+", default=list(DOCUMENTS), metavar="FILE")
    options = parser.parse_args()
    results = read_results(options.results)
    for document in options.document:
        document.write_text(fill(document.read_text(), results))
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: the tables were made, the charts were not", file=sys.stderr)
        return 1
    for path in draw_charts(results, options.charts):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
