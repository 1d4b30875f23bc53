"""From a plan to a proxy and back. `plan search` writes the proxy's options; `plan watch` notices that the load has
changed; its proposal changes the roles of engines. The engines are stand-ins that answer at once.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.harness import Server, environment, wait_until
from tests.support.ports import free_ports
from tests.support.profiles import on_one_gpu
from tests.support.proxies import ProxyProcess, StandInEngine, post
from tests.support.stand_in_engine import MODEL, expected

SLO = ["--slo-ttft", "0.6", "--slo-tpot", "0.1"]


def kvstore(command: str, *arguments: str) -> str:
    done = forked.run("kvstore_cli", *shlex.split(command), *arguments, env=environment(), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A profile for the model of the stand-ins."""
    return on_one_gpu(tmp_path, model=MODEL)


@contextmanager
def users(url: str, body: dict[str, Any], each_s: float) -> Iterator[Callable[[], list[bytes]]]:
    """Send this request again and again until the `with` block ends. Yields a function that returns the answers so
    far."""
    answers: list[bytes] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(each_s):
            status, answer = post(url, "/v1/completions", body)
            answers.append(answer if status == 200 else b"")

    user = threading.Thread(target=ask)
    user.start()
    try:
        yield lambda: list(answers)
    finally:
        over.set()
        user.join()


def test_a_plan_is_served_watched_and_changed(profile: str, tcp_server: Server, tmp_path: Path) -> None:
    """The plan is made for short prompts, so only a few engines prefill. Then prompts arrive that are 30 times as
    long."""
    pools = tmp_path / "pools.toml"
    ports = free_ports(2)
    urls = [f"http://127.0.1{{}}.{number}:{port}" for number, port in enumerate(ports, 1)]
    planned = json.loads(
        kvstore(
            f"plan search --profile {profile} --nodes 2 --gpus-per-node 2 --rate 20 --input-tokens 64",
            "--output-tokens", "30", "--max-batch", "8", *SLO, "--seeds", "1", "--no-sensitivity", "--json",
            "--pools", str(pools), "--prefill-url", urls[0], "--decode-url", urls[1],
        )
    )  # fmt: skip
    instances = {phase: planned["placement"][phase]["instances"] for phase in ("prefill", "decode")}
    assert instances["prefill"] < instances["decode"], instances
    prompt = list(range(2000))
    with ExitStack() as stack:
        for url, count in zip(urls, instances.values(), strict=True):
            for number in range(count):
                engine = StandInEngine(tmp_path / "engine.log", url=url.format(number))
                stack.callback(engine.kill)
                engine.behave(cached=500)
        proxy = stack.enter_context(
            ProxyProcess(tmp_path, f"--store={tcp_server.endpoint}", f"--pools={pools}", "--policy=split")
        )

        def roles() -> dict[str, int]:
            return {phase: sum(each["healthy"] for each in proxy.status()["pools"][phase]) for phase in instances}

        wait_until(lambda: roles() == instances, what="the proxy has the engines of the plan")
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 10}
        with users(proxy.url, body, each_s=0.2) as answers:
            watching = f"plan watch --proxy {proxy.url} --profile {profile} --interval 1 --once --pools {pools}"
            said = kvstore(watching, *SLO)
            assert " req/s, 2000 to 10 tokens, 25% of prompts cached" in said
            assert f"now {instances['prefill']} prefill and {instances['decode']} decode engines serve " in said
            proposed = re.search(
                r"(\d+) prefill and (\d+) decode engines would serve .* req/s, (.*) x: kvstore (.*)", said
            )
            assert proposed is not None, said
            best = {phase: int(count) for phase, count in zip(instances, proposed.groups(), strict=False)}
            assert best["prefill"] > instances["prefill"] and float(proposed[3]) > 1.05
            command = proposed[4]
            assert command == f"plan roles {pools} --prefill {best['prefill']} --decode {best['decode']}"
            kvstore(command)
            wait_until(lambda: roles() == best, what="the engines have the roles that were proposed")
            since = len(answers())
            wait_until(lambda: len(answers()) > since + 2, what="users go on")
        texts = {json.loads(answer)["choices"][0]["text"] for answer in answers()}
        assert texts == {expected(prompt, 10)}, "no answer was lost or changed meanwhile"
