"""A new field of INFO needs only one line of code: a server whose struct has one more field shows it everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.support.harness import ROOT, Server, blocks_of, environment, make_keys, make_namespace, wait_until

BLOCK = 4096
LINE = (
    '    wishes: Annotated[int, Counter("state.gets", "kvstore_wishes", "What was wished for.", '
    'info="requests: wishes", page="Wishes", top="wishes")] = 0\n'
)


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package `kvstore`, in which one file has one more line."""
    shutil.copytree(ROOT / "kvstore", tmp_path / "changed" / "kvstore", ignore=shutil.ignore_patterns("__pycache__"))
    status = tmp_path / "changed" / "kvstore" / "wire" / "status.py"
    head, class_, rest = status.read_text(encoding="utf-8").partition("class ShardInfo(")
    fields, end, rest = rest.partition("# fmt: on")
    status.write_text(f"{head}{class_}{fields.rstrip()}\n{LINE}\n\n{end}{rest}", encoding="utf-8")
    return tmp_path / "changed"


def test_a_field_added_by_one_line_is_shown_everywhere(changed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(changed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    server = Server(
        *(tmp_path / "log", "--shards", "1", "--memory", "32MiB", "--http", "127.0.0.1:0"),
        prefix=("env", f"--chdir={changed}"),
        PYTHONPATH=path,
    )

    def answer(name: str) -> str:
        with urllib.request.urlopen(f"{server.http_url}/{name}", timeout=20) as found:
            return str(found.read().decode())

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvstore_cli", *arguments, "--endpoint", server.endpoint]
        variables = environment(PYTHONPATH=path, COLUMNS="150")
        return subprocess.run(command, cwd=changed, env=variables, capture_output=True, text=True, check=True).stdout

    try:
        with KVStoreClient(server.endpoint, make_namespace(BLOCK, "new")) as client:
            keys = make_keys(1)
            client.set(keys, blocks_of(keys, BLOCK), deferred=False)
            for _ in range(5):
                assert client.get(keys).hit == 1
        assert 'kvstore_wishes_total{shard="0"} 5.0' in answer("metrics")
        wait_until(lambda: json.loads(answer("status.json"))["shards"][0].get("wishes") == 5, what="the look shows it")
        head = (
            '<th scope="col" class="number" data-field="wishes" data-unit="" title="What was wished for.">Wishes</th>'
        )
        assert head in answer("")
        (shard,) = json.loads(run("info", "--json"))["shards"]
        assert shard["wishes"] == 5
        sets = next(line for line in run("info", "--shards").splitlines() if "wishes" in line)
        assert sets.split() == ["shard", "sets", "gets", "lookups", "received", "sent", "slow", "wishes"]
        top = json.loads(run("top", "--once", "--json", "--interval", "0.2", "--sort", "wishes"))
        assert top["all"]["wishes"] == 0  # since the first sample
        assert "wishes▼" in run("top", "--once", "--interval", "0.2", "--sort", "wishes")
    finally:
        server.kill()
