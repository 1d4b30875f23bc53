"""What the rounds of faults saw, for benchmarks.remote_kv_cache.test_faults: one line of JSON a round."""

from __future__ import annotations

import json
import os
from pathlib import Path


def record(way: str, fault: str, phase: str, waited_s: float) -> None:
    """Write down a round that was as it must be, in the file that KVSTORE_FAULTS_FILE names, if it does."""
    if file := os.environ.get("KVSTORE_FAULTS_FILE"):
        line = {"way": way, "fault": fault, "phase": phase, "waited_s": waited_s}
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
