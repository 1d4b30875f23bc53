"""Writes the results of rounds with faults for benchmarks.remote_kv_cache.bench_faults: one line of JSON per round."""

from __future__ import annotations

import json
import os
from pathlib import Path


def record(way: str, fault: str, phase: str, waited_s: float) -> None:
    """If KVSTORE_FAULTS_FILE is set, append a line for a round that passed to the file that it names."""
    if file := os.environ.get("KVSTORE_FAULTS_FILE"):
        line = {"way": way, "fault": fault, "phase": phase, "waited_s": waited_s}
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
