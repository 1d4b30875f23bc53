"""How long requests waited for others, as an engine's `trace_file` tells: by the engine's own clock, not by when an
answer came, so that no test needs room for what is computed beside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from kvstore_client.engine.trace_file import read_trace

# What a wait may take beyond its bound. In the suite the engine has a part of two cores, beside tests that compute.
LATE_S: Final = 0.5 if "KVSTORE_FAULTS" in os.environ else 2.0


WRITTEN_S: Final = 0.5  # after which what has ended is in the file, mostly


class Waited(NamedTuple):
    """A request's wait, in seconds. queue: until the engine gave it blocks, or until its end. load: from then until
    they were filled, as far as they were; 0 if nothing was to be loaded."""

    queue_s: float
    load_s: float


def waited(trace: Path, since: float) -> list[Waited]:
    """Of each request that came since then (in seconds since 1970) and has ended. The engine writes a moment later."""
    queues, loads = dict[str, float](), dict[str, float]()
    for each in read_trace(trace):
        seconds = ((each.ended_us or each.began_us) - each.began_us) / 1e6
        if each.name == "queue" and each.began_us >= since * 1e6:
            queues[each.request_id] = seconds
        elif each.name == "load":
            loads[each.request_id] = seconds
    return [Waited(queue_s, loads.get(request, 0.0)) for request, queue_s in queues.items()]
