"""One vLLM engine in a process of its own: `run` is the main function of that process.

The process first sends "ready" through the pipe. For each `Order` that it receives it sends a `Run`, for each `Doubt` a
list of numbers, for `Times` how long calls took; None ends the engine. Its output goes to its log. Time is taken in
this process, around the engine's own call, so that the pipe is not timed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

# Imported once, by the process that engines are forked from: seconds that each engine would take.
PRELOAD: Final = [
    "transformers",
    "vllm",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
]


@dataclass(frozen=True)
class Setup:
    """The settings of an engine. `connector`: its options, None for an engine without it. `arguments`: those of
    `vllm.LLM`. `timed`: whether the calls to the connector are timed."""

    model: Path
    connector: dict[str, Any] | None
    arguments: dict[str, Any]
    timed: bool = False


@dataclass(frozen=True)
class Order:
    """Prompts given to the engine at once, each to be continued by `output_tokens` at temperature 0."""

    prompts: list[list[int]]
    output_tokens: int


@dataclass(frozen=True)
class Doubt:
    """Asks how far each token of this continuation is from the token that the engine considers most likely there, as
    the difference of their log probabilities."""

    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Times:
    """Asks how long each call to the connector took since it was asked last, by the call's name: the seconds, and for
    how many of them the thread could run but had no core."""


# What a vLLM engine calls in its steps and between them.
TIMED: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one prompt."""

    token_ids: list[int]
    cached_tokens: int
    first_token_s: float  # since the prompt reached the engine


@dataclass(frozen=True)
class Run:
    """The answers, in the order of the prompts. `begin`: on the clock of `time.perf_counter`, which all processes
    share. `seconds`: from then until the last answer."""

    begin: float
    seconds: float
    answers: list[Answer]


def run(setup: Setup, environment: dict[str, str], log: Path, pipe: Connection) -> None:
    """Serve until told to end, or until it fails; then the process ends with status 1."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        _serve(setup, pipe)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # past the interpreter's own end, which takes it seconds with all that is imported


def _serve(setup: Setup, pipe: Connection) -> None:
    from tqdm import tqdm
    from vllm import SamplingParams

    tqdm.set_lock(threading.RLock())  # its own is a semaphore that outlives a process which ends as this one does
    times = _time_calls() if setup.timed else {}
    engine = _make_engine(setup)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if isinstance(order, Doubt):
            pipe.send(_gaps(engine, order))
            continue
        if isinstance(order, Times):
            pipe.send({name: list(taken) for name, taken in times.items()})
            for taken in times.values():
                taken.clear()
            continue
        sampling = SamplingParams(temperature=0, max_tokens=order.output_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in order.prompts]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [
            Answer(list(output.outputs[0].token_ids), output.num_cached_tokens, output.metrics.first_token_latency)
            for output in outputs
        ]
        pipe.send(Run(begin, seconds, answers))
    engine.llm_engine.engine_core.shutdown()


def _time_calls() -> dict[str, list[tuple[float, float]]]:
    """Have the calls of connectors that are made from now on timed. -> how long they took, by name: see `Times`."""
    from kvstore_client.vllm.connector import KVStoreConnector

    times: dict[str, list[tuple[float, float]]] = {}

    def timed(call: Any, taken: list[tuple[float, float]]) -> Any:
        @functools.wraps(call)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            waited = _waited_for_a_core()
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                seconds = time.perf_counter() - began
                taken.append((seconds, min(seconds, _waited_for_a_core() - waited)))

        return wrapper

    for name in TIMED:
        times[name] = []
        setattr(KVStoreConnector, name, timed(getattr(KVStoreConnector, name), times[name]))
    return times


def _waited_for_a_core() -> float:
    """For how many seconds the calling thread could run but had no core; 0 where the kernel does not count that."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def _gaps(engine: Any, doubt: Doubt) -> list[float]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    [output] = engine.generate([{"prompt_token_ids": doubt.prompt + doubt.continuation}], sampling, use_tqdm=False)
    gaps = []
    for token, found in zip(doubt.continuation, output.prompt_logprobs[len(doubt.prompt) :], strict=True):
        gaps.append(max(candidate.logprob for candidate in found.values()) - found[token].logprob)
    return gaps


def _make_engine(setup: Setup) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = None
    if setup.connector is not None:
        options = dict(setup.connector)
        connector = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role=options.pop("kv_role", "kv_both"),
            # What loading takes is measured, also where computing is sooner.
            kv_connector_extra_config={"always_load": True, **options},
        )
    return LLM(
        model=str(setup.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=False,  # the time to the first token is one of them
        kv_transfer_config=connector,
        **setup.arguments,
    )
