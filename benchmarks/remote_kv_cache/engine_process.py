"""One vLLM engine in its own process: `run` is the main function of that process.

The process first sends "ready" through the pipe. It answers each `Order` that it receives with a `Run`, and `Arrivals`
with a list of `Served`. It answers each `Doubt` with a list of numbers, and `Times` with how long calls took. None ends
the engine. The engine's output goes to its log. Times are measured in this process, around the engine's own call, so
that they do not include the pipe.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
import traceback
import zlib
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

# These are imported once, by the process from which engines are forked, because importing them takes seconds.
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
    """The settings of an engine. `connector`: the options of `KVStoreConnector` or, if `kv_connector` is among them,
    all arguments of a `KVTransferConfig`; None for an engine without one. `arguments`: the arguments of `vllm.LLM`.
    `timed`: whether the calls to the connector are timed. `cores`: the cores that it may use; all if empty."""

    model: Path
    connector: dict[str, Any] | None
    arguments: dict[str, Any]
    timed: bool = False
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Order:
    """Prompts sent to the engine at once, each to be continued by `output_tokens` at temperature 0. `tops`: the number
    of likeliest tokens whose log probabilities are returned for each place."""

    prompts: list[list[int]]
    output_tokens: int
    tops: int = 0


@dataclass(frozen=True)
class Arrival:
    """A prompt that arrives at a given time. `side`: the flag for a hand-over in its `kv_transfer_params`; none if
    empty. `endless`: it ends when all others have ended and `Arrivals.seconds` have passed, or after
    `output_tokens`."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    side: str = ""
    endless: bool = False


@dataclass(frozen=True)
class Arrivals:
    """Prompts that arrive while the engine works, from `begin` on, on the clock of `time.perf_counter`."""

    begin: float
    arrivals: list[Arrival]
    seconds: float = 0.0


@dataclass(frozen=True)
class Served:
    """The result of an `Arrival`, in the same order: its tokens, and when the engine returned each, in seconds after
    `Arrivals.begin`."""

    token_ids: list[int]
    token_s: list[float]
    cached_tokens: int


@dataclass(frozen=True)
class Doubt:
    """A request for the distance of each token of this continuation from the most likely token at its place, as the
    difference of their log probabilities."""

    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Times:
    """A request for the times of all calls to the connector since the last request, by the call's name. Each call has
    its seconds, and those for which its thread was ready to run but had no core."""


# The methods that a vLLM engine calls in its steps and between them.
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
# The methods that the connector calls within those to take a fingerprint of the weights.
TAKE: Final = "take"
HASH: Final = "value"


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one prompt. `tops`: for each place, the log probabilities of the likeliest tokens, if they
    were requested."""

    token_ids: list[int]
    cached_tokens: int
    first_token_s: float  # seconds since the prompt reached the engine
    tops: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The answers, in the order of the prompts. `begin`: the time at which the prompts were sent, on the clock of
    `time.perf_counter`, which all processes share. `seconds`: the time from then until the last answer."""

    begin: float
    seconds: float
    answers: list[Answer]


def run(setup: Setup, environment: dict[str, str], log: Path, pipe: Connection) -> None:
    """Serve until the end is requested. If it fails, the process ends with status 1."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    try:
        _serve(setup, pipe)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # skips the interpreter's own shutdown, which takes seconds after these imports


def _serve(setup: Setup, pipe: Connection) -> None:
    from tqdm import tqdm
    from vllm import SamplingParams

    tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which would outlive this process
    times = _time_calls() if setup.timed else {}
    engine = _make_engine(setup)
    pipe.send("ready")
    while (order := _next_order(engine.llm_engine, pipe)) is not None:
        if isinstance(order, Doubt):
            pipe.send(_gaps(engine, order))
            continue
        if isinstance(order, Times):
            pipe.send({name: list(taken) for name, taken in times.items()})
            for taken in times.values():
                taken.clear()
            continue
        if isinstance(order, Arrivals):
            pipe.send(_serve_arrivals(engine.llm_engine, order))
            continue
        sampling = SamplingParams(
            temperature=0,
            max_tokens=order.output_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=order.tops or None,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in order.prompts]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [
            Answer(
                list(output.outputs[0].token_ids),
                output.num_cached_tokens,
                output.metrics.first_token_latency,
                [
                    {token: found.logprob for token, found in place.items()}
                    for place in output.outputs[0].logprobs or ()
                ],
            )
            for output in outputs
        ]
        pipe.send(Run(begin, seconds, answers))
    engine.llm_engine.engine_core.shutdown()


def _next_order(engine: Any, pipe: Connection) -> Any:
    """Step until there is nothing to do, as an engine's core does in its own process, so that the last computed blocks
    are sent to the store between two requests."""
    while not pipe.poll() and _steps_alone(engine):
        engine.step()
    return pipe.recv()


def _steps_alone(engine: Any) -> bool:
    """Return whether an engine without requests continues to step."""
    return bool(engine.engine_core.engine_core.scheduler.has_requests())


def _time_calls() -> dict[str, list[tuple[float, float]]]:
    """Time the calls of all connectors made from now on. Return their times by name, see `Times`."""
    from kvstore_client.engine.paged.weights import Fingerprints, RunningFingerprint
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

    for kind, names in ((KVStoreConnector, TIMED), (Fingerprints, [TAKE]), (RunningFingerprint, [HASH])):
        for name in names:
            times[name] = []
            setattr(kind, name, timed(getattr(kind, name), times[name]))
    return times


def _waited_for_a_core() -> float:
    """Return the seconds for which the calling thread was ready to run but had no core; 0 if the kernel does not count
    them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def _serve_arrivals(engine: Any, order: Arrivals) -> list[Served]:
    from vllm import SamplingParams

    served = [Served([], [], 0) for _ in order.arrivals]
    coming = sorted(range(len(served)), key=lambda number: order.arrivals[number].at_s, reverse=True)
    names: dict[int, str] = {}
    left = {number for number, arrival in enumerate(order.arrivals) if not arrival.endless}
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - order.begin
        while coming and order.arrivals[coming[-1]].at_s <= now:
            number = coming.pop()
            arrival = order.arrivals[number]
            extra = {"kv_transfer_params": {arrival.side: True}} if arrival.side else None
            how = SamplingParams(
                temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True, detokenize=False, extra_args=extra
            )
            prompt = {"prompt_token_ids": arrival.prompt}
            names[number] = engine.add_request(f"{number}/{order.begin}", prompt, how)
        if not engine.has_unfinished_requests() and not _steps_alone(engine):
            time.sleep(max(0.0, min(0.001, order.arrivals[coming[-1]].at_s - now)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - order.begin
        for output in outputs:
            number = int(output.request_id.partition("/")[0])
            tokens = list(output.outputs[0].token_ids)
            times = served[number].token_s
            times += [now] * (len(tokens) - len(times))
            served[number] = Served(tokens, times, output.num_cached_tokens or 0)
            if output.finished:
                left.discard(number)
                names.pop(number)
        if not left and not coming and now > order.seconds and names:
            engine.abort_request(list(names.values()), internal=True)
            names.clear()
    return served


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
    if setup.connector is not None and "kv_connector" in setup.connector:
        connector = KVTransferConfig(**setup.connector)
    elif setup.connector is not None:
        options = dict(setup.connector)
        connector = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_client.vllm.connector",
            kv_role=options.pop("kv_role", "kv_both"),
            # Loading is measured even where computing would be faster.
            kv_connector_extra_config={"always_load": True, **options},
        )
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "disable_log_stats": False,  # the time to the first token is one of these statistics
        **setup.arguments,
    }
    engine = LLM(model=str(setup.model), kv_transfer_config=connector, **arguments)
    if arguments.get("load_format") == "dummy":
        engine.collective_rpc(_change_weights)
    return engine


def _change_weights(worker: Any) -> None:
    """Runs in a worker. The connector has already taken its fingerprint of the old weights, so it is given a new name
    for the weights."""
    widen_weights(worker.get_model())
    if (name_weights := getattr(worker, "kvstore_new_weights", None)) is not None:
        name_weights("wide")


def widen_weights(model: Any) -> None:
    """Replace the random weights that vLLM made (`load_format="dummy"`), the same way in every process. With vLLM's own
    weights, which are at most 0.001 (even those of norms), the answer depends only on the last token and would not show
    a wrong cache. The spread of queries and keys lets a token attend to few others. It is not wider, because each layer
    amplifies rounding differences. Logits have a spread that distinguishes tokens.
    """
    import torch

    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim < 2:
                weights.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            wide = 1.75 if "qkv" in name else 3.0 if "lm_head" in name else 1.0
            if "embed" not in name:
                wide /= math.sqrt(weights.shape[-1])
            seed = zlib.crc32(name.encode())
            weights.normal_(0.0, wide, generator=torch.Generator(weights.device).manual_seed(seed))
