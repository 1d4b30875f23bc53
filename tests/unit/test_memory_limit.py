"""The limits of control groups of both versions, read from files like those of machines and containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.node.memory_limit import limit, misfits
from tests.support.settings import load

NONE = 9223372036854771712  # version 1 writes this for "no limit"
V2 = "36 25 0:30 {} /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "118 114 0:32 {} /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,memory\n"
    "119 114 0:33 {} /sys/fs/cgroup/devices ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,devices"
)
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
GROUP = "sys/fs/cgroup"


def machine(root: Path, mounts: str, group: str, files: Mapping[str, object]) -> Path:
    """Make a root folder with these lines of mountinfo and cgroup, and with files below /sys/fs/cgroup."""
    others = "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n26 25 0:5 / /proc rw - proc proc rw"
    given = {f"{GROUP}/{name}": text for name, text in files.items()}
    given |= {"proc/self/mountinfo": f"{others}\n{mounts}\n", "proc/self/cgroup": f"{group}\n"}
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("mounts", "group", "files", "allowed", "where"),
    [
        pytest.param(
            V2.format("/"), "0::/", {"memory.max": 1 << 30}, 1 << 30, "memory.max", id="v2-container-of-its-own-view"
        ),
        pytest.param(V2.format("/"), "0::/", {"memory.max": "max"}, None, "", id="v2-no-limit"),
        pytest.param(V2.format("/"), "0::/", {}, None, "", id="v2-the-root-has-no-file"),
        pytest.param(
            V2.format("/"),
            "0::/system.slice/kvstore.service",
            {"system.slice/kvstore.service/memory.max": 2 << 30, "system.slice/memory.max": "max"},
            2 << 30,
            "system.slice/kvstore.service/memory.max",
            id="v2-service",
        ),
        pytest.param(
            V2.format("/"),
            "0::/kubepods.slice/pod1.slice/c1.scope",
            {
                "kubepods.slice/pod1.slice/c1.scope/memory.max": "max",
                "kubepods.slice/pod1.slice/memory.max": 3 << 30,
                "kubepods.slice/memory.max": 64 << 30,
            },
            3 << 30,
            "kubepods.slice/pod1.slice/memory.max",
            id="v2-the-pod-has-less-than-its-container",
        ),
        pytest.param(
            V2.format("/"),
            "0::/a/b/c",
            {"a/b/c/memory.max": 4 << 30, "a/memory.max": 1 << 30},
            1 << 30,
            "a/memory.max",
            id="v2-a-group-between-has-no-file",
        ),
        pytest.param(
            V2.format("/"), "0::/../..", {"memory.max": 1 << 30}, 1 << 30, "memory.max", id="v2-above-the-view"
        ),
        pytest.param(
            V2.format("/"), "0::/../other", {"memory.max": 1 << 30}, 1 << 30, "memory.max", id="v2-beside-the-view"
        ),
        pytest.param(
            V2.format("/../.."), "0::/", {"memory.max": 1 << 30}, 1 << 30, "memory.max", id="v2-mounted-from-above"
        ),
        pytest.param(
            V2.format("/docker/c1"),
            "0::/docker/c1",
            {"memory.max": 1 << 30},
            1 << 30,
            "memory.max",
            id="v2-container-of-the-machines-view",
        ),
        pytest.param(
            V2.format("/docker/c1"),
            "0::/docker/c1/inner",
            {"memory.max": 4 << 30, "inner/memory.max": 1 << 30},
            1 << 30,
            "inner/memory.max",
            id="v2-group-inside-a-container",
        ),
        pytest.param(
            V1.format("/docker/c1", "/docker/c1"),
            "4:memory:/docker/c1\n3:devices:/docker/c1\n0::/docker/c1",
            {"memory/memory.limit_in_bytes": 1 << 30, "devices/memory.limit_in_bytes": 1},
            1 << 30,
            "memory/memory.limit_in_bytes",
            id="v1-container",
        ),
        pytest.param(
            V1.format("/", "/"),
            "4:cpu,memory:/a/b\n3:devices:/x",
            {"memory/a/b/memory.limit_in_bytes": 4 << 30, "memory/a/memory.limit_in_bytes": 2 << 30},
            2 << 30,
            "memory/a/memory.limit_in_bytes",
            id="v1-parent",
        ),
        pytest.param(
            V1.format("/docker/c1", "/docker/c1"),
            "4:memory:/docker/c1",
            {
                "memory/memory.limit_in_bytes": 4 << 30,
                "memory/memory.stat": f"cache 0\nhierarchical_memory_limit {1 << 30}\nhierarchical_memsw_limit {NONE}",
            },
            1 << 30,
            "memory/memory.stat",
            id="v1-a-group-above-the-container",
        ),
        pytest.param(
            V1.format("/", "/"),
            "4:memory:/a",
            {"memory/a/memory.limit_in_bytes": NONE, "memory/a/memory.stat": f"hierarchical_memory_limit {NONE}"},
            None,
            "",
            id="v1-no-limit",
        ),
        pytest.param(
            f"{V1.format('/', '/')}\n{UNIFIED}",
            "4:memory:/a\n0::/system.slice/a",
            {"memory/a/memory.limit_in_bytes": 1 << 30, "unified/system.slice/a/cgroup.procs": 1},
            1 << 30,
            "memory/a/memory.limit_in_bytes",
            id="hybrid-memory-of-v1",
        ),
        pytest.param(
            f"{V1.format('/', '/').splitlines()[1]}\n{UNIFIED}",
            "3:devices:/a\n0::/b",
            {"unified/b/memory.max": 1 << 30},
            1 << 30,
            "unified/b/memory.max",
            id="hybrid-memory-of-v2",
        ),
        pytest.param("", "0::/", {"memory.max": 1}, None, "", id="no-groups-mounted"),
        pytest.param(V2.format("/"), "", {"memory.max": 1}, None, "", id="no-group-named"),
        pytest.param("36 25\n- cgroup2\n", "x", {}, None, "", id="lines-that-nobody-knows"),
    ],
)
def test_the_lowest_visible_limit_counts(
    mounts: str, group: str, files: Mapping[str, object], allowed: int | None, where: str, tmp_path: Path
) -> None:
    found = limit(machine(tmp_path, mounts, group, files))
    assert (found and found.allowed) == allowed
    assert found is None or found.file == tmp_path / GROUP / where


def test_without_proc_no_limit_is_known(tmp_path: Path) -> None:
    assert limit(tmp_path) is None


def test_a_store_that_does_not_fit_is_reported_with_both_figures(tmp_path: Path) -> None:
    machine(tmp_path, V2.format("/"), "0::/", {"memory.max": 2 << 30})
    (problem,) = misfits(load(None, {}, {"memory": "2GiB", "shards": "2"}), tmp_path)
    assert str(problem) == (
        "memory: with 256.0 MiB for each of 2 shard(s) the server takes up to 2.5 GiB, and its control group allows "
        f"2.0 GiB ({tmp_path}/sys/fs/cgroup/memory.max): lower --memory to 1536MiB, or raise that limit to 3.5 GiB "
        "(for a container `--memory` or `resources.limits.memory`, for a systemd unit `MemoryMax=`)"
    )
    assert not list(misfits(load(None, {}, {"memory": "1536MiB", "shards": "2"}), tmp_path))
    (problem,) = misfits(load(None, {}, {"memory": "2GiB", "shards": "8"}), tmp_path)
    assert "memory.max): raise that limit to 5.0 GiB" in str(problem)  # no --memory fits


def test_a_hidden_groups_limit_is_reported_as_such(tmp_path: Path) -> None:
    stat = {"memory/memory.limit_in_bytes": 4 << 30, "memory/memory.stat": f"hierarchical_memory_limit {1 << 30}"}
    machine(tmp_path, V1.format("/c", "/c"), "4:memory:/c", stat)
    (problem,) = misfits(load(None, {}, {"memory": "1GiB"}), tmp_path)
    assert "and a control group above its own allows 1.0 GiB" in str(problem)
