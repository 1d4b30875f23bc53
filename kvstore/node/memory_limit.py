"""Finds how much memory the control groups of this process allow, and whether a server's settings fit into it.

Control groups form a tree. The limit of a group applies to the sum of all groups below it. So the limit that counts is
the lowest one on the way from the process's own group to the root. A group's limit is in `memory.max` in version 2, and
in `memory.limit_in_bytes` in version 1. A machine may mount both versions. A container usually sees its own group as
the root, so the groups above it are hidden. Version 1 still shows the lowest limit of all groups in `memory.stat`.
Version 2 shows nothing of hidden groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from kvstore.node.config import ServerConfig
from kvstore.node.settings import Misfit
from kvstore.sizes import format_size, spell_size

SHARD_OVERHEAD_BYTES: Final = 256 << 20  # memory that a shard may use in addition to its share of --memory
BESIDE_BYTES: Final = 1 << 30  # added for the supervisor and the keepers in the limit that the manual recommends
_MIB: Final = 1 << 20
_ABOVE: Final = "memory.stat"  # a file of version 1 that also covers hidden groups
_NO_LIMIT: Final = 1 << 60  # version 1 shows "no limit" as a number of about this size or more


class Limit(NamedTuple):
    """The number of bytes that control groups allow, and the file that says so."""

    allowed: int
    file: Path


def misfits(config: ServerConfig, root: Path = Path("/")) -> Iterator[Misfit]:
    """Yield a misfit if the control groups allow less memory than the server may use, so that it would be killed.
    `root`: see `limit`."""
    found = limit(root)
    needed = needed_bytes(config)
    if found is None or needed <= found.allowed:
        return
    fitting = (found.allowed - config.shards * SHARD_OVERHEAD_BYTES) // _MIB * _MIB
    lower = f"lower --memory to {spell_size(fitting)}, or " if fitting >= config.shards * config.segment else ""
    whose = "a control group above its own" if found.file.name == _ABOVE else "its control group"
    yield Misfit(
        "memory",
        f"{needs(config)}, and {whose} allows {format_size(found.allowed)} ({found.file}): {lower}raise "
        f"that limit to {format_size(needed + BESIDE_BYTES)} (for a container `--memory` or `resources.limits.memory`, "
        "for a systemd unit `MemoryMax=`)",
    )


def needed_bytes(config: ServerConfig) -> int:
    """Return how many bytes of memory the shards may use in total."""
    return config.memory + config.shards * SHARD_OVERHEAD_BYTES


def needs(config: ServerConfig) -> str:
    """Return the memory that the shards may use, in words for a message."""
    return (
        f"with {format_size(SHARD_OVERHEAD_BYTES)} for each of {config.shards} shard(s) the server takes up to "
        f"{format_size(needed_bytes(config))}"
    )


def limit(root: Path = Path("/")) -> Limit | None:
    """Return the lowest limit that this process can see in its control groups, or None if there is no limit.

    `root`: the folder that has `proc/self` and the control groups; tests use other folders.
    """
    return min((each for each in _limits(root) if each.allowed < _NO_LIMIT), default=None)


def _limits(root: Path) -> Iterator[Limit]:
    for is_v2, group, top in _hierarchies(root):
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # the root has no such file; "max" means no limit
                file = folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")
                yield Limit(int(file.read_text()), file)
            if folder == top:
                break
        if not is_v2:
            with contextlib.suppress(OSError, ValueError):
                stat = group / _ABOVE
                words = stat.read_text().split()
                yield Limit(int(words[words.index("hierarchical_memory_limit") + 1]), stat)


def _hierarchies(root: Path) -> Iterator[tuple[bool, Path, Path]]:
    """Yield three values for each tree of control groups that can limit memory: whether it is of version 2, the folder
    of this process's group, and the topmost visible folder."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # without /proc nothing is known
        return
    groups = dict(line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
    of_memory = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
    for mount in mounts:
        about, _, system = mount.partition(" - ")
        fields, kind = about.split(), system.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_v2 = kind[0] == "cgroup2"
        group = groups.get("") if is_v2 else of_memory
        if group is not None and (is_v2 or (kind[0] == "cgroup" and "memory" in kind[2].split(","))):
            top = root / fields[4].lstrip("/")
            yield is_v2, top / _below(group, fields[3]), top


def _below(group: str, mounted: str) -> PurePosixPath:
    """Return the path of a group below a mount of the group `mounted`. If the group lies outside the mount, as in a
    container that shares the machine's view, return the mount itself, because no nearer group is visible."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)
