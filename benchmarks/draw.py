"""Draws charts and tables from the committed results only. Run it with `python -m benchmarks.draw`.

It reads benchmarks/results/*.json, writes docs/charts/*.svg, and replaces the text between `<!-- begin:NAME -->` and
`<!-- end:NAME -->` in the documents. docs/benchmarks.md has the headlines, and its appendix has most other tables. A
table without results says that it was not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Final

from benchmarks.cluster_sim.charts import CLUSTER_CHARTS
from benchmarks.cluster_sim.tables import CLUSTER_TABLES
from benchmarks.eviction.charts import EVICTION_CHARTS
from benchmarks.eviction.tables import EVICTION_TABLES
from benchmarks.gpu.charts import GPU_CHARTS
from benchmarks.gpu.tables import GPU_OVERVIEWS, GPU_TABLES
from benchmarks.kv_pipeline.charts import PIPELINE_CHARTS
from benchmarks.kv_pipeline.claims import PIPELINE_CLAIMS
from benchmarks.kv_pipeline.tables import PIPELINE_COMPUTED, PIPELINE_TABLES
from benchmarks.persistence_kv_cache.charts import PERSISTENCE_CHARTS
from benchmarks.persistence_kv_cache.claims import PERSISTENCE_CLAIMS
from benchmarks.persistence_kv_cache.tables import PERSISTENCE_TABLES
from benchmarks.planning.charts import PLANNING_CHARTS
from benchmarks.planning.claims import PLANNING_CLAIMS
from benchmarks.planning.tables import PLANNING_COMPUTED, PLANNING_OVERVIEWS, PLANNING_TABLES
from benchmarks.remote_kv_cache.charts import REMOTE_CHARTS
from benchmarks.remote_kv_cache.claims import REMOTE_CLAIMS
from benchmarks.remote_kv_cache.engine_charts import ENGINE_CHARTS
from benchmarks.remote_kv_cache.engine_tables import ENGINE_TABLES
from benchmarks.remote_kv_cache.published import PUBLISHED_TABLES
from benchmarks.remote_kv_cache.tables import REMOTE_TABLES
from benchmarks.render.headline import headline_table, machine, missed_list, readme_lines
from benchmarks.render.ledger import claims_table, rig_table
from benchmarks.render.renamed import renamed
from benchmarks.results_reader import Results, read_results

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("benchmarks", "benchmarks-appendix", "planning", "planning-validation", "gpu", "published")
    ),
)
CLAIMS: Final = (*REMOTE_CLAIMS, *PERSISTENCE_CLAIMS, *PLANNING_CLAIMS, *PIPELINE_CLAIMS)
# These tables use all results that exist.
OVERVIEWS: Final = (
    GPU_OVERVIEWS
    | PLANNING_OVERVIEWS
    | PUBLISHED_TABLES
    | {
        "claims": lambda results: claims_table(CLAIMS, results),
        "rig": rig_table,
        "machine": machine,
        "headlines": headline_table,
        "readme": readme_lines,
        "missed_list": lambda results: missed_list(CLAIMS, results),
    }
)
TABLES: Final = (
    REMOTE_TABLES | ENGINE_TABLES | EVICTION_TABLES | PERSISTENCE_TABLES | CLUSTER_TABLES | PLANNING_TABLES
    | PIPELINE_TABLES | GPU_TABLES
)  # fmt: skip
CHARTS: Final = (
    REMOTE_CHARTS | ENGINE_CHARTS | EVICTION_CHARTS | PERSISTENCE_CHARTS | CLUSTER_CHARTS | PLANNING_CHARTS
    | PIPELINE_CHARTS | GPU_CHARTS
)  # fmt: skip
COMPUTED: Final = PLANNING_COMPUTED | PIPELINE_COMPUTED
_MARKED: Final = re.compile(r"(<!-- begin:(\w+) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)


def fill(document: str, results: Results) -> str:
    """Return the document with new tables. Raises `KeyError` for a marker without a table."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        made = COMPUTED[name]() if name in COMPUTED else (OVERVIEWS.get(name) or TABLES[name])(results)
        return f"{match[1]}{renamed(made)}\n{match[3]}"

    return _MARKED.sub(table, document)


def draw_charts(results: Results, folder: Path) -> list[Path]:
    """Write the charts of all results that exist. Return the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, chart in CHARTS.items():
        path = folder / f"{name}.svg"
        if chart.needs in results:
            chart(results, path)
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
