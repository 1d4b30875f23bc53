"""Engines of neighbouring releases of vLLM read each other's blocks, so operators can upgrade them one at a time.

`make vllm` runs these tests. It names the folder of each release in `KVSTORE_VLLM_RELEASES`, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import full_blocks
from tests.support.harness import Server

ROOT = Path(__file__).parents[2]
RELEASES: dict[str, str] = json.loads(os.environ.get("KVSTORE_VLLM_RELEASES", "{}"))
NEIGHBOURS = list(pairwise(RELEASES)) or [("", "")]
pytestmark = pytest.mark.skipif(not RELEASES, reason="make vllm runs it")
APART = ("0.28.0", "0.29.0")  # their attention kernels for CPUs have different names, so they share nothing
LIMIT_S = 120.0


def run(release: str, model: Path, *arguments: str, seed: str | None = "0") -> subprocess.CompletedProcess[str]:
    """Run `one_release` in this release. `seed`: the value of PYTHONHASHSEED, which vLLM 0.28 needs."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{RELEASES[release]}",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **({} if seed is None else {"PYTHONHASHSEED": seed}),
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.one_release", str(model), *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def answers(release: str, model: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run(release, model, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["release"].startswith(release), "it is this release that ran"
    answered: list[dict[str, Any]] = found["answers"]
    return answered


@pytest.mark.parametrize("pair", NEIGHBOURS, ids=" and ".join)
@pytest.mark.timeout(600)
def test_engines_of_neighbouring_releases_read_each_others_blocks(
    pair: tuple[str, str], server: Server, model: Path
) -> None:
    store = ("--endpoint", server.endpoint)
    for seed, (writer, reader) in (("1", pair), ("2", pair[::-1])):
        [alone] = answers(reader, model, seed)
        [written] = answers(writer, model, seed, *store)
        [read] = answers(reader, model, seed, *store)
        assert read["tokens"] == alone["tokens"]
        assert (written["cached"], read["cached"]) == (0, 0 if pair == APART else full_blocks(500))


@pytest.mark.skipif("0.28.0" not in RELEASES, reason="that release is not installed")
def test_a_release_that_hashes_at_random_is_refused(server: Server, model: Path) -> None:
    done = run("0.28.0", model, "1", "--endpoint", server.endpoint, seed=None)
    assert done.returncode != 0
    assert "block hashes differ in every process unless PYTHONHASHSEED is set" in done.stderr
