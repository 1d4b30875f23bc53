"""One vLLM engine in a process of its own: ``run`` is the whole life of that process.

The test holds the other end of a pipe. It first receives ``"ready"``. Then it sends orders, each with the name of a
public method of ``Serving`` and its arguments, and receives the method's result. None stops the engine. All output of
the engine goes to the log file.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore_client.engine import admission
from tests.engine import witness

SETTLE_S = 25.0
LABELS = ("tier", "direction", "side", "phase")  # of the connector's metrics
DECODED_TOKENS = 3  # from here on a request counts as decoding


@dataclass
class Ask:
    """One request of a `play`. ``at``: the number of the step before which it is added.

    abort: when the request is aborted: in a phase, after a number of seconds, or when a file appears. The phases are
    "waiting" (for the store's lookup, without blocks yet), "loading", "prefilling" and "decoding"; they need an engine
    in the driver's own process.
    """

    prompt: list[int]
    max_tokens: int = 8
    at: int = 0
    abort: str | float | Path | None = None
    options: dict[str, Any] | None = None  # the request's options for the connector
    side: str = ""  # the side of a hand-over: "do_remote_decode", "do_remote_prefill", or none
    more: dict[str, Any] | None = None  # other fields of vLLM's prompt: arrays, pictures, masks


@dataclass
class Answer:
    """An engine's output for one prompt.

    seconds: the time since the order in a ``generate``, or since the request was added in a ``play``. aborted: if true,
    the other fields are meaningless. keys: the keys of its full blocks, if the engine's core runs in the driver.
    step_s: the longest step of the ``play``.
    """

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    aborted: bool = False
    keys: list[bytes] = field(default_factory=list)
    params: dict[str, Any] | None = None  # for the next engine
    step_s: float = 0.0


def run(spec: dict[str, Any], log: Path, pipe: Connection) -> None:
    """Start an engine and execute orders until None arrives through the pipe. Fields of ``spec``: model (a path);
    connector (options, or None); kv_role; beside (name and configuration of each connector in a MultiConnector,
    "kvstore" for ours; empty: no MultiConnector); load_failure_policy (empty: vLLM's default); fork (see
    ``fork_processes``); environment; engine (arguments of ``vllm.LLM``)."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    witness.listen()
    os.environ.update(spec["environment"])
    try:
        serve(spec, pipe)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # skips the interpreter's own end, which takes seconds with all the imports


def serve(spec: dict[str, Any], pipe: Connection) -> None:
    if spec["fork"]:
        fork_processes()
    serving = Serving(make_engine(spec))
    pipe.send("ready")
    while (order := serving.next_order(pipe)) is not None:
        method, arguments = order
        pipe.send(getattr(serving, method)(*arguments))
    serving.llm.llm_engine.engine_core.shutdown()


class Serving:
    """The orders that a test can send to an engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._played = 0
        self._begun = ""  # the request of `begin`

    @property
    def _core(self) -> Any:
        """The engine's core, or None if it runs in a process of its own."""
        return getattr(self.llm.llm_engine.engine_core, "engine_core", None)

    def next_order(self, pipe: Connection) -> Any:
        """Wait for the next order, and meanwhile step until there is nothing to do, as a core in its own process does.
        So the blocks computed last are sent to the store between two requests. A request of `begin` continues only with
        `compute`."""
        while not pipe.poll() and self._busy() and not self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        return pipe.recv()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Answer all prompts at once, as ``vllm.LLM`` does."""
        started = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], sampling(max_tokens), use_tqdm=False
        )
        return [answer_of(output, time.monotonic() - started) for output in outputs]

    def play(self, asks: list[Ask]) -> list[Answer]:
        """Run requests step by step; some may arrive late, and some are aborted. Afterwards the engine steps until it
        has nothing to do."""
        engine = self.llm.llm_engine
        answers = [Answer() for _ in asks]
        begun: dict[int, tuple[str, float]] = {}  # the engine's own name of the request, and its start time
        left = set(range(len(asks)))
        step, step_s = 0, 0.0
        while left or self._busy():
            for number in left - begun.keys():
                if asks[number].at <= step:
                    name = self._add(asks[number], number)
                    begun[number] = name, time.monotonic()
                    if self._core is not None:
                        answers[number].keys = list(self._core.scheduler.requests[name].block_hashes)
            stepping = time.monotonic()
            # A core in its own process does not answer while it has no requests, so a step would wait for ever.
            outputs = engine.step() if self._core is not None or engine.has_unfinished_requests() else []
            step_s = max(step_s, time.monotonic() - stepping)
            for output in outputs:
                number = int(output.request_id.partition("/")[0])
                if output.finished and number in left:
                    keys = answers[number].keys
                    answers[number] = answer_of(output, time.monotonic() - begun[number][1])
                    answers[number].keys = keys
                    left.discard(number)
            step += 1
            for number in left & begun.keys():
                if self._due(asks[number].abort, *begun[number]):
                    engine.abort_request([begun[number][0]], internal=True)
                    answers[number].aborted = True
                    left.discard(number)
        for answer in answers:
            answer.step_s = step_s
        return answers

    def _add(self, ask: Ask, number: int) -> str:
        """Add a request, and return the engine's own name for it."""
        self._played += 1
        how = sampling(ask.max_tokens, ask.options, ask.side)
        prompt = {"prompt_token_ids": ask.prompt, **as_tensors(ask.more or {})}
        name: str = self.llm.llm_engine.add_request(f"{number}/{self._played}", prompt, how)
        return name

    def begin(self, ask: Ask) -> str:
        """Add a request whose prompt `compute` computes in parts. The next `play` ends it; it must come before the next
        `generate`."""
        self._begun = self._add(ask, -1)
        return self._begun

    def compute(self, tokens: int) -> int:
        """Step until at least this many prompt tokens of the request of `begin` are computed. Returns their number."""
        request = self._core.scheduler.requests[self._begun]
        while request.num_computed_tokens < tokens:
            self.llm.llm_engine.step()
        return int(request.num_computed_tokens)

    def _due(self, abort: str | float | Path | None, name: str, begun: float) -> bool:
        if isinstance(abort, Path):
            return abort.exists()
        if abort is None or isinstance(abort, float):
            return abort is not None and time.monotonic() - begun > abort
        request = self._core.scheduler.requests[name]
        phase = request.status.name
        if phase == "RUNNING" and request.num_computed_tokens < request.num_prompt_tokens:
            phase = "prefilling"
        elif phase == "RUNNING" and request.num_output_tokens >= DECODED_TOKENS:
            phase = "decoding"
        return {"WAITING": "waiting", "WAITING_FOR_REMOTE_KVS": "loading"}.get(phase, phase) == abort

    def _busy(self) -> bool:
        """Whether the core still has work, such as loads of aborted requests."""
        return self._core is not None and self._core.scheduler.has_requests()

    def deliver(self, blocks: int) -> int:
        """Cause a fault: from now on, every read from the store returns only this many of the requested blocks, as if
        the others had been evicted between lookup and read. A later call may only lower the number."""
        lose_blocks(blocks)
        return blocks

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        """Reset the engine's own cache. ``connector``: reset the connector too, as for new weights or for sleep.
        Returns whether the reset succeeded."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def reset(self, running: bool, connector: bool) -> bool:
        """Reset the engine's own cache with any of vLLM's flags. Returns whether the reset succeeded."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def nap(self, level: int) -> None:
        """Make the engine sleep at this level, and wake it up. On a CPU, vLLM resets its caches for a sleep and keeps
        the weights."""
        self.llm.sleep(level=level)
        self.llm.wake_up()

    def take_cache_away(self, away: bool) -> None:
        """Call the connector in all workers as vLLM 0.33 does before (``away``) and after a sleep."""
        self.llm.collective_rpc(tell_of_cache, args=(away,))

    def change_weights(self, seed: int) -> None:
        """Replace the weights in place in all workers, as a training step does. Seed 0 restores the initial weights."""
        self.llm.collective_rpc(train, args=(seed,))

    def change_rank(self, rank: int, back: bool = False) -> None:
        """Replace the weights in one worker only. back: restore the initial weights there."""
        self.llm.collective_rpc(change_one, args=(rank, back))

    def name_weights(self, name: str) -> None:
        """Give the weights this name in all workers."""
        self.llm.collective_rpc("kvstore_new_weights", args=(name,))

    def set_hope_s(self, seconds: float) -> None:
        """Set this engine's `HOPE_S`: how soon it retries a store that was too slow."""
        admission.HOPE_S = seconds

    def metrics(self) -> dict[str, float]:
        """Return the connector's metrics by "name" or "name/label value". They do not include events since the last
        step."""
        numbers = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvstore_"):
                label = next((metric.labels[name] for name in LABELS if name in metric.labels), None)
                name = metric.name.removeprefix("vllm:kvstore_")
                if hasattr(metric, "value"):
                    numbers[f"{name}/{label}" if label else name] = metric.value
                else:  # a histogram
                    numbers[f"{name}/count"], numbers[f"{name}/sum"] = metric.count, metric.sum
        return numbers

    def state(self) -> dict[str, float]:
        """Return the counts of everything in progress, for an engine whose core runs in this process. Its cache is free
        of requests when ``usage`` is 0."""
        scheduler = self._core.scheduler
        connector = ours(scheduler.connector)
        half = connector._scheduler
        state = dict(half.under_way) if half is not None else {"starting": 1}
        state["requests"] = len(scheduler.requests)
        state["usage"] = scheduler.kv_cache_manager.usage
        state["waiting_blocks"] = self.metrics()["waiting_blocks"]
        return state

    def tier_keys(self) -> list[bytes]:
        """Return the keys of the blocks in the connector's CPU tier."""
        index = ours(self._core.scheduler.connector)._scheduler.state.tier._index
        keys, size = index.keys_of(index.ready_slots()), index.key_bytes
        return [keys[at : at + size] for at in range(0, len(keys), size)]

    def settle(self) -> dict[str, float]:
        """Step until nothing is in progress, for at most ``SETTLE_S``. Returns ``state``."""
        end = time.monotonic() + SETTLE_S
        while any((state := self.state()).values()) and time.monotonic() < end:
            self.generate([[0]], 1)  # the connector's halves exchange messages only in steps
            time.sleep(0.01)
        return state


def as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert arrays, which a pipe can carry, to the tensors that vLLM expects."""
    import numpy as np
    import torch

    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()}


_STARTED_WITH: dict[str, Any] = {}  # the initial weights of this process's worker


def train(worker: Any, seed: int) -> None:
    """Runs in a worker, see `Serving.change_weights`. The same seed gives every engine the same weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, weights in worker.get_model().named_parameters():
        first = _STARTED_WITH.setdefault(name, weights.detach().clone())
        noise = torch.randn(first.shape, generator=generator) if seed else torch.zeros(first.shape)
        weights.data.copy_(first + 0.05 * noise.to(first.dtype))


def tell_of_cache(worker: Any, away: bool) -> None:
    """Runs in a worker, see `Serving.take_cache_away`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    (group.unregister_kv_caches if away else group.restore_kv_caches)()


def change_one(worker: Any, rank: int, back: bool) -> None:
    """Runs in a worker, see `Serving.change_rank`."""
    if worker.rank == rank:
        for name, weights in worker.get_model().named_parameters():
            first = _STARTED_WITH.setdefault(name, weights.detach().clone())
            weights.data.copy_(first if back else first * 1.5)


def ours(connector: Any) -> Any:
    """Return this project's connector: the engine's own, or one within a MultiConnector."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(child for child in children if type(child).__name__ == "KVStoreConnector")


def sampling(max_tokens: int, options: dict[str, Any] | None = None, side: str = "") -> Any:
    """Return the sampling parameters of a request. options: its options for the connector. side: its side of a
    hand-over."""
    from vllm import SamplingParams

    params = {**({} if options is None else {"kvstore": options}), **({side: True} if side else {})}
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)


_preempted: Counter[str] = Counter()  # by request, where vLLM does not report it in its outputs


def count_preemptions() -> None:
    """Count how often each request is preempted, if this is done in this process. Since 0.30, vLLM's outputs say it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    @functools.wraps(preempt)
    def counted(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        _preempted[request.request_id] += 1
        return preempt(self, request, *arguments, **named)

    Scheduler._preempt_request = counted


def preemptions_of(output: Any) -> int:
    reported: int | None = getattr(output.metrics, "num_preemptions", None)
    if reported is not None:
        return reported
    # The engine appends a random part to the request's name.
    return sum(count for name, count in _preempted.items() if name.rpartition("-")[0] == str(output.request_id))


def answer_of(output: Any, seconds: float) -> Answer:
    return Answer(
        list(output.outputs[0].token_ids),
        output.num_cached_tokens,
        preemptions_of(output),
        seconds,
        params=output.kv_transfer_params,
    )


def make_engine(spec: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.v1.metrics.stats import RequestStateStats

    if not hasattr(RequestStateStats, "num_preemptions"):
        count_preemptions()
    connector, arguments = None, dict(spec["engine"])
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
    if spec["connector"] is not None:
        mine = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_client.vllm.connector",
            "kv_role": spec["kv_role"],
            # Every page of this memory is touched in advance, so it is smaller than the default of 256 MiB.
            "kv_connector_extra_config": {"staging_bytes": 64 << 20, **spec["connector"]},
        }
        if spec["beside"]:
            others = [mine if name == "kvstore" else {"kv_connector": name, **more} for name, more in spec["beside"]]
            mine = {
                "kv_connector": "MultiConnector",
                "kv_role": spec["kv_role"],
                "kv_connector_extra_config": {"connectors": others},
            }
        if spec["load_failure_policy"]:
            mine["kv_load_failure_policy"] = spec["load_failure_policy"]
        connector = KVTransferConfig(**mine)
    return LLM(
        model=spec["model"],
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=connector,
        **{
            "skip_tokenizer_init": True,
            # With bfloat16's 8 bits two tokens are often equally likely, and which one wins depends on the rest of the
            # batch.
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2048,
            "gpu_memory_utilization": 0.3,  # on CPUs, the fraction of the host's memory
            "num_gpu_blocks_override": 1024,  # blocks of 128 KiB; every page is written at the start
            **arguments,
        },
    )


def lose_blocks(delivered: int) -> None:
    """See ``Serving.deliver``."""
    from kvstore_client import KVStoreClient

    get_into = KVStoreClient._get_into_steps

    def get_some(client: Any, keys: Any, out: Any, slots: Any, **how: Any) -> Any:
        hits = yield from get_into(client, keys, out, slots, **how)
        hits[delivered:] = False
        out[slots[delivered:]] = 0xFF
        return hits

    KVStoreClient._get_into_steps = get_some  # type: ignore[method-assign]


def fork_processes() -> None:
    """Start the engine's own processes as forks of this one. On CPUs, vLLM always starts new interpreters, each of
    which takes half a minute for its imports on a small machine."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")  # type: ignore[assignment]
