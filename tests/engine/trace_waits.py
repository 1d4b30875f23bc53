"""How long requests waited for others, as an engine's `trace_file` tells: by the engine's own clock, not by when an
answer came, so that no test needs room for what is computed beside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

# What a wait may take beyond its bound. In the suite the engine has a part of two cores, beside tests that compute.
LATE_S: Final = 0.5 if "KVSTORE_FAULTS" in os.environ else 2.0


class Waited(NamedTuple):
    """A request's wait, in seconds. queue: until the engine gave it blocks, or until its end. load: from then until
    they were filled, as far as they were; 0 if nothing was to be loaded."""

    queue_s: float
    load_s: float


def waited(trace: Path, since: float) -> list[Waited]:
    """Of each request that came since then (in seconds since 1970) and has ended. The engine writes a moment later."""
    queues, loads = dict[str, float](), dict[str, float]()
    for each in json.loads(trace.read_bytes() or b"[]"):
        if each["name"] == "queue" and each["ts"] >= since * 1e6:
            queues[each["args"]["request_id"]] = each["dur"] / 1e6
        elif each["name"] == "load":
            loads[each["args"]["request_id"]] = each["dur"] / 1e6
    return [Waited(queue_s, loads.get(request, 0.0)) for request, queue_s in queues.items()]
