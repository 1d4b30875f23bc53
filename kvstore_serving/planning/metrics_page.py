"""Reads a page of Prometheus metrics: an engine's, or a proxy's."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvstore_serving.failures import in_words

METRICS_TIMEOUT_S: Final = 10.0


class MetricsError(Exception):
    """The page cannot be read; the message says why."""


async def metrics_of(url: str) -> list[Sample]:
    """Return the metrics of the server at this URL, with or without /v1. Raises `MetricsError`."""
    page = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)) as session,
            session.get(page) as response,
        ):
            if response.status != 200:
                raise MetricsError(f"{page}: HTTP status {response.status}; expected a page of Prometheus metrics")
            text = await response.text()
        families: list[Metric] = list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        raise MetricsError(f"{page}: {in_words(error)}") from error
    return [sample for family in families for sample in family.samples]
