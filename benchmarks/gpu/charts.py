"""The charts of docs/gpu.md: each way to load a prompt's KV, next to computing it."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.names import COMPUTED as TOY_COMPUTED
from benchmarks.remote_kv_cache.first_token import COMPUTED
from benchmarks.render.cells import Row, cases
from benchmarks.render.charts import Bars


def _first_tokens(needs: str, title: str, computed: str) -> Bars:
    def ways(row: Row) -> list[str]:
        names = dict.fromkeys(name for case in row.result.cases for name in case.operations)
        return [name for name in names if name != computed]

    return Bars(
        needs, title, "seconds to the first token", cases(), "{p[prompt_tokens]} tokens", ways, computed,
        lambda row, item: row.at(item).s, lambda row, item: row.at(computed).s.median, log=True,
    )  # fmt: skip


GPU_CHARTS: Final = {
    "gpu_first_token": _first_tokens(
        "gpu_first_token", "First token, toy transformer of an 8B model's shapes", TOY_COMPUTED
    ),
    "gpu_vllm": _first_tokens("gpu_vllm", "First token, vLLM with an 8B model's shapes", COMPUTED),
}
