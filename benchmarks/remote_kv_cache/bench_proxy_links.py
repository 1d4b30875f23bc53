"""Measures how long a user of the proxy waits when prompts are handed over across links of limited rate.

Every role is a separate process. A prefill engine P and a decode engine D (`vllm serve`) have one core each, with
`kvstore proxy` in front of them. The store is at the far end of two links of the same rate, one for each engine.
Prompts of 2000 tokens come one by one and are streamed. The *first token* comes from P, the *second* from D, once the
KV that P has computed has crossed both links. Two others are measured in the same rounds. One is D alone, which
computes a prompt itself and saves it across its link. The other is an engine without a connector and without HTTP that
computes the same prompt on the same core.

Needs vLLM, two cores, and root for the links (network namespaces); without them nothing is measured.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, cacheable_tokens, save_model
from benchmarks.remote_kv_cache.engine_process import Answer, Arrival, Served
from benchmarks.remote_kv_cache.engines import Engine
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import case_table, console
from benchmarks.remote_kv_cache.served import engine, proxy
from kvstore_serving.planning.metrics_page import metrics_of

ONE: Final = "one engine, without HTTP"
ITSELF: Final = "D computes"
APART: Final = "handed over"
WAYS: Final = (ONE, ITSELF, APART)
FIRST: Final = "first token"
SECOND: Final = "second token"
WHOLE: Final = "whole answer"
FIGURES: Final = (FIRST, SECOND, WHOLE)
RATES: Final = (4000e6, 200e6, 80e6, 40e6, 20e6, 10e6)  # bytes/s of each link, each way
TOKENS: Final = 2000
_ANSWER_TOKENS: Final = 20
_CHUNK: Final = 512
_OTHERS: Final = 100_000  # the first seed of prompts that only D gets
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts
_LEAD_S: Final = 0.1
_TIMEOUT_S: Final = 120.0
_FROM_STORE: Final = "vllm:external_prefix_cache_hits_total"  # tokens of prompts


def stream(url: str, decode: str, prompt: list[int]) -> Served:
    """Request a completion as a stream. decode: the engine that must give the answer. Raises `RuntimeError` if it is
    refused or ends early."""
    before = from_store(decode)
    body = {"model": "m", "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        token_ids, token_s = list[int](), list[float]()
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - began
            event = json.loads(line[len(b"data: ") :])
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or []
                token_ids.extend(tokens)
                token_s.extend([now] * len(tokens))
        if reply.status != 200 or len(token_ids) != _ANSWER_TOKENS:
            raise RuntimeError(f"{url} answered {reply.status} with {len(token_ids)} tokens of {_ANSWER_TOKENS}")
    finally:
        connection.close()
    return Served(token_ids, token_s, from_store(decode) - before)


def from_store(url: str) -> int:
    """Return the number of prompt tokens that an engine has loaded so far."""
    return round(sum(sample.value for sample in asyncio.run(metrics_of(url)) if sample.name == _FROM_STORE))


def alone(plain: Engine, prompt: list[int]) -> Served:
    """Do the same with an engine that is called directly, without HTTP."""
    plain.begin([Arrival(0.0, prompt, _ANSWER_TOKENS)], time.perf_counter() + _LEAD_S)
    [served] = plain.served()
    return served


def measure(
    benchmark: Benchmark, model: EngineModel, cores: Sequence[int], checks: Checks, folder: Path, stack: ExitStack
) -> None:
    """Run all rounds, rate by rate."""
    rounds, nbytes = benchmark.rounds, TOKENS * model.token_bytes
    link = stack.enter_context(LimitedLink(RATES[0], links=2))
    flags = ("--host", "0.0.0.0", "--insecure", "--unix-socket", "off")
    room = 2 * nbytes * (2 * rounds * len(RATES) + 6)
    port = stack.enter_context(kvstore_server(room, flags=flags, prefix=link.command)).rpartition(":")[2]
    stores = [f"tcp://{address}:{port}" for address in link.addresses]
    weights = save_model(model)
    options = ("--no-enable-prefix-caching", "--max-num-batched-tokens", str(_CHUNK))
    urls = [
        stack.enter_context(engine(weights, core, folder / f"{core}.log", store, *options))
        for core, store in zip(cores, stores, strict=False)
    ]
    url = stack.enter_context(proxy(stores[0], urls[:1], urls[1:], "split"))
    arguments: dict[str, Any] = {
        "max_model_len": TOKENS + 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": _CHUNK,
        "kv_cache_memory_bytes": 4 * nbytes,
    }
    plain = stack.enter_context(Engine(model, None, cores=[cores[1]], **arguments))
    ways: dict[str, Callable[[list[int]], Served]] = {
        ONE: lambda prompt: alone(plain, prompt),
        ITSELF: lambda prompt: stream(urls[1], urls[1], prompt),
        APART: lambda prompt: stream(url, urls[1], prompt),
    }
    for number, way in enumerate(ways.values()):
        for prompt in model.prompts(_WARM_UP + number, 2, TOKENS):
            way(prompt)
    with benchmark.steps("rounds", rounds * len(RATES)) as step:
        for place, rate in enumerate(RATES):
            link.set_rate(rate)
            seconds: dict[str, dict[str, list[float]]] = {figure: {way: [] for way in WAYS} for figure in FIGURES}
            for number in range(rounds):
                seed = 1 + place * rounds + number
                [prompt] = model.prompts(seed, 1, TOKENS)
                [other] = model.prompts(_OTHERS + seed, 1, TOKENS)  # the store already has the first prompt
                order = WAYS if number % 2 else WAYS[::-1]
                told = {name: ways[name](other if name == ITSELF else prompt) for name in order}
                for name, each in told.items():
                    for figure, token in zip(FIGURES, (0, 1, -1), strict=True):
                        seconds[figure][name].append(each.token_s[token])
                answers = {
                    name: [Answer(each.token_ids, each.cached_tokens, each.token_s[0])] for name, each in told.items()
                }
                what = f"{rate / 1e6:g} MB/s"
                checks.tokens(what, [prompt], answers[APART], answers[ONE], plain)
                checks.cached(f"{what}, {APART}", answers[APART], cacheable_tokens(TOKENS), TOKENS)
                checks.cached(f"{what}, {ITSELF}", answers[ITSELF], 0, 0)
                step()
            for figure, of_ways in seconds.items():
                benchmark.add(
                    f"{rate / 1e6:.0f} MB/s: {figure}",
                    of_ways,
                    limits={APART: ONE},
                    group=figure,
                    model=model.to_json(),
                    prompt_tokens=TOKENS,
                    answer_tokens=_ANSWER_TOKENS,
                    bytes_per_s=rate,
                    transfer_s=nbytes / rate,
                )


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # each engine has one core
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7)
    cores = sorted(os.sched_getaffinity(0))
    if benchmark.lacks(missing_module("vllm"), missing_cores(), unavailable()):
        return 0
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        measure(benchmark, ENGINE_MODELS["tiny"], cores, checks, Path(folder), stack)
    for case in benchmark.cases:
        console().print(case_table(case))
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
