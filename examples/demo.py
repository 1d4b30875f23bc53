"""Two vLLM engines, one after the other, share a prompt's KV cache through a kvstore server.

    python examples/demo.py [--prompt-tokens 7800] [--model smollm2|mid|tiny] [--json]

The first engine finds an empty store, computes a long document with a question about it, and fills the store. Then it
is stopped. A second engine, a new process with nothing cached, gets the same prompt and loads it. The time to the first
token comes from the engine's own request metrics. A short unrelated prompt warms each engine up first, so neither
engine's start counts. Both engines must give the same tokens. The model computes in float32. In bfloat16 an engine may
give other tokens for a cached prompt than for a computed one, even with its own cache, because it adds the same numbers
in another order. The exit status is 1 if the tokens differ, or if the second engine loaded nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models import NAMES, REAL, make_model, make_prompts, question_of, reader_of
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TOKENS = 32  # the CPU attention backend takes multiples of 32
OUTPUT_TOKENS = 48
WARM_UP_TOKENS = 200
WARM_UP_SEEDS = (1, 2)  # of other pages than the prompt's; each engine's warm-up must not be in the store either
PROMPT_SEED = 5

SAY_S = 10.0  # a pipe gets a line this often
START_S = 40.0  # an engine's start on two cores, about

progress = Console(stderr=True, soft_wrap=True)


class Waiting:
    """Says what the program waits for, and for how long already: on a terminal once a second, in a pipe every `SAY_S`
    seconds."""

    def __init__(self, doing: str, usual_s: float | None) -> None:
        self.now(doing, usual_s)

    def now(self, doing: str, usual_s: float | None = None) -> None:
        """Set what the program waits for from now on. `usual_s`: how long this usually takes, in seconds; None if not
        known."""
        self._now = doing, usual_s, time.monotonic()

    def __str__(self) -> str:
        doing, usual_s, began = self._now
        usually = "" if usual_s is None else f", usually about {usual_s:.0f} s"
        return f"{doing} … {time.monotonic() - began:.0f} s{usually}"


@contextmanager
def waiting(doing: str, usual_s: float | None = None) -> Iterator[Waiting]:
    """Say what the body waits for, as described for `Waiting`, which is yielded."""
    ended, found = threading.Event(), Waiting(doing, usual_s)
    with progress.status(str(found)) as status:
        say = status.update if progress.is_terminal else progress.print
        pause_s = 1.0 if progress.is_terminal else SAY_S

        def repeat() -> None:
            while not ended.wait(pause_s):
                say(str(found))

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()


def require_engine() -> None:
    """Exit with one line if a package that the engines need is not installed."""
    missing = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{Path(sys.argv[0]).name} runs vLLM, and {', '.join(missing)} cannot be imported. Install vLLM "
            "(pip install 'llm-kvstore[vllm]'), or run `make demo` in a checkout, which installs vLLM for the CPU"
        )


# ---- the engine's process ------------------------------------------------------------------------------------


def engine_main(spec: dict[str, Any]) -> None:
    """Serve each prompt of the spec in turn and print one line of JSON for it. All other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        block_size=BLOCK_TOKENS,
        max_model_len=spec["max_model_len"],
        gpu_memory_utilization=0.3,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"endpoint": spec["endpoint"]},
        ),
    )
    print(json.dumps("ready"), file=answers, flush=True)
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=spec["random"], detokenize=False)
    for prompt in spec["prompts"]:
        [output] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = {
            "ttft_s": output.metrics.first_token_latency,
            "cached_tokens": output.num_cached_tokens,
            "token_ids": list(output.outputs[0].token_ids),
        }
        print(json.dumps(answer), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()  # also sends blocks that are not in the store yet


# ---- the demo ------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    return {**settings, **os.environ, "PYTHONPATH": path}


def start_server(log: Path) -> tuple[subprocess.Popen[str], str]:
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "--port", "0", "--memory", "2GiB"],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment(),
        )
    assert server.stdout is not None
    ready = re.match(r"kvstore-server ready (tcp://\S+)", server.stdout.readline())
    if ready is None:
        server.kill()
        raise SystemExit(f"kvstore-server did not start:\n{log.read_text()[-2000:]}")
    return server, ready.group(1)


def run_engine(name: str, spec: dict[str, Any], log: Path, usual_s: float | None = None) -> dict[str, Any]:
    """Start an engine, warm it up, send it the prompt and stop it. Return its answer to the prompt. `usual_s`: about
    how long the prompt takes, if that is known."""
    steps = {"starting": START_S, "warming up": None, f"prompt of {len(spec['prompts'][1])} tokens": usual_s}
    answer: Any = None
    command = [sys.executable, __file__, "--engine", json.dumps(spec)]
    with (
        log.open("wb") as file,
        waiting(f"{name}: starting", START_S) as wait,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment()) as engine,
    ):
        assert engine.stdout is not None
        for step, step_s in steps.items():
            progress.print(f"{name}: {step} …")
            wait.now(f"{name}: {step}", step_s)
            line = engine.stdout.readline()
            if not line:
                raise SystemExit(f"{name} failed while {step}; its log ends:\n{log.read_text()[-4000:]}")
            answer = json.loads(line)
        wait.now(f"{name}: stopping")
    progress.print(f"{name}: first token after {answer['ttft_s']:.2f} s, {answer['cached_tokens']} tokens cached")
    return dict(answer)


def run_demo(prompt_tokens: int, model_name: str) -> dict[str, Any]:
    progress.print(f"two engines, one after the other, with the model {model_name}: about four minutes on two cores")
    with waiting(f"preparing the model {model_name} and the prompts, a minute longer the first time"):
        model = make_model(model_name)
        warm_up, other = (make_prompts(model_name, model, 1, WARM_UP_TOKENS, seed)[0] for seed in WARM_UP_SEEDS)
        [prompt] = make_prompts(model_name, model, 1, prompt_tokens, PROMPT_SEED)
    if model_name == REAL:
        progress.print(f"the prompt: {len(prompt)} tokens of {question_of(PROMPT_SEED)}")
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        server, endpoint = start_server(logs / "server.log")
        progress.print(f"kvstore-server is ready at {endpoint}")
        try:
            spec = {
                "model": str(model),
                "endpoint": endpoint,
                "random": model_name != REAL,
                "prompts": [warm_up, prompt],
                "max_model_len": max(prompt_tokens, WARM_UP_TOKENS) + 2 * OUTPUT_TOKENS,
            }
            first = run_engine("first engine, empty store", spec, logs / "first.log")
            spec["prompts"] = [other, prompt]
            second = run_engine("second engine, after the restart", spec, logs / "second.log")
        finally:
            server.terminate()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
    read = reader_of(model_name, model)
    return {
        "model": model_name,
        "prompt_tokens": len(prompt),
        "answer": read(second["token_ids"]),
        "without_cache": first,
        "remote_cache": second,
        "ratio": first["ttft_s"] / second["ttft_s"],
        "token_ids_equal": first["token_ids"] == second["token_ids"],
    }


def show(result: dict[str, Any]) -> None:
    table = Table("engine", title=f"{result['prompt_tokens']} prompt tokens, model {result['model']}")
    table.add_column("first token", justify="right")
    table.add_column("cached tokens", justify="right")
    rows = {"first, store empty": "without_cache", "second, restarted": "remote_cache"}
    for name, key in rows.items():
        run = result[key]
        table.add_row(name, f"{run['ttft_s']:.3f} s", str(run["cached_tokens"]))
    console = Console()
    console.print(table)
    same = "the same answer" if result["token_ids_equal"] else "[red]DIFFERENT answers[/red]"
    console.print(f"{result['ratio']:.1f} times faster to the first token; {same}:")
    console.print(f"  {result['answer']}", markup=False, highlight=False)
    console.print(
        "Both engines were warmed up with another prompt, so their start is not counted. The first one's time "
        "includes saving to the store. One request at a time, server on this machine, loopback TCP."
    )


def parse_options(
    parser: argparse.ArgumentParser, prompt_tokens: int = 2048, model: str = "tiny", models: list[str] = NAMES
) -> argparse.Namespace:
    """Add the options that these examples share to those of `parser`, and parse all. Ends the program if an option
    cannot be used."""
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens, help=f"default: {prompt_tokens}")
    parser.add_argument("--model", choices=models, default=model, help=f"default: {model}")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout, nothing else there")
    options = parser.parse_args()
    if options.prompt_tokens <= BLOCK_TOKENS:
        parser.error(
            f"--prompt-tokens is {options.prompt_tokens}: a prompt must be longer than one block, {BLOCK_TOKENS}"
        )
    require_engine()
    return options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parse_options(parser, prompt_tokens=7800, model=REAL)
    if options.engine:
        engine_main(json.loads(options.engine))
        return 0
    result = run_demo(options.prompt_tokens, options.model)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["token_ids_equal"] and result["remote_cache"]["cached_tokens"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
