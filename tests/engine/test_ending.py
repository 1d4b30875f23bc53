"""When an engine ends, the blocks that it has computed reach the store, and proxies learn of its end at once.
The tests stop `vllm serve`, and programs with the class `LLM`, in every way, with a slow link to the store."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import http.client
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore_client.engine.directory import EngineList, EngineRecord
from tests.engine import witness
from tests.engine.driver import fork_processes, make_engine, sampling
from tests.engine.engines import BLOCK, BLOCK_BYTES, nursery, prompt, stored_blocks
from tests.engine.served import MODEL, ServedEngine, post, save_served_model
from tests.support.etcd import Etcd
from tests.support.harness import Server, wait_until
from tests.support.slow_link import SlowLink

BLOCKS = 40  # of a prompt
TOKENS = BLOCKS * BLOCK + 5
CRAWL, SLOW, FAST = 300_000, 1_500_000, 40_000_000  # bytes/s: 2, 11 and 300 blocks a second
TIMEOUT_S = 60.0  # the connector's timeout_s: these machines are busy
VLLM_WORKER_S = 9  # the time after which vLLM kills a worker of an engine that ends
SAID = re.compile(r"at the end of this engine, (\d+) blocks that waited were sent, and (\d+) are lost")


class Fleet:
    """An engine that registers itself, behind a slow link to its store, and a follower of the directory that sees what
    proxies see."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder / "store.log", "--memory", "512MiB")
        self.link = SlowLink(self.server.port)
        self.etcd = Etcd(folder / "etcd")
        self.heard: list[dict[str, EngineRecord]] = []
        self._followed = EngineList(self.etcd.url("fleet"), self.heard.append)
        self._model = save_served_model(folder / "model")
        self._folder = folder
        self._seeds = iter(range(1000, 2000))
        self.asked = 0  # the number of blocks that all engines have computed
        self.engine: ServedEngine | None = None

    def start(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> ServedEngine:
        """Start an engine with an empty log. timeout_s: the connector's option."""
        assert self.engine is None or not self.engine.running
        number = len(list(self._folder.glob("engine-*.log")))
        options = {"engines": self.etcd.url("fleet"), "engine_url": "http://127.0.0.1:1", "timeout_s": timeout_s}
        log = self._folder / f"engine-{number}.log"
        self.engine = ServedEngine(self._model, log, self.link.endpoint, *arguments, **options)
        self.engine.await_health()
        wait_until(lambda: self.heard and self.heard[-1], what="it is registered")
        return self.engine

    def fill(self, prompts: int) -> list[float]:
        """Make the engine compute prompts while its link to the store is slow. Returns the time at which each prompt
        was computed."""
        assert self.engine is not None
        self.link.bytes_per_s = SLOW
        return [self._compute(self.engine) for _ in range(prompts)]

    def _compute(self, engine: ServedEngine) -> float:
        ask(engine, prompt(next(self._seeds), TOKENS))
        self.asked += BLOCKS
        return time.monotonic()

    @property
    def missing(self) -> int:
        """Return the number of computed blocks that are not in the store."""
        return self.asked - stored_blocks(self.server)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.kill()
        self._followed.close()
        self.etcd.kill()
        self.link.__exit__(None, None, None)
        self.server.stop()


def ask(engine: ServedEngine, tokens: list[int], answer: int = 1) -> None:
    status, reply = post(
        engine.url, "/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": answer, "ignore_eos": True}
    )
    assert status == 200 and reply["usage"]["completion_tokens"] == answer, reply


def ask_in_vain(engine: ServedEngine, tokens: list[int]) -> None:
    """Request an answer that takes longer than the engine runs."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(engine.url, "/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 750, "ignore_eos": True})


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("ending"))
    yield found
    found.stop()


@pytest.fixture
def fleet(whole_fleet: Fleet) -> Iterator[Fleet]:
    yield whole_fleet
    if whole_fleet.engine is not None:
        whole_fleet.engine.kill()
    whole_fleet.link.bytes_per_s = None
    whole_fleet.asked -= whole_fleet.missing


def leaves_first(fleet: Fleet) -> None:
    """Check that proxies learn of the end while blocks still wait to be sent. The caller sets the link's speed anew."""
    fleet.link.bytes_per_s = CRAWL
    wait_until(lambda: not fleet.heard[-1], what="it has left the directory")
    assert fleet.missing > 0, "it left before it had sent all"


def ends_in_order(fleet: Fleet, engine: ServedEngine, bytes_per_s: float = FAST) -> None:
    """Check that proxies learn of the engine's end while blocks are sent, and that all computed blocks reach the
    store."""
    leaves_first(fleet)
    assert sends_all(fleet, engine, bytes_per_s) > 0


def sends_all(fleet: Fleet, engine: ServedEngine, bytes_per_s: float = FAST) -> int:
    """Check that the engine ends by itself, with all computed blocks in the store. Returns the number of blocks that
    it sent when it had finished its requests."""
    fleet.link.bytes_per_s = bytes_per_s
    wait_until(lambda: not engine.running, TIMEOUT_S + 30, "it ends")
    log = engine.log.read_text(errors="replace")
    assert fleet.missing <= 0, log[-4000:]
    assert "force killing" not in log
    [(sent, lost)] = SAID.findall(log)
    assert int(lost) == 0
    return int(sent)


@pytest.mark.timeout(300)
def test_computed_blocks_are_sent_while_the_engine_is_busy(fleet: Fleet) -> None:
    engine = fleet.start()
    tokens, answer = prompt(2, TOKENS), 600
    asking = threading.Thread(target=ask, args=(engine, tokens, answer))
    asking.start()
    fleet.asked += BLOCKS
    wait_until(lambda: fleet.missing <= 0, what="the prompt is in the store")
    assert asking.is_alive(), "the answer to it goes on"
    asking.join(60)
    fleet.asked += (TOKENS + answer - 1) // BLOCK - BLOCKS
    wait_until(lambda: fleet.missing == 0, what="the answer is there, too")


@pytest.mark.timeout(300)
def test_with_vllms_defaults_all_computed_blocks_are_sent(fleet: Fleet) -> None:
    """The blocks of an aborted request are sent, too. Sending takes longer than vLLM gives its workers to end."""
    engine = fleet.start()
    fleet.fill(3)
    aborted = threading.Thread(target=ask_in_vain, args=(engine, prompt(3, TOKENS)))
    aborted.start()
    wait_until(lambda: engine.metric("vllm:generation_tokens_total") > 3, what="it has computed this prompt, too")
    fleet.asked += BLOCKS
    assert fleet.missing * BLOCK_BYTES / SLOW > VLLM_WORKER_S
    os.kill(engine.pid, signal.SIGTERM)
    ends_in_order(fleet, engine, SLOW)
    aborted.join(10)
    assert not aborted.is_alive()


@pytest.mark.timeout(300)
def test_a_frozen_store_delays_an_engines_end_by_a_bounded_time(fleet: Fleet) -> None:
    engine = fleet.start(timeout_s=2.0)
    fleet.fill(1)
    fleet.link.hold()
    os.kill(engine.pid, signal.SIGTERM)
    wait_until(lambda: not engine.running, 2 * 2.0 + 5 + 10, "it ends")
    fleet.link.release()
    log = engine.log.read_text(errors="replace")
    assert "force killing" not in log
    [(_, lost)] = SAID.findall(log)
    assert 0 < fleet.missing <= int(lost)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.timeout(300)
def test_a_signal_to_all_of_an_engines_processes_loses_nothing(fleet: Fleet, number: signal.Signals) -> None:
    """By default, systemd sends SIGTERM to all processes, and a terminal sends SIGINT to all of them at Ctrl-C."""
    engine = fleet.start()
    fleet.fill(2)
    process = psutil.Process(engine.pid)
    for each in [process, *process.children(recursive=True)]:
        each.send_signal(number)
    ends_in_order(fleet, engine)


@pytest.mark.timeout(300)
def test_with_a_shutdown_timeout_requests_finish_and_are_sent_too(fleet: Fleet) -> None:
    engine = fleet.start("--shutdown-timeout", "60")
    fleet.fill(2)
    tokens, answer = prompt(1, TOKENS), 400
    asking = threading.Thread(target=ask, args=(engine, tokens, answer))
    asking.start()
    wait_until(lambda: engine.metric("vllm:num_requests_running") == 1, what="it computes an answer")
    os.kill(engine.pid, signal.SIGTERM)
    leaves_first(fleet)
    assert asking.is_alive(), "proxies send nothing more while it finishes what it has begun"
    fleet.link.bytes_per_s = SLOW
    asking.join(60)
    assert not asking.is_alive()
    fleet.asked += (TOKENS + answer - 1) // BLOCK
    sends_all(fleet, engine)
    assert "aborting in-flight requests" not in engine.log.read_text(errors="replace")


@pytest.mark.timeout(300)
def test_a_killed_engine_loses_no_more_than_its_metrics_showed(fleet: Fleet) -> None:
    engine = fleet.start()
    began, stored = time.monotonic(), stored_blocks(fleet.server)
    computed = fleet.fill(5)
    waiting = engine.metric("vllm:kvstore_waiting_blocks")
    oldest_s = engine.metric("vllm:kvstore_oldest_waiting_seconds")
    engine.kill()
    assert 0 < fleet.missing <= waiting <= 5 * BLOCKS
    first_lost = (stored_blocks(fleet.server) - stored) // BLOCKS
    # The engine's last step, which updated its metrics, came after it had computed all prompts but one.
    assert computed[-2] - computed[first_lost] <= oldest_s <= time.monotonic() - began
    wait_until(lambda: not fleet.heard[-1], what="its lease ends")


def program(spec: dict[str, Any], log: Path, pipe: Connection, end: str) -> None:
    """Run a user's program that uses the class `LLM`, in an interpreter that ends normally."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    witness.listen()
    os.environ.update(spec["environment"])
    if spec["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
        fork_processes()
    with contextlib.suppress(SystemExit):
        use_llm(spec, pipe, end)
    ctypes.pythonapi.Py_Exit(0)


KEPT: list[Any] = []  # objects that a program still refers to at its end


def use_llm(spec: dict[str, Any], pipe: Connection, end: str) -> None:
    llm = make_engine(spec)
    llm.generate([{"prompt_token_ids": prompt(seed, TOKENS)} for seed in range(2)], sampling(1), use_tqdm=False)
    pipe.send("computed")
    pipe.recv()
    if end == "del":
        del llm
        gc.collect()
        pipe.send("deleted")
        pipe.recv()
        return
    KEPT.append(llm)
    if end == "sys.exit":
        sys.exit(0)


@pytest.mark.parametrize("end", ["end of program", "sys.exit", "del"])
@pytest.mark.parametrize("own_process", [True, False], ids=["core in its own process", "core in the program"])
@pytest.mark.timeout(300)
def test_a_programs_computed_blocks_are_sent_when_it_ends(
    server: Server, link: SlowLink, model: Path, tmp_path: Path, own_process: bool, end: str
) -> None:
    spec = {
        "model": str(model),
        "connector": {"endpoint": link.endpoint, "always_load": True},
        "kv_role": "kv_both",
        "beside": [],
        "load_failure_policy": "",
        "environment": {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        },
        "engine": {},
    }
    log = tmp_path / "program.log"
    pipe, far = nursery().Pipe()
    process = nursery().Process(target=program, args=(spec, log, far, end))
    process.start()
    far.close()
    link.bytes_per_s = SLOW
    assert pipe.poll(170) and pipe.recv() == "computed", log.read_text(errors="replace")[-4000:]
    assert stored_blocks(server) < 2 * BLOCKS
    link.bytes_per_s = FAST
    pipe.send("end")
    if end == "del":
        assert pipe.poll(60) and pipe.recv() == "deleted", log.read_text(errors="replace")[-4000:]
        assert stored_blocks(server) == 2 * BLOCKS, log.read_text(errors="replace")[-4000:]
        pipe.send("end")
    process.join(60)
    said = log.read_text(errors="replace")
    assert stored_blocks(server) == 2 * BLOCKS, said[-4000:]
    [(_, lost)] = SAID.findall(said)
    assert int(lost) == 0
