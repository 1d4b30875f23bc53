"""Disaggregated prefill/decode beside one engine: what it gains, and where a request's time goes.

    python examples/disaggregated.py [--prompt-tokens 2048] [--model smollm2|mid|tiny] [--json] [--keep]

First one `vllm serve` answers a few long prompts alone, without a store. Then a kvstore-server, two `vllm serve`
processes, P and D, and `kvstore proxy` in front of them answer the same prompts: P computes each prompt, D answers, and
the KV blocks go from P to D through the store while P still computes. Each prompt comes while the answer to the one
before is still being written. One engine alone must then stop writing to compute the prompt; D goes on. All processes
share this machine, so the times to the first token say little here; the pauses between tokens show the gain. The exit
status is 1 if an answer differs from that of the single engine, or if a prompt was not handed over.

With --keep the store, P, D and the proxy go on running, for requests of your own, until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from demo import START_S, environment, parse_options, progress, start_server, waiting
from models import REAL, make_model, make_prompts, question_of, reader_of
from rich.console import Console
from rich.table import Table
from two_engines import ANSWER_TOKENS, EngineServer

WARM_UPS = 2  # the first requests of an engine take longer
REQUESTS = 3
STREAM_S = 300.0  # for one answer
LOOK_S = 0.5  # how often --keep looks whether all processes still run
PHASES = {
    "decide": "the proxy chooses the engines",
    "prefill": "P computes the prompt; its token goes to the user",
    "handover": "D has the last blocks and its own first token",
    "decode": "D writes the rest of the answer",
}


@dataclass(frozen=True)
class Fleet:
    """What --keep leaves running: a store, P, D and the proxy, whose address is `url`."""

    url: str
    store: str
    prefill: EngineServer
    decode: EngineServer
    server: subprocess.Popen[str]
    proxy: subprocess.Popen[str]

    @property
    def ended(self) -> str | None:
        """The name of a program that has ended; None if all run."""
        states = {
            "the store": self.server.poll() is not None,
            "P": self.prefill.ended,
            "D": self.decode.ended,
            "the proxy": self.proxy.poll() is not None,
        }
        return next((name for name, ended in states.items() if ended), None)


def start_proxy(store: str, prefill: str, decode: str, log: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the proxy. Return its process and its address."""
    command = [sys.executable, "-m", "kvstore_cli", "proxy", "--listen", "127.0.0.1:0", "--store", store]
    command += ["--prefill", prefill, "--decode", decode, "--policy", "split", "--access-log", f"{log}.jsonl"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment())
    assert process.stdout is not None
    words: list[str] = []
    while words[:3] != ["kvstore", "proxy", "ready"] and (line := process.stdout.readline()):
        words = line.split()
    if words[:3] != ["kvstore", "proxy", "ready"]:
        raise SystemExit(f"the proxy did not start:\n{log.read_text(errors='replace')[-2000:]}")
    return process, words[3]


def stream(url: str, prompt: list[int], began: threading.Event) -> dict[str, Any]:
    """Request a stream. Return the tokens of the answer, when the first and the last one came, and the longest pause
    between two. `began` is set at the first token."""
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
    start, times, tokens = time.perf_counter(), [], []
    try:
        with urllib.request.urlopen(request, timeout=STREAM_S) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if choice.get("token_ids"):
                            tokens += choice["token_ids"]
                            times.append(time.perf_counter() - start)
                            began.set()
    finally:
        began.set()
    return {
        "token_ids": tokens,
        "first_token_s": times[0],
        "longest_pause_s": max((later - early for early, later in pairwise(times)), default=0.0),
        "seconds": time.perf_counter() - start,
    }


def answers_of(name: str, url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Send the first prompts one after the other, to warm up; then each prompt as soon as the one before has its first
    token. Return the answers to the latter."""
    running, usual_s = [], None
    with waiting(name) as wait, ThreadPoolExecutor(REQUESTS) as threads:
        for number, prompt in enumerate(prompts[:WARM_UPS], 1):
            wait.now(f"{name}, warming up, {number} of {WARM_UPS}", usual_s)
            usual_s = stream(url, prompt, threading.Event())["seconds"]
        wait.now(f"{name}, {REQUESTS} requests", None if usual_s is None else REQUESTS * usual_s)
        for prompt in prompts[WARM_UPS:]:
            began = threading.Event()
            running.append(threads.submit(stream, url, prompt, began))
            began.wait(STREAM_S)
        found = [each.result() for each in running]
    for number, answer in enumerate(found, 1):
        progress.print(
            f"{name}, request {number}: first token after {answer['first_token_s']:.2f} s, longest pause "
            f"{answer['longest_pause_s']:.2f} s"
        )
    return found


def sums(url: str, name: str, label: str) -> dict[str, float]:
    """Return a metric's sums by the values of one of its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{name}{{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            found[value] = found.get(value, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def run_alone(model: Path, longest: int, prompts: list[list[int]], logs: Path, texts: bool) -> list[dict[str, Any]]:
    """Return the answers of one engine without a store."""
    engine = EngineServer("alone", model, "", longest, logs / "alone.log", "float32", texts)
    try:
        with waiting("step 1 of 3: one engine is starting", START_S):
            engine.await_health()
        return answers_of("one engine", engine.url, prompts)
    finally:
        with waiting("step 1 of 3: the engine is stopping"):
            engine.stop()


@contextmanager
def apart(model: Path, longest: int, logs: Path, texts: bool) -> Iterator[Fleet]:
    """Run a store, P, D and the proxy while the block runs."""
    with ExitStack() as stack:
        server, endpoint = start_server(logs / "server.log")
        stack.callback(server.wait)
        stack.callback(server.terminate)
        engines = []
        for name in ("P", "D"):
            engines.append(EngineServer(name, model, endpoint, longest, logs / f"{name}.log", "float32", texts))
            stack.callback(engines[-1].stop)
        progress.print("step 2 of 3: a store, a prefill engine (P) and a decode engine (D) are starting")
        with waiting("step 2 of 3: two engines are starting", 2 * START_S):
            for engine in engines:
                engine.await_health()
        prefill, decode = engines
        proxy, url = start_proxy(endpoint, prefill.url, decode.url, logs / "proxy.log")
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        try:
            yield Fleet(url, endpoint, prefill, decode, server, proxy)
        finally:
            with waiting("the proxy, both engines and the store are stopping"):
                stack.close()


@contextmanager
def run(prompt_tokens: int, model_name: str) -> Iterator[tuple[dict[str, Any], Fleet]]:
    """Yield the results, and what still runs until the block ends."""
    progress.print(f"one engine, then prefill and decode engines, with the model {model_name}: about five minutes")
    with waiting(f"preparing the model {model_name} and the prompts, a minute longer the first time"):
        model = make_model(model_name)
        prompts = make_prompts(model_name, model, WARM_UPS + REQUESTS, prompt_tokens)
    texts = model_name == REAL
    if texts:
        progress.print(f"the prompts: {prompt_tokens} tokens each, such as {question_of(7)}")
    # float32, because in bfloat16 two tokens often have equal logits.
    longest = prompt_tokens + 2 * ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        progress.print("step 1 of 3: one engine alone, without a store")
        alone = run_alone(model, longest, prompts, logs, texts)
        with apart(model, longest, logs, texts) as fleet:
            progress.print("step 3 of 3: the same prompts through the proxy")
            answers = answers_of("P and D", fleet.url, prompts)
            records = [json.loads(line) for line in (logs / "proxy.log.jsonl").read_text().splitlines()]
            phases = sums(fleet.url, "kvstore_proxy_phase_seconds_sum", "phase")
            counts = sums(fleet.url, "kvstore_proxy_phase_seconds_count", "phase")
            [failed_loads] = sums(fleet.decode.url, "vllm:kvstore_failed_loads_total", "engine").values()
            hand_overs = sums(fleet.decode.url, "vllm:kvstore_hand_overs_total", "side")
            result = {
                "model": model_name,
                "decision": records[-1]["decision"],
                "prompt_tokens": prompt_tokens,
                "alone": alone,
                "apart": answers,
                "answer": reader_of(model_name, model)(answers[0]["token_ids"]),
                "phases_s": {phase: phases.get(phase, 0.0) / (counts.get(phase) or 1.0) for phase in PHASES},
                "hand_overs": hand_overs.get("decode", 0.0),
                "failed_loads": failed_loads,
                "token_ids_equal": [each["token_ids"] for each in answers] == [each["token_ids"] for each in alone],
            }
            yield result, fleet


def keep(fleet: Fleet, texts: bool) -> None:
    """Print how to use what runs, and return once one of the programs has ended. Ctrl-C and SIGTERM raise an error."""
    progress.print(
        f"""
These go on running, with logs in {fleet.prefill.log.parent} (deleted at the end):
  proxy        {fleet.url}/  (its page for a browser)
  P, prefills  {fleet.prefill.url}
  D, decodes   {fleet.decode.url}
  store        {fleet.store}
Send requests of your own:""",
        highlight=False,
    )
    prompt = '"Go on: one, two, three,"' if texts else "[1, 2, 3]"
    example = f'{{"model": "demo", "max_tokens": 16, "prompt": {prompt}}}'
    json_type = "-H 'Content-Type: application/json'"
    for line in (
        f"  curl -s {fleet.url}/v1/completions {json_type} -d '{example}'",
        f'  make run ARGS="kvstore info --endpoint {fleet.store}"',
        f"Ctrl-C ends all of it, and so does: kill {os.getpid()}",
    ):
        progress.print(line, highlight=False, markup=False)
    while fleet.ended is None:
        time.sleep(LOOK_S)
    raise SystemExit(f"{fleet.ended} has ended")


def show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table("", title=f"{REQUESTS} prompts of {result['prompt_tokens']} tokens, model {result['model']}")
    table.add_column("one engine", justify="right")
    table.add_column("P and D", justify="right")
    for title, field in (
        ("first token, s", "first_token_s"),
        ("longest pause between tokens, s", "longest_pause_s"),
        ("whole answer, s", "seconds"),
    ):
        table.add_row(
            title, *(f"{statistics.median(each[field] for each in result[way]):.2f}" for way in ("alone", "apart"))
        )
    console.print(table)
    pause = {way: max(each["longest_pause_s"] for each in result[way]) for way in ("alone", "apart")}
    console.print(
        "Medians. While a prompt is computed, an answer of one engine pauses for up to "
        f"{pause['alone']:.2f} s, one of D for up to {pause['apart']:.2f} s. P, D and the store share this machine: "
        "with a GPU each, they also compute at the same time."
    )
    phases = Table("phase of P and D", "what happens", title="Mean time of a request")
    phases.add_column("seconds", justify="right")
    for phase, what in PHASES.items():
        phases.add_row(phase, what, f"{result['phases_s'][phase]:.3f}")
    console.print(phases)
    console.print(f"{result['hand_overs']:.0f} of {WARM_UPS + REQUESTS} prompts were handed over.")
    if result["failed_loads"]:
        console.print(
            f"For {result['failed_loads']:.0f} of them blocks were late or missing, so D computed these tokens itself."
        )
    console.print(
        f"The answers are those of the one engine: {'yes' if result['token_ids_equal'] else 'NO'}. The first:"
    )
    console.print(f"  {result['answer']}", markup=False, highlight=False)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the store, P, D and the proxy running until Ctrl-C")
    options = parse_options(parser, model=REAL)
    signal.signal(signal.SIGTERM, interrupt)
    status = 130
    try:
        with run(options.prompt_tokens, options.model) as (result, fleet):
            if options.json:
                print(json.dumps(result), flush=True)
            else:
                show(result)
            handed_over = result["decision"] == "split" and result["hand_overs"] >= WARM_UPS + REQUESTS
            status = 0 if result["token_ids_equal"] and handed_over else 1
            if options.keep:
                keep(fleet, options.model == REAL)
    except KeyboardInterrupt:
        progress.print("stopped")
    return status


if __name__ == "__main__":
    sys.exit(main())
