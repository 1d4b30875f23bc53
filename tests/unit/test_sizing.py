"""The table of models in docs/vllm.md: its sizes follow from the models' shapes."""

from __future__ import annotations

import re

import pytest

from kvstore_client import Namespace
from tests.support.harness import ROOT

ROW = re.compile(
    r"\| (?P<model>[^|]+) \| (?P<layers>\d+) \| (?P<heads>\d+) \u00d7 (?P<size>\d+)(?P<once>, once)? "
    r"\| (?P<token>[\d.]+) KiB \| (?P<prompt>[\d.]+) GiB \| (?P<tokens>[\d ]+) \| (?P<pace>[\d.]+) GB/s \|"
)
ROWS = [found.groupdict() for found in ROW.finditer((ROOT / "docs" / "vllm.md").read_text(encoding="utf-8"))]


def test_the_table_has_at_least_ten_models() -> None:
    assert len(ROWS) >= 10 and len({row["model"] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_a_models_sizes_follow_from_its_shape(row: dict[str, str]) -> None:
    shape = {"layers": int(row["layers"]), "kv_heads": int(row["heads"]), "head_size": int(row["size"])}
    token = Namespace.for_model("m", dtype="bfloat16", block_tokens=1, **shape).block_bytes
    token //= 2 if row["once"] else 1  # MLA keeps one latent vector instead of a key and a value
    assert float(row["token"]) == round(token / 1024, 1)
    assert row["prompt"] == f"{token * 8192 / 2**30:.2f}"
    assert int(row["tokens"].replace(" ", "")) == (64 << 30) // token // 1000 * 1000
    assert row["pace"] == f"{token * 1000 / 1e9:.2f}"
