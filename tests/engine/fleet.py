"""A whole fleet, for tests of its parts together: a store, a prefill engine, a decode engine and a proxy.

Starting it takes most of a minute, so one fleet serves all tests of a process.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.engine.served import MODEL, ServedEngine, save_served_model
from tests.support.harness import Server, wait_until
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.proxies import ProxyProcess

T = TypeVar("T")

FULL: Final = os.environ.get("KVSTORE_FLEET") == "full"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.8, "seed": 11}


def some(cases: Iterable[T]) -> list[T]:
    """Return every third of these cases, so that a test takes seconds; under `make fleet`, return all of them."""
    return [case for number, case in enumerate(cases) if FULL or number % 3 == 0]


class Fleet:
    """A store, prefill engine `p`, decode engine `d`, and a proxy that splits every request. All three write traces,
    the proxy and `p` send spans to `receiver`, and `d` publishes KV events. Blocks are not divided into layer slices
    until a test calls `keep_parts`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts = 1
        self.receiver = OtlpReceiver()
        model = save_served_model(folder / "model")
        self.store = Server(folder / "store.log", "--memory", "512MiB")
        self.files = [folder / f"{name}.json" for name in ("proxy", "p", "d")]
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events"}
        events["replay_endpoint"] = f"ipc://{folder}/replay"
        self.events = f"{events['endpoint']},{events['replay_endpoint']}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
            otlp = f"--otlp-traces-endpoint={self.receiver.url}/v1/traces"
            self.p = ServedEngine(model, folder / "p.log", self.store.endpoint, otlp, trace_file=str(self.files[1]))
            # vLLM's own tracing is off in D, so vLLM drops the trace header, and the proxy must pass it to the
            # connector in another way.
            told = ("--kv-events-config", json.dumps(events), "--enable-scale-out")  # D renders chats for both engines
            self.d = ServedEngine(model, folder / "d.log", self.store.endpoint, *told, trace_file=str(self.files[2]))
        for engine in (self.p, self.d):
            engine.await_health()
        traced = (f"--trace-file={self.files[0]}", f"--otlp-endpoint={self.receiver.url}")
        self.proxy = ProxyProcess(folder / "proxy", *self.options, "--policy=split", *traced)

    @property
    def options(self) -> list[str]:
        roles = [f"--prefill={self.p.url}", f"--decode={self.d.url}"]
        return [*self.store_options, *roles]

    @property
    def store_options(self) -> list[str]:
        """Return the options of a proxy for the same store, without those for the engines."""
        return [f"--store={self.store.endpoint}", "--check-seconds=0.2"]

    def mend(self) -> None:
        """Restart engines that a test has killed."""
        for engine in (self.p, self.d):
            if not engine.running:
                engine.start()
                engine.await_health()

    def keep_parts(self, parts: int) -> None:
        """Make the engines keep blocks in this many layer slices from now on; if the number changes, they restart."""
        if parts == self._parts:
            return
        self._parts = parts
        for engine in (self.p, self.d):
            engine.stop()
            engine.start(layer_parts=parts)
        for engine in (self.p, self.d):
            engine.await_health()
        wait_until(lambda: all_well(self.proxy), what="the proxy sends requests to both again")

    def stop(self) -> None:
        self.proxy.stop()
        for engine in (self.p, self.d):
            engine.stop()
        self.store.stop()
        self.receiver.close()


def all_well(proxy: ProxyProcess) -> bool:
    """Whether the proxy has the store, and all engines accept requests."""
    status = proxy.status()
    engines = [each for pool in status["pools"].values() for each in pool]
    return bool(status["store"]["answers"]) and all(each["healthy"] and not each["shunned"] for each in engines)


def ask(path: str, number: int, **more: Any) -> dict[str, Any]:
    """Return a request. Different numbers give different prompts."""
    chooser = random.Random(number)
    words = [chooser.randrange(300, 4000) for _ in range(200)]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 32, **more}
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": " ".join(f"w{word}" for word in words[:40])}]}
    return {**body, "prompt": words}
