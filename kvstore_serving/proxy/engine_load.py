"""How busy engines are, according to their own metrics. The proxy needs these metrics because other clients may send
requests to the same engines.

vLLM and SGLang have Prometheus metrics under /metrics. Two of the metrics are read here. For an engine without metrics,
the proxy counts only its own requests.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_VALUE: Final = re.compile(
    rb"^(?:vllm|sglang):num_(?:requests_(running|waiting)|(running|queue)_reqs)(?:\{[^}\n]*\})? ([0-9.eE+]{1,20})\s*$",
    re.MULTILINE,
)


async def look_at_load(engine: Engine, upstream: Upstream, timeout_s: float) -> None:
    """Read the engine's metrics, and note its load. Never raises."""
    try:
        answer = await upstream.own(engine, "/metrics", timeout_s)
    except EngineFailed as error:
        log.debug("%s/metrics: %s", engine.url, error)
        return
    engine.load(*(running_and_waiting(answer.body) if answer.status == 200 else (0, 0)))


def running_and_waiting(text: bytes) -> tuple[int, int]:
    """Return the numbers of running and waiting requests on all ranks, read from Prometheus metrics. A missing number
    counts as 0."""
    counts = {"running": 0.0, "waiting": 0.0}
    for found in _VALUE.finditer(text):
        name = (found[1] or found[2]).decode().replace("queue", "waiting")
        try:
            counts[name] += min(float(found[3]), 1e6)
        except ValueError:
            continue
    return int(counts["running"]), int(counts["waiting"])
