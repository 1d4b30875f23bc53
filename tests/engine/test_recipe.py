"""The recipe at the top of docs/disaggregation.md: its commands as written, on real engines.

MODEL is replaced by a tiny model and the ports by free ones. The store gets less memory, and the engines the options
that a CPU needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.engine.engines import BLOCK, nursery
from tests.engine.served import START_S, run_server, save_served_model
from tests.support import forked
from tests.support.documents import Block, blocks_of
from tests.support.harness import ROOT, STOP_S, environment, wait_until
from tests.support.ports import free_ports

PAGE = ROOT / "docs" / "disaggregation.md"
PORTS = ("7070", "8000", "8100", "8200")
FOR_A_CPU = [
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "2048"),
    *("--gpu-memory-utilization", "0.2", "--num-gpu-blocks-override", "1024"),
]
ON_A_CPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
}
MODULES = {"kvstore-server": "kvstore", "kvstore": "kvstore_cli"}


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a code block, in which each command follows a comment."""
    parts = re.split(r"^#.*\n", block.text, flags=re.MULTILINE)
    return [shlex.split(part) for part in parts if part.strip()]


class Terminals:
    """Runs commands that do not end by themselves, each as in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def start(self, name: str, command: list[str]) -> None:
        """Start a command. Its output goes to a file with this name."""
        settings = dict(word.split("=", 1) for word in command if re.match(r"[A-Z_]+=", word))
        program, *arguments = command[len(settings) :]
        if program == "vllm":
            serve, model, *options = arguments
            assert serve == "serve"
            words = ["--model", model, *options, *FOR_A_CPU]
            variables = {**os.environ, **ON_A_CPU, **settings}
            engine = nursery().Process(target=run_server, args=(words, self._file(name), variables))
            engine.start()
            pid = engine.pid
        else:
            with self._file(name).open("ab") as file, open(os.devnull, "rb") as nothing:
                pid = forked.start(
                    MODULES[program], arguments, stdin=nothing, stdout=file, stderr=file, env=environment(**settings)
                ).pid
        assert pid is not None
        self._stack.callback(end, pid)

    def await_line(self, name: str, words: str) -> str:
        """Wait for a line with these words in the output of a command, and return the line."""

        def found() -> str | None:
            lines = self._file(name).read_text(errors="replace").splitlines()
            return next((line for line in lines if words in line), None)

        return str(wait_until(found, START_S, f"{name} prints {words!r}"))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def close(self) -> None:
        self._stack.close()


def end(pid: int) -> None:
    """End a process with SIGTERM. If it or its descendants still run after ``STOP_S``, kill them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, STOP_S)
        for each in alive:
            each.kill()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


@pytest.mark.timeout(300)
def test_four_commands_hand_a_prompt_over_between_two_engines(terminals: Terminals, tmp_path: Path) -> None:
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    places = {f"{before}{port}": f"{before}{here}" for port, here in ports.items() for before in (":", "--port ")}
    places |= {"MODEL": str(save_served_model(tmp_path / "model")), "16GiB": "256MiB"}

    def here(block: Block) -> Block:
        text = block.text
        for said, meant in places.items():
            text = text.replace(said, meant)
        return replace(block, text=text)

    recipe, check = (here(block) for block in blocks_of(PAGE) if "tests/engine/test_recipe.py" in block.reason)
    store, prefill, decode, proxy = commands_of(recipe)
    for name, command in (("store", store), ("prefill", prefill), ("decode", decode), ("proxy", proxy)):
        terminals.start(name, command)
    for port in ("8100", "8200"):
        terminals.await_line("proxy", f"engine http://127.0.0.1:{ports[port]} takes requests")

    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", check.text],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = terminals.await_line("proxy", '"decision"')
    assert '"decision":"split"' in line and '"prefill_outcome":"ok"' in line
    answer, *lines = done.stdout.splitlines()
    usage = json.loads(answer)["usage"]
    assert usage["prompt_tokens"] > 1000 and usage["prompt_tokens_details"]["cached_tokens"] == 0
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if '"decode"' in line or '"store"' in line}
    assert values["vllm:kvstore_hand_overs_total"] == 1
    assert values["vllm:kvstore_hit_tokens_total"] >= usage["prompt_tokens"] - 1, "D computes the last token alone"
