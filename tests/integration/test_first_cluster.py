"""Runs docs/first-cluster.md as a new operator would: each command, with other ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import FIRST_CLUSTER, Reader, blocks_of
from tests.support.harness import ROOT
from tests.support.network import need
from tests.support.ports import free_ports

PORTS = ("2379", "2380", "7070", "7080", "9101", "9102")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    for program in ("etcd", "openssl", "curl", "promtool"):
        if shutil.which(program) is None:
            need(f"{program} is not installed")
    ports = {f":{given}": f":{here}" for given, here in zip(PORTS, map(str, free_ports(len(PORTS))), strict=True)}
    places = {**ports, **{f" {given}": f" {here[1:]}" for (given, here) in zip(PORTS, ports.values(), strict=True)}}
    shutil.copy(ROOT / "docker" / "prometheus" / "alerts.yml", tmp_path)
    yield Reader(tmp_path, "", places)
    for file in tmp_path.glob("*.pid"):  # processes left by a block of commands that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_an_operator_gets_a_cluster_from_one_page(reader: Reader) -> None:
    blocks = [block for block in blocks_of(FIRST_CLUSTER) if block.runs]
    assert len(blocks) >= 8
    for block in blocks:
        reader.run(block)
