"""Runs `vllm serve` in real processes, for the tests of the proxy and of `kvstore load`, and makes a model with a
tokenizer.

A server is forked from the engines' nursery, and its own processes are forked from the server. So a start takes 2 s of
processor time instead of 30 s. test_serving.py starts a server without forks, as users do.

The tokenizer has a token for each of the 256 bytes, and some words. Random weights generate both, so a character may
span several tokens, and some bytes are no valid text. This is the hardest case for code that joins pieces of an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.driver import fork_processes
from tests.engine.engines import BLOCK, nursery, save_model
from tests.support.harness import wait_until
from tests.support.ports import free_ports

START_S = 170.0
MODEL = "tiny"
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve MODEL` is this module with --model
_WORDS = 4096
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_served_model(folder: Path) -> Path:
    """Save the model of `save_model`, with a tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_model(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"Ġw{number}": number for number in range(len(letters), _WORDS - 1)}
    vocabulary["<end>"] = _WORDS - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=_TEMPLATE)
    made.save_pretrained(folder)
    return folder


def run_server(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run `vllm serve` in this process, with these arguments and this environment, until it ends. Its output is
    appended to the file `log`."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    fork_processes()
    sys.argv[1:] = arguments
    runpy.run_module(SERVER, run_name="__main__")


class ServedEngine:
    """One `vllm serve`. Its standard output and standard error go to the file `log`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        store: str | None,
        *arguments: str,
        max_model_len: int = 2048,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """store: the store's address; None: run without the connector. environment: further variables. options: the
        connector's options."""
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._transfer: dict[str, Any] = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_client.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": store, "cpu_bytes": "128MiB", "always_load": True, **options},
        }
        self._has_store = store is not None
        self._arguments = ["--model", str(model)]
        self._arguments += ["--served-model-name", MODEL, "--port", str(self.port), "--host", "127.0.0.1"]
        self._arguments += [
            "--enable-prompt-tokens-details",
            "--dtype",
            "float32",
            "--enforce-eager",
            "--block-size",
            str(BLOCK),
        ]
        self._arguments += ["--max-model-len", str(max_model_len), "--gpu-memory-utilization", "0.2"]
        # Every page of the cache is written to at the start.
        self._arguments += ["--num-gpu-blocks-override", "1024", *arguments]
        self._environment = {  # of every start
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.start()

    def start(self, **options: Any) -> None:
        """options: the connector's options from now on."""
        self._transfer["kv_connector_extra_config"] |= options
        transfer = ["--kv-transfer-config", json.dumps(self._transfer)] if self._has_store else []
        self.process = nursery().Process(
            target=run_server, args=([*self._arguments, *transfer], self.log, self._environment)
        )
        self.process.start()

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def await_health(self) -> None:
        def healthy() -> bool:
            if not self.running:
                pytest.fail(f"the engine ended; its log ends:\n{self.log.read_text(errors='replace')[-4000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
            except OSError:
                return False
            return True

        wait_until(healthy, START_S, f"{self.url} serves")

    def kill(self) -> None:
        """Send SIGKILL to the engine and all processes that it started."""
        if not self.running:
            return
        process = psutil.Process(self.pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.join(20)
        assert not self.running

    def stop(self) -> None:
        if self.running:
            self.process.terminate()
            self.process.join(30)
            if self.running:
                self.kill()

    def __enter__(self) -> ServedEngine:
        try:
            self.await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values, over all labels that are not given."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        given = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(each in line for each in given))


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """Send a request. Returns the status and the JSON of the answer."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
