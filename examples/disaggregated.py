"""Prefill and decode on engines of their own: a store, two vLLM servers and the proxy, and where a request's time went.

    python examples/disaggregated.py [--prompt-tokens 2048] [--model-size tiny|mid] [--json]

Starts a kvstore-server, two `vllm serve` processes, P and D, and `kvstore proxy` in front of them, all on this machine.
Sends prompts through the proxy: P computes each of them, D answers, and the KV blocks go from one to the other through
the store while P still computes. Prints the phases of the last request as the proxy and the engines tell them. The
model has random weights (nothing is downloaded). Exit status 1 if the answer is not that of one engine alone, or the
prompt was not handed over.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo import VOCABULARY, environment, make_model, parse_options, progress, start_server
from rich.console import Console
from rich.table import Table
from two_engines import ANSWER_TOKENS, EngineServer, complete

WARM_UPS = 2  # the first requests of an engine take longer
REQUESTS = 3
PHASES = {
    "decide": "the proxy chooses the engines",
    "prefill": "P computes the prompt; its token goes to the user",
    "handover": "D has the last blocks and its own first token",
    "decode": "D writes the rest of the answer",
}


def start_proxy(store: str, prefill: str, decode: str, log: Path) -> tuple[subprocess.Popen[str], str]:
    """-> the proxy and its address."""
    command = [sys.executable, "-m", "kvstore_cli", "proxy", "--listen", "127.0.0.1:0", "--store", store]
    command += ["--prefill", prefill, "--decode", decode, "--policy", "split", "--access-log", f"{log}.jsonl"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment())
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if words[:3] != ["kvstore", "proxy", "ready"]:
        raise SystemExit(f"the proxy did not start:\n{log.read_text(errors='replace')[-2000:]}")
    return process, words[3]


def stream(url: str, prompt: list[int]) -> dict[str, Any]:
    """The tokens of an answer, and when its first and its last one came."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, tokens = time.perf_counter(), 0.0, []
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
                    first = first or time.perf_counter() - began
    return {"token_ids": tokens, "first_token_s": first, "seconds": time.perf_counter() - began}


def sums(url: str, name: str, label: str) -> dict[str, float]:
    """A metric by the values of one of its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{name}{{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            found[value] = found.get(value, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def run(prompt_tokens: int, model_size: str) -> dict[str, Any]:
    with progress.status(f"making the {model_size} model …"):
        model = make_model(model_size)
    chooser = random.Random(7)
    prompts = [[chooser.randrange(VOCABULARY) for _ in range(prompt_tokens)] for _ in range(WARM_UPS + REQUESTS)]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        logs = Path(scratch)
        server, endpoint = start_server(logs / "server.log")
        stack.callback(server.wait)
        stack.callback(server.terminate)
        engines = []
        for name in ("P", "D"):
            # float32, because in bfloat16 two tokens are often as good as each other.
            longest = prompt_tokens + 2 * ANSWER_TOKENS
            engines.append(EngineServer(name, model, endpoint, longest, logs / f"{name}.log", "float32"))
            stack.callback(engines[-1].stop)
        with progress.status("two engines are starting …"):
            for engine in engines:
                engine.await_health()
        prefill, decode = engines
        proxy, url = start_proxy(endpoint, prefill.url, decode.url, logs / "proxy.log")
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        answers = []
        for number, prompt in enumerate(prompts):
            before = sums(url, "kvstore_proxy_phase_seconds_sum", "phase")
            answers.append(stream(url, prompt))
            after = sums(url, "kvstore_proxy_phase_seconds_sum", "phase")
            progress.print(f"request {number + 1}: first token after {answers[-1]['first_token_s']:.3f} s")
        alone, _ = complete(prefill.url, prompts[-1])
        record = json.loads((logs / "proxy.log.jsonl").read_text().splitlines()[-1])
        return {
            "decision": record["decision"],
            "prompt_tokens": prompt_tokens,
            "first_token_s": answers[-1]["first_token_s"],
            "seconds": answers[-1]["seconds"],
            "phases_s": {phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES},
            "hand_overs": sums(decode.url, "vllm:kvstore_hand_overs_total", "side").get("decode", 0.0),
            "token_ids_equal": answers[-1]["token_ids"] == alone["choices"][0]["token_ids"],
        }


def show(result: dict[str, Any]) -> None:
    table = Table("phase", "what happens", title=f"a prompt of {result['prompt_tokens']} tokens: {result['decision']}")
    table.add_column("seconds", justify="right")
    for phase, what in PHASES.items():
        table.add_row(phase, what, f"{result['phases_s'][phase]:.3f}")
    table.add_row("", "first token at the user", f"{result['first_token_s']:.3f}")
    table.add_row("", "the whole answer", f"{result['seconds']:.3f}")
    console = Console()
    console.print(table)
    console.print(f"tokens are those of one engine alone: {'yes' if result['token_ids_equal'] else 'NO'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser)
    result = run(options.prompt_tokens, options.model_size)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    handed_over = result["decision"] == "split" and result["hand_overs"] >= WARM_UPS + REQUESTS
    return 0 if result["token_ids_equal"] and handed_over else 1


if __name__ == "__main__":
    sys.exit(main())
