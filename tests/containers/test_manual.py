"""The commands of docs/deployment.md that run one server in a container, unchanged, with podman instead of docker."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.harness import ROOT
from tests.support.podman import COMMAND_S, podman

# A reader takes longer to type the next line than the server takes to start.
PODMAN = """
docker() {
    podman --log-level=fatal "$@"
    if [[ $* == *--detach* ]]; then
        until podman logs kvstore 2>&1 | grep "^kvstore-server ready"; do sleep 0.1; done
    fi
}
"""
# On the machine of these tests, root may not raise limits, and podman sets both limits or none.
LIMITS = ("--ulimit nofile=65536:65536", "--ulimit nofile=16384:16384 --ulimit nproc=16384:16384")


def lines() -> str:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    found = re.search(r"test_manual\.py runs these lines.*?\n```shell\n(.*?)```", text, re.DOTALL)
    assert found and LIMITS[0] in found[1]
    return found[1].replace(*LIMITS)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    podman("rm", "--force", "--time=0", "kvstore", check=False)
    podman("volume", "rm", "--force", "kvstore-blocks", "kvstore-run", check=False)
    podman("network", "rm", "--force", "kv", check=False)


def test_the_manuals_lines_run_a_server_and_a_shared_memory_client(nothing_left: None) -> None:
    script, _, end = lines().partition("docker stop")
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " shared memory " in done.stdout and " on   0 B  8.0 GiB " in done.stdout, done.stdout
    said = podman("logs", "kvstore")
    assert "WARNING" not in said.stderr and "ERROR" not in said.stderr, said.stderr
    podman("healthcheck", "run", "kvstore")
    done = run(f"docker stop{end}")
    assert done.returncode == 0 and podman("ps", "--all", "--quiet").stdout == "", done.stderr


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", PODMAN + script]
    return subprocess.run(command, cwd="/run", capture_output=True, text=True, timeout=COMMAND_S, check=False)
