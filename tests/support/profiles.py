"""Profiles of engines for the planner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvstore_serving.planning.profile import read_profile

SHIPPED = "opt-13b-a100-80g"


def on_one_gpu(folder: Path, name: str = SHIPPED, model: str | None = None) -> str:
    """Write a file with a shipped profile's times on a single GPU, for its model or for another one. Returns the file's
    path. A search simulates every degree of parallelism in a profile, so one degree takes a third of the time of
    three."""
    shipped = read_profile(name)
    one = msgspec.structs.replace(shipped.degree(1), kv_tokens={1: shipped.degree(1).kv_tokens[1]})
    file = folder / f"{name}.json"
    profile = msgspec.structs.replace(shipped, model=model or shipped.model, degrees=[one])
    file.write_bytes(msgspec.json.encode(profile))
    return str(file)
