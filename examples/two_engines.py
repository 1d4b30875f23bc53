"""Two vLLM servers with one kvstore: each server loads the blocks that the other one has computed.

    python examples/two_engines.py [--prompt-tokens 2048] [--model tiny|mid] [--json]

Starts a kvstore-server and two `vllm serve` processes that use it, all on this machine. Holds a conversation whose
turns go to them alternately, as a load balancer without affinity would send them. Every turn's prompt is the whole
conversation so far. Each engine finds the other's part of it in the store. Then it holds another conversation through
`examples/router.py`, which receives the engines' KV events and sends each turn to the engine that has most of it.
Prints, for every turn, the cached tokens and the time to the answer, then each engine's own metrics. The model has
random weights (nothing is downloaded). The exit status is 1 if a turn that could hit did not.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from email.message import Message
from pathlib import Path
from typing import Any

from demo import BLOCK_TOKENS, START_S, environment, parse_options, progress, start_server, waiting
from models import SHAPES, VOCABULARY, make_model
from rich.console import Console
from rich.table import Table

LONGEST_START_S = 300.0
SHUTDOWN_S = 30  # for requests at SIGTERM, and for sending the blocks that they computed
TURNS = 4
ANSWER_TOKENS = 64
# The store has a turn's blocks a moment after its answer. A person's next turn would take longer than that to come.
PAUSE_S = 0.5
# Below the kernel's ephemeral ports: a connection could take one of those before the engine listens.
PORTS = iter(random.sample(range(10_000, 20_000), 10_000))


def free_port() -> int:
    """Return a free port, for a server that takes seconds until it listens; never the same one twice."""
    while True:
        port = next(PORTS)
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


class EngineServer:
    """`vllm serve` with the connector.

    store: the store's endpoint; empty for an engine without a store
    texts: whether the model has a tokenizer, so that the engine takes texts and chats, too
    """

    def __init__(
        self,
        name: str,
        model: Path,
        store: str,
        max_model_len: int,
        log: Path,
        dtype: str = "bfloat16",
        texts: bool = False,
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        self.events, self.replay = f"ipc://{log}.events", f"ipc://{log}.replay"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_client.vllm.connector",
            "kv_role": "kv_both",
            # A model as small as this may compute a prompt faster than load it.
            "kv_connector_extra_config": {"endpoint": store, "cpu_bytes": "256MiB", "always_load": True},
        }
        # The command `vllm serve MODEL …` is this module with --model.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "demo", "--port", str(port), "--host", "127.0.0.1"]
        if store:
            command += ["--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
            command += ["--kv-events-config", json.dumps(events)]
        command += ["--shutdown-timeout", str(SHUTDOWN_S)]
        command += [] if texts else ["--skip-tokenizer-init"]
        command += ["--dtype", dtype, "--enforce-eager"]  # these and the next options are needed on a CPU
        command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", str(max_model_len)]
        command += ["--gpu-memory-utilization", "0.3"]
        settings = {
            **environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # two engines share this machine
        }
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=settings)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(SHUTDOWN_S + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def await_health(self) -> None:
        deadline = time.monotonic() + LONGEST_START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"{self.name} did not start; its log ends:\n{self.log.read_text(errors='replace')[-4000:]}")

    def metrics(self) -> dict[str, float]:
        """This engine's kvstore metrics that are not 0: name and labels -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:kvstore_") and "_created" not in line)
        return {name: float(value) for name, value in values if float(value)}


def complete(url: str, prompt: list[int]) -> tuple[dict[str, Any], Message]:
    """Return the answer to a prompt of token ids, in the format of OpenAI's API, and its headers."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return dict(json.load(reply)), reply.headers


def converse(urls: dict[str, str], seed: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """Hold one conversation; its turns go to these addresses (by name) in turn."""
    chooser = random.Random(seed)
    said = [chooser.randrange(VOCABULARY) for _ in range(prompt_tokens)]
    turns = []
    for number in range(TURNS):
        name = list(urls)[number % len(urls)]
        started = time.perf_counter()
        reply, headers = complete(urls[name], said)
        seconds = time.perf_counter() - started
        details = reply["usage"].get("prompt_tokens_details") or {}
        name = headers.get("x-kvstore-engine", name)
        turns.append(
            {
                "engine": name,
                "prompt_tokens": len(said),
                "cached_tokens": details.get("cached_tokens") or 0,
                "routed_tokens": int(headers.get("x-kvstore-tokens", 0)),
                "seconds": seconds,
            }
        )
        progress.print(f"turn {number + 1}: {name} answered after {seconds:.2f} s")
        said = said + reply["choices"][0]["token_ids"] + [chooser.randrange(VOCABULARY) for _ in range(40)]
        time.sleep(PAUSE_S)
    return turns


def start_router(engines: list[EngineServer]) -> tuple[subprocess.Popen[str], str]:
    """Start `router.py` for these engines. Return its process and its address."""
    command = [sys.executable, str(Path(__file__).with_name("router.py")), "--port", "0"]
    for engine in engines:
        command += ["--engine", f"{engine.name}={engine.url},{engine.events},{engine.replay}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def run(prompt_tokens: int, model_name: str) -> dict[str, Any]:
    with waiting(f"making the model {model_name}"):
        model = make_model(model_name)
    longest = prompt_tokens + TURNS * (ANSWER_TOKENS + 40) + ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        logs = Path(scratch)
        server, endpoint = start_server(logs / "server.log")
        stack.callback(server.wait)
        stack.callback(server.terminate)
        progress.print(f"kvstore-server is ready at {endpoint}")
        engines = []
        for name in ("engine A", "engine B"):
            engines.append(EngineServer(name, model, endpoint, longest, logs / f"{name}.log"))
            stack.callback(engines[-1].stop)
        with waiting("two engines are starting", 2 * START_S):
            for engine in engines:
                engine.await_health()
        turns = converse({engine.name: engine.url for engine in engines}, 11, prompt_tokens)
        router, url = start_router(engines)
        stack.callback(router.wait)
        stack.callback(router.terminate)
        routed = converse({"router": url}, 12, prompt_tokens)
        metrics = {engine.name: engine.metrics() for engine in engines}
        return {"turns": turns, "routed": routed, "metrics": metrics}


def show(result: dict[str, Any]) -> None:
    console = Console()
    titles = {
        "turns": "a conversation, its turns sent to two engines alternately",
        "routed": "another one, its turns sent by the router to the engine that has most of them",
    }
    for name, title in titles.items():
        table = Table("turn", "engine", title=title)
        for heading in ("prompt tokens", "cached tokens", "answer after"):
            table.add_column(heading, justify="right")
        for number, turn in enumerate(result[name], start=1):
            table.add_row(
                str(number),
                turn["engine"],
                str(turn["prompt_tokens"]),
                str(turn["cached_tokens"]),
                f"{turn['seconds']:.2f} s",
            )
        console.print(table)
    for name, metrics in result["metrics"].items():
        console.print(f"\n{name}, GET /metrics:")
        for metric, value in metrics.items():
            console.print(f"  {metric} {value:g}", highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, models=list(SHAPES))
    result = run(options.prompt_tokens, options.model)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if all(turn["cached_tokens"] for name in ("turns", "routed") for turn in result[name][1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
