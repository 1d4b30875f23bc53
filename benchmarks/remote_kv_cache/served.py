"""Engines and proxies that serve HTTP in separate processes, as in production."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS
from benchmarks.remote_kv_cache.processes import child, end, environment, free_port

START_S: Final = 300.0


@contextmanager
def engine(model: Path, core: int, log: Path, store: str | None, *options: str) -> Iterator[str]:
    """Run `vllm serve` on one core, with these options. Yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--enforce-eager"]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "8192", "--gpu-memory-utilization", "0.3"]
    command += options
    if store is not None:
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_client.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"endpoint": store, "cpu_bytes": "512MiB", "always_load": True},
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**environment(), **settings},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the engine did not start; its log ends:\n{log.read_text(errors='replace')[-3000:]}"
                )
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.3)
        yield url
    finally:
        end(process)


@contextmanager
def proxy(store: str, prefill: Sequence[str], decode: Sequence[str], policy: str) -> Iterator[str]:
    """Run `kvstore proxy` in front of prefill and decode engines. Yield its URL."""
    command = [sys.executable, "-m", "kvstore_cli", "proxy", "--listen", "127.0.0.1:0", "--store", store]
    command += ["--policy", policy, "--access-log", ""]
    command += [word for url in prefill for word in ("--prefill", url)]
    command += [word for url in decode for word in ("--decode", url)]
    with child(command, "kvstore proxy listens ", "kvstore proxy") as url:
        yield url
