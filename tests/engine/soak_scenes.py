"""The kinds of soak tests: engines with too little of every resource, a store, and the store's faults.

plain       one engine; the store is killed, frozen, slowed, cut off
deciding    the same, but the connector decides what to load
windows     a model with sliding windows
states      a model with states in addition to attention
sizes       two engines, of one and of two ranks, on one store
full        another tenant takes the store's memory, and the engine's tenant is refused requests beyond its quotas
disk        the store's disk is full, or slow
cluster     two nodes that each have all blocks: one is killed, frozen or drained, or etcd stops
hand-overs  one engine computes prompts, another one decodes
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient
from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, BLOCK_BYTES, Engine, Expected, StartEngine, prompt, save_windowed_model
from tests.engine.models import save_mamba_hybrid
from tests.engine.soak_watch import Promise
from tests.support.cluster import Cluster
from tests.support.disk import compile_io_errors, disk_flags, io_errors_in
from tests.support.etcd import Etcd
from tests.support.harness import Server, StartServer, make_keys, make_namespace
from tests.support.slow_link import SlowLink

MiB = 1 << 20
KINDS = ("plain", "deciding", "windows", "states", "sizes", "full", "disk", "cluster", "hand-overs")
SERVER_BYTES = 32 * MiB
CPU_BYTES = 8 * MiB
LOOKUP_TIMEOUT_S, TIMEOUT_S = 0.5, 1.0
WINDOW = 3 * BLOCK  # the window of the model with sliding windows
NEW_TOPIC_ROUNDS = 12
TOPICS = 6  # topics in use at a time
MOST_TOKENS = 70
TIMES = (0.0, 0.1)
ABORTS = ("waiting", "loading", "prefilling", "decoding", *TIMES)
SMALL: dict[str, Any] = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 26, "max_model_len": 640}
# The options that a model with states needs; see test_state_models.py.
STATEFUL: dict[str, Any] = {
    "max_num_batched_tokens": BLOCK,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": BLOCK,
    "num_gpu_blocks_override": 44,
    "max_model_len": 640,
}
# The share of a store that an engine may use if the store serves others.
QUOTAS = """
[tenants.mine]
memory = "12MiB"
pinned = "4MiB"
requests_per_s = 40
bytes_per_s = "16MiB"

[tenants.others]
memory_guaranteed = "20MiB"
"""
# By default, torch keeps prepared code for every shape of a step, which takes more memory than all other growth.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}


class Talk:
    """Makes requests whose prompts share beginnings. Topics appear and disappear."""

    def __init__(self, chooser: random.Random) -> None:
        self._chooser = chooser

    def ask(self, turn: int, phases: bool) -> Ask:
        """phases: whether requests may be aborted in a certain phase; the engine's core must then run in the driver."""
        choose = self._chooser
        topic = turn // NEW_TOPIC_ROUNDS + choose.randrange(TOPICS)
        leaf = choose.randrange(4)
        tokens = prompt(1000 + topic, 300)[: 100 + 50 * leaf] + prompt(5000 + 10 * topic + leaf, 60 + 70 * leaf)
        abort = choose.choice(ABORTS if phases else TIMES) if choose.random() < 0.3 else None
        return Ask(tokens, choose.choice((1, 40, MOST_TOKENS)), at=choose.randrange(4), abort=abort)


@dataclass
class Scene:
    """engines: the core of the first one runs in the driver. promises: one `Promise` per engine, checked with its
    trace. harms: functions that cause a fault for a moment and return after its end. expected: returns the right
    tokens. requests: the number of requests to all engines in a round."""

    engines: list[Engine]
    promises: list[Promise]
    servers: Callable[[], list[Server]]
    harms: list[Callable[[], None]]
    expected: Expected
    always_load: bool
    requests: int = 10
    handed_over: bool = False

    def harm(self, choose: random.Random) -> None:
        """Cause a fault of the store that lasts a moment."""
        time.sleep(choose.uniform(0, 0.3))
        harm = choose.choice(self.harms)
        print(f"       {harm.__name__}", flush=True)
        harm()

    def asks(self, turn: int, talk: Talk) -> list[list[Ask]]:
        """Return the requests of each engine in one round."""
        many = self.requests // len(self.engines)
        asked = [[talk.ask(turn, engine.has_core) for _ in range(many)] for engine in self.engines]
        if self.handed_over:
            first, second = asked
            for mine, other in list(zip(first, second, strict=True))[1:]:  # the second one also gets its own
                mine.prompt, mine.max_tokens, mine.side = other.prompt, 1, "do_remote_decode"
                other.side = "do_remote_prefill"
        return asked


class Stage:
    """Makes scenes. Closing the stack stops everything that the fixtures do not stop."""

    def __init__(
        self,
        folder: Path,
        choose: random.Random,
        start_server: StartServer,
        start_engine: StartEngine,
        expected: Expected,
        stack: contextlib.ExitStack,
    ) -> None:
        self._folder = folder
        self._choose = choose
        self._start_server = start_server
        self._start_engine = start_engine
        self._expected = expected
        self._stack = stack
        self._traces: list[Path] = []

    def scene(self, kind: str) -> Scene:
        if kind == "cluster":
            return self._cluster()
        flags: list[str] = []
        environment: dict[str, str] = {}
        if kind == "disk":
            disk, trigger = self._folder / "disk", self._folder / "trigger"
            flags = disk_flags(disk, "96MiB")
            environment = io_errors_in(disk, trigger, compile_io_errors(self._folder))
        elif kind == "full":
            auth = self._folder / "auth.toml"
            tokens = {name: add(auth, name, name, ["read", "write", "monitor"]) for name in ("mine", "others")}
            auth.write_text(auth.read_text() + QUOTAS)
            flags = ["--auth", str(auth)]
            # This process uses the token too, because it checks what is held.
            self._stack.enter_context(pytest.MonkeyPatch.context()).setenv("KVSTORE_TOKEN", tokens["mine"])
        server = self._start_server(*flags, memory=f"{SERVER_BYTES}", **environment)
        link = self._stack.enter_context(SlowLink(server.port))
        harms = self._harms(server, link)
        if kind == "disk":
            harms = [*self._disk_harms(trigger), harms[0]]  # after a restart the server uses its disk again
        elif kind == "full":
            fill = self._filling(server, tokens["others"])
            harms = [fill, fill, *harms]
        always = kind in ("plain", "windows", "sizes", "hand-overs")
        expected, model, shape, requests = self._expected, None, SMALL, 10
        if kind == "windows":
            model = save_windowed_model(self._folder / "windowed", WINDOW)
            shape = {**SMALL, "num_gpu_blocks_override": 52}  # half the size
            expected = self._alone(model, enable_prefix_caching=False)
        elif kind == "states":
            model, shape, requests = save_mamba_hybrid(self._folder / "states"), STATEFUL, 6
            expected = self._alone(model, **{**STATEFUL, "num_gpu_blocks_override": 256})
        more: dict[str, Any] = {"head_shards": 2} if kind == "sizes" else {}
        if kind == "states":
            more["cpu_bytes"] = CPU_BYTES // 2
        elif kind == "full":
            more["token"] = tokens["mine"]
        engines = [self._engine(link.endpoint, always, model, shape, **more)]
        if kind == "sizes":
            ranks = {"fork": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
            engines.append(self._engine(link.endpoint, always, model, {**shape, **ranks}, separate=True, **more))
        elif kind == "hand-overs":
            engines.append(self._engine(link.endpoint, always, model, shape))
        return self._set(
            engines, lambda: [server], harms, expected, always, requests=requests, handed_over=kind == "hand-overs"
        )

    def _set(
        self,
        engines: list[Engine],
        servers: Callable[[], list[Server]],
        harms: list[Callable[[], None]],
        expected: Expected,
        always: bool,
        **more: Any,
    ) -> Scene:
        most_s = LOOKUP_TIMEOUT_S + (TIMEOUT_S if always else 0.0)
        promises = [Promise(trace, most_s) for trace in self._traces]
        return Scene(engines, promises, servers, harms, expected, always, **more)

    def _engine(
        self,
        endpoint: str,
        always_load: bool,
        model: Path | None,
        shape: dict[str, Any],
        *,
        separate: bool = False,
        **more: Any,
    ) -> Engine:
        """separate: the engine's core runs in a process of its own."""
        self._traces.append(self._folder / f"trace{len(self._traces)}.json")
        options = {"cpu_bytes": CPU_BYTES, "timeout_s": TIMEOUT_S, "lookup_timeout_s": LOOKUP_TIMEOUT_S, **more}
        options |= {"always_load": always_load, "trace_file": str(self._traces[-1])}
        environment = {**ENVIRONMENT, **({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if separate else {})}
        arguments = {**shape, **({} if model is None else {"model": model})}
        return self._start_engine(endpoint, options=options, environment=environment, **arguments)

    def _alone(self, model: Path, **shape: Any) -> Expected:
        """Return a function that returns the tokens generated by an engine without any cache."""
        engine = Engine(model, self._folder / "alone.log", connector=None, **shape)
        self._stack.callback(engine.stop)
        known: dict[tuple[int, ...], list[int]] = {}

        def expected(*prompts: list[int], max_tokens: int) -> list[list[int]]:
            for each in prompts:
                if tuple(each) not in known:
                    if shape["enable_prefix_caching"]:
                        engine.reset_prefix_cache()
                    known[tuple(each)] = engine.generate(each, max_tokens=max_tokens)[0].token_ids
            return [known[tuple(each)] for each in prompts]

        return expected

    def _harms(self, server: Server, link: SlowLink) -> list[Callable[[], None]]:
        choose = self._choose

        def kill() -> None:
            server.kill()
            time.sleep(choose.uniform(0, 0.5))
            server.restart()

        def freeze() -> None:
            with server.stopped():
                time.sleep(choose.uniform(0.1, 1.5))

        def cut_off() -> None:
            link.hold(choose.choice((0, 3 * BLOCK_BYTES)))
            time.sleep(choose.uniform(0.1, 1.5))
            link.release()

        def slow_down() -> None:
            link.bytes_per_s = 5e6
            time.sleep(choose.uniform(0.5, 1.5))
            link.bytes_per_s = None

        return [kill, freeze, cut_off, slow_down]

    def _filling(self, server: Server, token: str) -> Callable[[], None]:
        others = make_namespace(BLOCK_BYTES, "others")
        block = bytes(BLOCK_BYTES)
        choose = self._choose
        numbers = itertools.count(0, 1024)

        def fill() -> None:
            hold_s = choose.uniform(0.5, 2.0)
            with KVStoreClient(server.endpoint, others, token=token, timeout_s=5.0) as client:
                keys = make_keys(2 * SERVER_BYTES // BLOCK_BYTES, next(numbers))
                for at in range(0, len(keys), 8):
                    client.set(keys[at : at + 8], [block] * 8)
                    client.contains(keys[at : at + 8], pin_s=hold_s)
            time.sleep(hold_s)

        return fill

    def _disk_harms(self, trigger: Path) -> list[Callable[[], None]]:
        choose = self._choose

        def have(what: str) -> None:
            trigger.write_text(what)
            time.sleep(choose.uniform(0.5, 2.0))
            trigger.unlink()

        def fill_disk() -> None:
            have("full")

        def slow_disk() -> None:
            have("slow")

        return [fill_disk, slow_disk, slow_disk]

    def _cluster(self) -> Scene:
        choose = self._choose
        etcd = self._stack.enter_context(Etcd(self._folder / "etcd"))
        cluster = self._stack.enter_context(
            Cluster(
                etcd.url("soak"),
                self._folder,
                memory=f"{SERVER_BYTES}",
                grace_seconds=0,
                drain_seconds=2,
                segment="4MiB",
            )
        )
        for node in ("n1", "n2"):
            cluster.start(node, zone=f"zone-{node}")
        cluster.wait_for(30, n1="serving", n2="serving")

        def back(node: str) -> None:
            cluster.nodes[node].restart()
            cluster.wait_for(30, n1="serving", n2="serving")

        def kill_node() -> None:
            node = choose.choice(("n1", "n2"))
            cluster.nodes[node].kill()
            time.sleep(choose.uniform(0, 2.0))
            back(node)

        def drain_node() -> None:
            node = choose.choice(("n1", "n2"))
            cluster.nodes[node].stop()
            back(node)

        def freeze_node() -> None:
            with cluster.nodes[choose.choice(("n1", "n2"))].stopped():
                time.sleep(choose.uniform(0.1, 2.0))

        def stop_etcd() -> None:
            etcd.signal(signal.SIGSTOP)
            time.sleep(choose.uniform(0.5, 2.0))
            etcd.signal(signal.SIGCONT)

        engine = self._engine(cluster.url, False, None, SMALL, replicas=2)
        return self._set(
            [engine],
            lambda: list(cluster.nodes.values()),
            [kill_node, drain_node, freeze_node, stop_etcd],
            self._expected,
            False,
        )
