"""What the proxy counts and measures, for /metrics. Each proxy has one registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstore_serving.proxy.pools import ROLES, Pools
from kvstore_serving.proxy.record import Record
from kvstore_serving.proxy.store import StoreWatch

_TTFT_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100)
_ITL_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """The proxy's metrics. Used by the event loop only."""

    def __init__(self, pools: Pools, store: StoreWatch, split_from: Callable[[], list[dict[str, Any]]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvstore_proxy_requests", "Requests, by path through the engines and outcome.",
            ["endpoint", "decision", "outcome"], registry=self.registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "kvstore_proxy_time_to_first_token_seconds", "From a streaming request to its first token, at the user.",
            ["decision"], buckets=_TTFT_S, registry=self.registry,
        )  # fmt: skip
        self.tpot = Histogram(
            "kvstore_proxy_time_per_output_token_seconds", "Mean time between the tokens of an answer after its first.",
            ["decision"], buckets=_ITL_S, registry=self.registry,
        )  # fmt: skip
        self.itl = Histogram(
            "kvstore_proxy_inter_token_seconds", "Between two pieces of a streamed answer.",
            ["decision"], buckets=_ITL_S, registry=self.registry,
        )  # fmt: skip
        self.phases = Histogram(
            "kvstore_proxy_phase_seconds",
            "decide: until an engine is chosen. prefill: until the prefill engine's first token. handover: from there "
            "to the decode engine's first token. decode: from there to the end.",
            ["phase"], buckets=_TTFT_S, registry=self.registry,
        )  # fmt: skip
        self.retries = Counter(
            "kvstore_proxy_retries", "Requests that went on at another engine, by when.", ["when"],
            registry=self.registry,
        )  # fmt: skip
        self.mismatches = Counter(
            "kvstore_proxy_first_token_mismatches", "First tokens that the decode engine disagreed with.",
            registry=self.registry,
        )  # fmt: skip
        self.prefills = Counter(
            "kvstore_proxy_prefills", "Requests to prefill engines, by outcome.", ["outcome"], registry=self.registry
        )
        self.failures = Counter(
            "kvstore_proxy_engine_failures", "Requests and streams that failed at an engine.", ["engine"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "kvstore_proxy_prompt_tokens", "Prompt tokens, as far as they are known.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "kvstore_proxy_cached_tokens",
            "Prompt tokens found in a cache, or expected there if no engine says it.",
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "kvstore_proxy_output_tokens", "Tokens of answers, as far as they are known.", registry=self.registry
        )
        self.in_flight = Gauge("kvstore_proxy_in_flight", "Requests that are being served.", registry=self.registry)
        self.draining = Gauge("kvstore_proxy_draining", "1 while no new requests are taken.", registry=self.registry)
        up = Gauge(
            "kvstore_proxy_store_up", "1: the store answers; else nothing is handed over.", registry=self.registry
        )
        up.set_function(lambda: float(store.works))
        self.registry.register(_Engines(pools, split_from))

    def ended(self, record: Record) -> None:
        """Count a request at its end."""
        decision = record.decision
        self.requests.labels(record.path, decision, record.outcome).inc()
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.output_tokens.inc(record.output_tokens)
        if record.ttft_s is not None:
            self.ttft.labels(decision).observe(record.ttft_s)
        if record.tpot_s is not None:
            self.tpot.labels(decision).observe(record.tpot_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """The current state of the pools."""

    def __init__(self, pools: Pools, split_from: Callable[[], list[dict[str, Any]]]) -> None:
        self._pools = pools
        self._split_from = split_from

    def collect(self) -> list[GaugeMetricFamily]:
        up = GaugeMetricFamily("kvstore_proxy_engine_up", "1: takes requests.", labels=["engine", "role"])
        running = GaugeMetricFamily("kvstore_proxy_engine_running", "Requests of this proxy there.", labels=["engine"])
        queued = GaugeMetricFamily(
            "kvstore_proxy_engine_queued_tokens", "Uncached prompt tokens it was sent.", labels=["engine"]
        )
        unpaired = GaugeMetricFamily(
            "kvstore_proxy_unpaired_engines", "Decode engines that no prefill engine can hand prompts over to."
        )
        pairs = GaugeMetricFamily(
            "kvstore_proxy_unpaired_pairs", "1: these two are not paired, for this reason.",
            labels=["model", "prefill", "decode", "why"],
        )  # fmt: skip
        others = GaugeMetricFamily(
            "kvstore_proxy_engine_others", "Requests there, by its own metrics, that this proxy has not sent.",
            labels=["engine"],
        )  # fmt: skip
        pace = GaugeMetricFamily(
            "kvstore_proxy_engine_prefill_tokens_per_second", "Prompt tokens that it computes, as measured.",
            labels=["engine"],
        )  # fmt: skip
        least = GaugeMetricFamily(
            "kvstore_proxy_split_tokens", "Uncached tokens from which a prompt is split now; +Inf: none is.",
            labels=["decode"],
        )  # fmt: skip
        for each in self._split_from():
            least.add_metric([each["decode"]], math.inf if each["tokens"] is None else each["tokens"])
        for engine in list(self._pools.engines.values()):
            for role in ROLES:
                if role in engine.roles:
                    up.add_metric([engine.url, role], float(engine.healthy and not engine.shunned))
            running.add_metric([engine.url], engine.running)
            queued.add_metric([engine.url], engine.queued_tokens)
            others.add_metric([engine.url], engine.others_running + engine.others_waiting)
            measured = engine.pace.line
            if measured is not None and measured.each:
                pace.add_metric([engine.url], 1 / measured.each)
        apart = self._pools.unpaired()
        unpaired.add_metric([], sum(each["alone"] for each in apart))
        for each in apart:
            for other in each["prefill"]:
                pairs.add_metric([each["model"], other["url"], each["decode"]["url"], other["why"]], 1)
        return [up, running, queued, others, pace, least, unpaired, pairs]
