"""Requests through the proxy while the proxy, an engine or the store fails at any instant: the tokens are right, and
nothing is left behind.

Each round sends one new prompt to a fleet of real engines. Meanwhile one of the fleet's processes is killed, frozen or
cut off from the proxy, or the user disconnects or is cut off. The answer is compared with that of an engine that has no
store. Killed engines take half a minute to restart, so only `make faults` kills them. It runs a tenth of its
KVSTORE_FAULTS=500 rounds here, and its other faults also last longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from kvstore_client.vllm.connector.hand_over import UNPROMISED_S
from tests.engine.engines import Engine, namespaces
from tests.engine.fault_record import record
from tests.engine.fleet import COMPLETIONS, Fleet, all_well
from tests.engine.served import MODEL
from tests.engine.test_hand_over import nothing_left
from tests.engine.trace_waits import LATE_S, WRITTEN_S, waited
from tests.support.harness import wait_until
from tests.support.proxies import ProxyProcess, Reading
from tests.support.slow_link import SlowLink

FULL: Final = "KVSTORE_FAULTS" in os.environ
ROUNDS: Final = int(os.environ.get("KVSTORE_FAULTS", "60")) // 10
FROZEN: Final = ("proxy frozen", "prefill frozen", "decode frozen", "store frozen")
CUT_OFF: Final = ("prefill cut off", "decode cut off", "store cut off", "user cut off")  # from the proxy
KILLED: Final = ("prefill killed", "decode killed")
KINDS: Final = ("proxy killed", "user left", "store killed", *FROZEN, *CUT_OFF, *(KILLED if FULL else ()))
LONGEST_FAULT_S: Final = 5.0 if FULL else 1.5
PHASES: Final = ("before a token", "in the stream", "afterwards")
ROUND_S: Final = 60.0  # the most time for a round, on a busy machine
WAIT_S: Final = 2.0  # the `wait_s` of the decode side's request
# The time of an answer without the fault's duration: the waits, and computing the prompt again on a busy machine.
ANSWER_S: Final = 20.0
TOKENS: Final = 200 if FULL else 100


class Round:
    """One request, and a fault of the fleet while it is served."""

    def __init__(self, fleet: Fleet, links: dict[str, SlowLink], proxy: ProxyProcess, choose: random.Random) -> None:
        """links: the links from the proxy to the engines and to the store, and from the user to the proxy."""
        self.fleet, self._links, self.proxy, self._choose = fleet, links, proxy, choose
        self.prompt = [choose.randrange(300, 4000) for _ in range(choose.randrange(200, 1800))]
        self.chunks: list[dict[str, Any]] = []
        self.done = False
        self.meanwhile: Round | None = None  # a second request, if the proxy is cut off from the store
        self._reading: Reading | None = None

    @property
    def _store_answers(self) -> bool:
        return bool(self.proxy.status()["store"]["answers"])

    def again(self) -> Round:
        """Send the same prompt again, on another connection to the proxy, and return that request after its answer has
        ended."""
        again = Round(self.fleet, self._links, self.proxy, self._choose)
        again.prompt = self.prompt
        again.read(self.proxy.url)
        return again

    def read(self, url: str) -> None:
        """Send the request to this URL, and read the answer until it ends or breaks off."""
        asked = {"model": MODEL, "prompt": self.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        asked["kv_transfer_params"] = {"kvstore": {"wait_s": WAIT_S}}
        try:
            self._reading = Reading(url, COMPLETIONS, {**asked, "return_token_ids": True})
            for chunk in self._reading:
                self.chunks.append(chunk)
            self.done = self._reading.done
        except (OSError, ValueError, AttributeError, HTTPException):  # the connection was cut, or closed by `leave`
            self.done = False
        finally:
            if self._reading is not None:
                self._reading.leave()

    @property
    def tokens(self) -> list[int]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", [])]
        return [token for choice in choices for token in choice.get("token_ids") or []]

    @property
    def phase(self) -> str:
        return "afterwards" if self.done else "in the stream" if self.tokens else "before a token"

    def fail(self, kind: str) -> tuple[str, float]:
        """Cause the fault after a moment, and end it after a while if it can be ended. Returns the request's phase at
        its beginning, and its duration in seconds."""
        who, _, what = kind.partition(" ")
        time.sleep(self._choose.uniform(0, 1) ** 2)
        phase, began = self.phase, time.monotonic()
        wait_s = self._choose.uniform(0.05, LONGEST_FAULT_S)
        engine = {"prefill": self.fleet.p, "decode": self.fleet.d}.get(who)
        if kind == "user left":
            wait_until(lambda: self._reading, what="the answer has begun")
            assert self._reading is not None
            self._reading.leave()
        elif kind == "store killed":
            self.fleet.store.kill()
            time.sleep(wait_s / 3)
            self.fleet.store.restart()
        elif kind == "store frozen":
            with self.fleet.store.stopped():
                time.sleep(wait_s)
        elif kind == "proxy killed":
            self.proxy.process.kill()
        elif what == "cut off":
            link = self._links[who]
            self._choose.choice((link.cut, link.hold))()  # connections are closed, or stop silently
            if who == "store":
                wait_until(lambda: not self._store_answers, what="the proxy misses the store")
                self.meanwhile = self.again()
            else:
                time.sleep(wait_s)
            link.release()
        elif what == "killed" and engine is not None:
            engine.kill()
        else:
            with frozen(self.proxy.process.pid if engine is None else engine.pid):
                time.sleep(wait_s)
        return phase, time.monotonic() - began


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process and its descendants (SIGSTOP) while the body runs."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for each in family:
        each.suspend()
    try:
        yield
    finally:
        for each in family:
            each.resume()


@pytest.fixture
def links(fleet: Fleet) -> Iterator[dict[str, SlowLink]]:
    """Links through which the proxy reaches the engines and the store."""
    ports = {"prefill": fleet.p.port, "decode": fleet.d.port, "store": fleet.store.port}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(SlowLink(port)) for name, port in ports.items()}


@pytest.fixture
def alone(fleet: Fleet, tmp_path: Path) -> Iterator[Engine]:
    """An engine with the same model that computes everything itself."""
    model, log = fleet.folder / "model", tmp_path / "alone.log"
    engine = Engine(model, log, connector=None, enable_prefix_caching=False, max_model_len=2048)
    yield engine
    engine.stop()


@pytest.mark.timeout(400 + ROUNDS * ROUND_S)
def test_after_any_fault_tokens_are_right_and_engines_free(
    fleet: Fleet, links: dict[str, SlowLink], alone: Engine, tmp_path: Path
) -> None:
    seed = int(os.environ.get("KVSTORE_FAULTS_SEED", random.randrange(1 << 32)))
    print(f"KVSTORE_FAULTS_SEED={seed}")
    choose = random.Random(seed)
    fleet.keep_parts(4)
    roles = [f"--{role}={http(links[role])}" for role in ("prefill", "decode")]
    checks = ("--check-seconds=0.2", "--backoff-seconds=0.2")
    options = (f"--store={links['store'].endpoint}", *checks, *roles, "--policy=split")
    proxy = ProxyProcess(tmp_path / "proxy", *options)
    met: Counter[tuple[str, str]] = Counter()
    kinds = list[str]()
    waits = 0
    for number in range(ROUNDS):
        kinds = kinds or choose.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        told = f"round {number} of KVSTORE_FAULTS_SEED={seed}: {kind}"
        this = Round(fleet, links, proxy, choose)
        right = alone.generate(this.prompt, max_tokens=TOKENS)[0].token_ids
        with SlowLink(int(proxy.url.rpartition(":")[2])) as links["user"], ThreadPoolExecutor(1) as user:
            began, since = time.monotonic(), time.time()
            reading = user.submit(this.read, http(links["user"]))
            phase, fault_s = this.fail(kind)
            reading.result(ANSWER_S + 10)
            waited_s = time.monotonic() - began - fault_s
        assert waited_s <= ANSWER_S, told
        assert this.tokens == right[: len(this.tokens)], told
        if kind == "proxy killed":
            proxy.stop()
            proxy = ProxyProcess(tmp_path / "proxy", *options)
        if kind in ("proxy killed", "user left") or (kind == "user cut off" and not this.done):
            this.proxy = proxy
            again = this.again()  # a retry, as users do
            assert again.done and again.tokens == right, told
        else:
            assert this.done and this.tokens == right, told
        if this.meanwhile is not None:
            assert this.meanwhile.done and this.meanwhile.tokens == right, told
        for engine in (fleet.p, fleet.d):
            if engine.running:
                wait_until(lambda engine=engine: not engine.metric("vllm:num_requests_running"), what=f"{told}: free")
        frozen_s = fault_s if kind == "decode frozen" else 0.0
        nothing_left(fleet.store)
        assert not sum(each.writing for each in namespaces(fleet.store)), told
        fleet.mend()
        wait_until(lambda proxy=proxy: all_well(proxy), what=f"{told}: both engines take requests")
        time.sleep(WRITTEN_S)
        for each in waited(fleet.files[2], since):
            waits += 1
            assert each.queue_s - frozen_s <= UNPROMISED_S + LATE_S, f"{told}: {each}"
            assert each.load_s - frozen_s <= WAIT_S + LATE_S, f"{told}: {each}"
        met[kind, phase] += 1
        record("through the proxy", kind, phase, max(0.0, waited_s))
        print(f"{number + 1} {kind} {phase}: {waited_s:.2f} s, {len(this.tokens)} tokens")
    assert proxy.stop() == 0
    assert "Traceback" not in proxy.log.read_text()
    for kind in KINDS:
        print(f"{kind:16}", *(f"{phase}: {met[kind, phase]:3}" for phase in PHASES))
    assert waits >= ROUNDS // 2, "the decode engine has told of few requests: nothing is shown of their waits"
    assert met.total() - sum(met[kind, PHASES[2]] for kind in KINDS) >= ROUNDS // 3, "most came too late"


def http(link: SlowLink) -> str:
    return link.endpoint.replace("tcp", "http")
