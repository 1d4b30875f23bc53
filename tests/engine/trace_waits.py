"""Reads from an engine's `trace_file` how long requests waited. The times are from the engine's own clock rather
than from the arrival of answers, so tests need no allowance for other computations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from kvstore_client.engine.trace_file import read_trace

# By how much a wait may exceed its bound. When all tests run, the engine shares two cores with tests that compute.
LATE_S: Final = 0.5 if "KVSTORE_FAULTS" in os.environ else 6.0


WRITTEN_S: Final = 0.5  # after this time, ended requests are usually in the file


class Waited(NamedTuple):
    """A request's waits, in seconds. queue: until the engine gave it blocks, or until its end. load: until those blocks
    were loaded, or the load failed; 0 without a load."""

    queue_s: float
    load_s: float


def waited(trace: Path, since: float) -> list[Waited]:
    """Return the waits of each request that arrived after ``since`` (in seconds since 1970) and has ended. The engine
    writes a request's waits a moment after its end."""
    queues, loads = dict[str, float](), dict[str, float]()
    for each in read_trace(trace):
        seconds = ((each.ended_us or each.began_us) - each.began_us) / 1e6
        if each.name == "queue" and each.began_us >= since * 1e6:
            queues[each.request_id] = seconds
        elif each.name == "load":
            loads[each.request_id] = seconds
    return [Waited(queue_s, loads.get(request, 0.0)) for request, queue_s in queues.items()]
