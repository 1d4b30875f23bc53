"""Measures the time to the first token in the real vLLM with an 8B model's shapes, for prompts that are computed or
come from the store.

* *restart*: prompts of 8k to 128k tokens. They are computed by an engine without the store, and by one that fills the
  store. After a restart, they are loaded from the store by engines without and with a CPU tier, and then from that
  tier.
* *two engines*: two engines on one store get different prompts at the same time, then each gets the other's.
* *offloading tier*: vLLM's own offloading with `KVStoreTier` behind it. Prompts fill the tiers, and are loaded from the
  store after a restart.
* *graphs*: an engine with CUDA graphs and vLLM's compiler. Prompts are computed, or loaded from a store that an engine
  without graphs filled.

Answers must equal those of an engine without the store. The weights are random (`load_format="dummy"`), with a wider
spread than vLLM's, so that an answer depends on the whole prompt: two prompts with the same end must have different
answers. First, a small model is used to find out how vLLM runs on this machine. Without a GPU, a tiny model and short
prompts are used, and only the parts that a CPU can run. Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.gpu.vllm_engines import GPU, SMALL, Machine, OutOfTimeError, find_way
from benchmarks.remote_kv_cache.copies import no_cuda
from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import (
    BLOCK_TOKENS,
    cacheable_tokens,
    full_blocks,
)
from benchmarks.remote_kv_cache.engines import Engine, Store
from benchmarks.remote_kv_cache.first_token import (
    COMPUTED,
    CPU_TIER,
    FILLED,
    OUTPUT_TOKENS,
    STORE,
    Asking,
)
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server

RESTART: Final = "restart"
TWO_ENGINES: Final = "two engines"
GRAPHS: Final = "graphs"
TIER: Final = "offloading tier"
PARTS: Final = (RESTART, TWO_ENGINES, TIER, GRAPHS)

STORE_BESIDE_TIER: Final = "from the store, with a CPU tier"
AT_ONCE_FILLED: Final = "computed and filled in, two engines at once"
AT_ONCE_STORE: Final = "from the store, two engines at once"
GRAPHS_COMPUTED: Final = "computed, CUDA graphs"
GRAPHS_STORE: Final = "from the store, CUDA graphs"
TIER_FILLED: Final = "computed and filled in, offloading tier"
TIER_STORE: Final = "from the store, offloading tier, after a restart"

_CONTROL_TOKENS: Final = 64  # the common end of prompts that differ otherwise
_SPARE_BYTES: Final = 256 << 20
_STORED_S: Final = 20.0  # the deadline for storing, after the answer


GRAPH_WAYS: Final[dict[str, dict[str, Any]]] = {
    "with vLLM's compiler": {"enforce_eager": False},
    "without vLLM's compiler": {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
}


def store_options(endpoint: str) -> dict[str, Any]:
    """Return the options of the connector and the tier. Deadlines are long, so that a prompt of 128k tokens is not cut
    off."""
    return {"endpoint": endpoint, "timeout_s": 60.0, "lookup_timeout_s": 10.0}


def check_control(machine: Machine, plain: Engine) -> None:
    """Check that prompts with the same end have different answers; otherwise equal answers would prove nothing. Several
    prompts are used, because two may have the same answer by chance."""
    tokens = min(machine.sizes.rounds)
    prompts = [machine.prompt(tokens), *(machine.prompt(tokens, seed=seed) for seed in range(9, 13))]
    for other in prompts[1:]:
        other[-_CONTROL_TOKENS:] = prompts[0][-_CONTROL_TOKENS:]
    answers = {tuple(plain.generate([prompt], OUTPUT_TOKENS).answers[0].token_ids) for prompt in prompts}
    machine.checks.that(len(answers) > 1, f"prompts with the same end all have the answer {answers}")


def fill(machine: Machine, store: Store, asking: Asking, name: str, engine: Engine, prompt: list[int]) -> float | None:
    """Return the seconds from the engine's request until the store has all blocks; None if the store does not get
    them."""
    before = store.settle()
    run = asking.ask(name, engine, prompt)
    stored = wait_stored(machine, store, before + full_blocks(len(prompt)), f"{name}, {len(prompt)} tokens")
    return None if stored is None else stored - run.begin


def wait_stored(machine: Machine, store: Store, blocks: int, what: str) -> float | None:
    """Wait until the store has this number of blocks and gets no more. Return the time at which it had them, on the
    clock of `time.perf_counter`. Return None if it does not get them in time: this counts as a wrong result, but the
    rest is still measured."""
    stored = None
    try:
        stored = store.wait_created(blocks, _STORED_S)
    except RuntimeError as error:
        machine.checks.that(False, f"{what}: {error} (counting those of earlier prompts)")
    store.settle()
    return stored


def measure_restart(machine: Machine) -> None:
    """The part *restart*."""
    sizes = machine.sizes
    longest = max(sizes.rounds)
    total = sum(sizes.rounds) * sizes.model.token_bytes
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(total, sizes.shards, _SPARE_BYTES))
        store = stack.enter_context(Store(endpoint))
        plain = stack.enter_context(machine.engine(None, longest))
        machine.warm_up(plain)
        check_control(machine, plain)
        machine.say("the engine without the store is ready")
        asking = {tokens: machine.asking(store, plain) for tokens in sizes.rounds}
        said: dict[int, dict[str, Any]] = {}
        with machine.engine({**store_options(endpoint), "cpu_bytes": 0}, longest) as filler:
            machine.warm_up(filler, seed=-2)
            for tokens, each in asking.items():
                each.ask(COMPUTED, plain, machine.prompt(tokens))
                stored = fill(machine, store, each, FILLED, filler, machine.prompt(tokens))
                said[tokens] = {"stored_s": stored}
                machine.case(RESTART, tokens, each, **said[tokens])
        with machine.engine({**store_options(endpoint), "cpu_bytes": 0}, longest) as reader:
            machine.warm_up(reader, seed=-3)
            for tokens, each in asking.items():
                for number in range(sizes.rounds[tokens]):
                    _load(each, STORE, reader, machine.prompt(tokens))
                    if number:
                        machine.needs(2 * each.seconds[COMPUTED][0])
                        each.ask(COMPUTED, plain, machine.prompt(tokens))
                machine.case(RESTART, tokens, each, **said[tokens])
        machine.needs(60)
        cpu_bytes = 9 * longest * sizes.model.token_bytes // 4  # a load uses at most half of the tier
        with machine.engine({**store_options(endpoint), "cpu_bytes": cpu_bytes}, longest) as reader:
            machine.warm_up(reader, seed=-4)
            for tokens, each in asking.items():
                _load(each, STORE_BESIDE_TIER, reader, machine.prompt(tokens))
                for _ in range(sizes.rounds[tokens]):
                    each.ask(CPU_TIER, reader, machine.prompt(tokens), cacheable_tokens(tokens))
                machine.case(RESTART, tokens, each, **said[tokens], cpu_bytes=cpu_bytes)


def _load(asking: Asking, name: str, engine: Engine, prompt: list[int]) -> None:
    cached = cacheable_tokens(len(prompt))
    asking.ask(name, engine, prompt, cached, cached // BLOCK_TOKENS)


@contextmanager
def short_prompts(machine: Machine) -> Iterator[tuple[str, Store, Engine]]:
    """Yield a server with room for the prompts of all parts with short prompts, a watch on this server, and an engine
    without a store."""
    sizes = machine.sizes
    total = 6 * sum(sizes.short) * sizes.model.token_bytes
    with (
        kvstore_server(total, sizes.shards, _SPARE_BYTES) as endpoint,
        Store(endpoint) as store,
        machine.engine(None, max(sizes.short)) as plain,
    ):
        machine.warm_up(plain)
        check_control(machine, plain)
        yield endpoint, store, plain


def measure_two_engines(machine: Machine, endpoint: str, store: Store, plain: Engine) -> None:
    """The part *two engines*. The other parts load the prompts of its first engine."""
    longest = max(machine.sizes.short)
    connector = {**store_options(endpoint), "cpu_bytes": 0}
    with machine.engine(connector, longest) as one, machine.engine(connector, longest) as other:
        machine.warm_up(one, other, seed=-2)
        store.settle()
        for tokens in machine.sizes.short:
            prompts = [machine.prompt(tokens), machine.prompt(tokens, seed=1)]
            both = [machine.asking(store, plain) for _ in prompts]
            for asking, prompt in zip(both, prompts, strict=True):
                asking.ask(COMPUTED, plain, prompt)
            before = store.settle()
            filled = _at_once((one, other), prompts, machine.tops)
            wait_stored(machine, store, before + 2 * full_blocks(tokens), f"two engines, {tokens} tokens")
            loaded = _at_once((other, one), prompts, machine.tops)
            cached = cacheable_tokens(tokens)
            for name, runs, expected in ((AT_ONCE_FILLED, filled, 0), (AT_ONCE_STORE, loaded, cached)):
                for asking, prompt, run in zip(both, prompts, runs, strict=True):
                    asking.check(name, prompt, run, expected)
            for name, seconds in both[1].seconds.items():
                both[0].seconds[name] += seconds
            machine.case(TWO_ENGINES, tokens, both[0])


def _at_once(engines: Sequence[Engine], prompts: Sequence[list[int]], tops: int) -> list[Any]:
    with ThreadPoolExecutor(len(engines)) as pool:
        calls = [
            pool.submit(engine.generate, [prompt], OUTPUT_TOKENS, tops)
            for engine, prompt in zip(engines, prompts, strict=True)
        ]
        return [call.result() for call in calls]


def measure_graphs(machine: Machine, endpoint: str, store: Store, plain: Engine) -> None:
    """The part *graphs*, which comes after *two engines*. It uses CUDA graphs as vLLM does by default or, if that
    fails, without vLLM's compiler."""
    for name, arguments in GRAPH_WAYS.items():
        try:
            _measure_graphs(machine, endpoint, store, plain, name, arguments)
        except RuntimeError as error:
            machine.benchmark.skip(f"{GRAPHS}, {name}", str(error)[-2000:])
        else:
            return
    raise RuntimeError("no engine with CUDA graphs runs here")


def _measure_graphs(
    machine: Machine, endpoint: str, store: Store, plain: Engine, way: str, arguments: dict[str, Any]
) -> None:
    longest = max(machine.sizes.short)
    with (
        machine.engine(None, longest, **arguments) as computing,
        machine.engine({**store_options(endpoint), "cpu_bytes": 0}, longest, **arguments) as reader,
    ):
        machine.warm_up(computing, reader, seed=-3)
        for tokens in machine.sizes.short:
            asking = machine.asking(store, plain)
            asking.ask(COMPUTED, plain, machine.prompt(tokens))
            for _ in range(machine.sizes.rounds[tokens]):
                asking.ask(GRAPHS_COMPUTED, computing, machine.prompt(tokens))
                _load(asking, GRAPHS_STORE, reader, machine.prompt(tokens))
            machine.case(GRAPHS, tokens, asking, graphs=way)


def measure_tier(machine: Machine, endpoint: str, store: Store, plain: Engine) -> None:
    """The part *offloading tier*. The restarted engine's CPU tier is empty at first, so each prompt is read once."""
    longest = max(machine.sizes.short)
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 2 * sum(machine.sizes.short) * machine.sizes.model.token_bytes + (64 << 20),
            "secondary_tiers": [
                {"type": "KVStoreTier", "module_path": "kvstore_client.vllm.tier", **store_options(endpoint)}
            ],
        },
    }
    asking = {tokens: machine.asking(store, plain) for tokens in machine.sizes.short}
    with machine.engine(transfer, longest) as filler:
        machine.warm_up(filler, seed=-4)
        for tokens, each in asking.items():
            each.ask(COMPUTED, plain, machine.prompt(tokens))
            fill(machine, store, each, TIER_FILLED, filler, machine.prompt(tokens))
    with machine.engine(transfer, longest) as reader:
        machine.warm_up(reader, seed=-5)
        for tokens, each in asking.items():
            _load(each, TIER_STORE, reader, machine.prompt(tokens))
            machine.case(TIER, tokens, each)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {PARTS}")
    parser.add_argument(
        "--within", type=float, default=1800.0, metavar="SECONDS", help="start nothing that ends later; default: 1800"
    )


def _attempt(machine: Machine, part: str, measure: Callable[[], None]) -> None:
    """Measure a part. If it fails, the others still run, because the machine may not be available again."""
    try:
        measure()
    except OutOfTimeError as error:
        machine.benchmark.skip(f"the rest of {part}", str(error))
    except Exception as error:
        traceback.print_exc()
        machine.checks.that(False, f"{part} failed: {type(error).__name__}: {error}")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=1, add_options=_add_options)
    if missing_module("vllm"):
        benchmark.skip("everything", missing_module("vllm"))
        benchmark.finish()
        return 0
    device = no_cuda()
    on_gpu = not device
    sizes = SMALL if device or benchmark.quick else GPU
    if device:
        benchmark.skip(f"prompts of {', '.join(map(str, GPU.rounds))} tokens, {GPU.model.name} model", device)
    checks = Checks()
    machine = Machine(benchmark, sizes, on_gpu, checks)
    parts = list(benchmark.options.parts)
    for part in (GRAPHS, TIER) if device else ():
        benchmark.skip(part, device)
        parts = [each for each in parts if each != part]
    try:
        way = find_way(machine)
    except RuntimeError as error:
        checks.that(False, str(error))
        return conclude(benchmark, checks, way=None, parts=[])
    if RESTART in parts:
        _attempt(machine, RESTART, lambda: measure_restart(machine))
    short = {TWO_ENGINES: measure_two_engines, TIER: measure_tier, GRAPHS: measure_graphs}
    if any(part in parts for part in short):

        def measure_short() -> None:
            with short_prompts(machine) as (endpoint, store, plain):
                for part, measure in short.items():
                    if part in parts or part == TWO_ENGINES:  # this part fills the store for the others
                        machine.needs(90)
                        _attempt(machine, part, lambda: measure(machine, endpoint, store, plain))  # noqa: B023

        _attempt(machine, "short prompts", measure_short)
    return conclude(benchmark, checks, way=way, parts=parts)


if __name__ == "__main__":
    sys.exit(main())
