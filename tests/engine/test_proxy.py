"""The proxy in front of two real vLLM servers and a real store: users get the same answers as from a single engine."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.engine.fleet import CHAT, COMPLETIONS, GREEDY, SEEDED, Fleet, ask
from tests.engine.served import MODEL, ServedEngine, post
from tests.engine.test_purge import purge
from tests.support.harness import wait_until
from tests.support.proxies import Asking, ProxyProcess, Reading, answer_of, chunks_of, text_of

Stream: TypeAlias = "tuple[str, dict[str, Any], Reading]"  # the path of the request, its body, and the answer


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("parts", "path", "sampling"),
    [(1, COMPLETIONS, GREEDY), (1, CHAT, SEEDED), (4, COMPLETIONS, SEEDED), (4, CHAT, GREEDY)],
    ids=["whole, greedy", "whole, chat, seeded", "parts, seeded", "parts, chat, greedy"],
)
def test_answers_through_the_proxy_equal_one_engines(
    fleet: Fleet, parts: int, path: str, sampling: dict[str, Any]
) -> None:
    fleet.keep_parts(parts)
    for seed in range(2):
        body = ask(path, seed, **sampling)
        status, whole = post(fleet.proxy.url, path, body)
        right = post(fleet.d.url, path, body)[1]
        assert status == 200 and whole["choices"] == right["choices"]
        body = ask(path, 100 + seed, **sampling, stream_options={"include_usage": True}, return_token_ids=seed == 1)
        chunks = chunks_of(fleet.proxy.url, path, body)
        right_chunks = chunks_of(fleet.d.url, path, body)
        assert answer_of(chunks) == answer_of(right_chunks)


@pytest.mark.timeout(400)
def test_decode_finds_in_the_store_what_prefill_saved(fleet: Fleet) -> None:
    body = ask(COMPLETIONS, 50, **GREEDY)
    post(fleet.p.url, COMPLETIONS, {**body, "max_tokens": 1})

    def cached() -> int:
        usage = post(fleet.d.url, COMPLETIONS, {**body, "max_tokens": 1})[1]["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    wait_until(lambda: cached() >= 192, what="the prompt is in the store")
    post(fleet.proxy.url, COMPLETIONS, body, **{"x-request-id": "cached"})
    record = fleet.proxy.record("cached")
    assert (record["decision"], record["prompt_tokens"], record["cached_tokens"]) == ("split", 200, 192)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stream", [False, True])
def test_a_new_split_prompt_counts_as_not_cached(fleet: Fleet, stream: bool) -> None:
    body = ask(COMPLETIONS, 51 + stream, **GREEDY)
    if stream:
        with Reading(fleet.proxy.url, COMPLETIONS, body, **{"x-request-id": f"new {stream}"}) as reading:
            assert not any(chunk.get("usage") for chunk in reading)
    else:
        post(fleet.proxy.url, COMPLETIONS, body, **{"x-request-id": f"new {stream}"})
    record = fleet.proxy.record(f"new {stream}")
    assert (record["decision"], record["prompt_tokens"], record["cached_tokens"]) == ("split", 200, 0)


@pytest.mark.timeout(400)
def test_short_and_known_prompts_stay_on_the_decode_engine(fleet: Fleet, tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, *fleet.options, "--split-tokens=150") as proxy:

        def decision(path: str, body: dict[str, Any], name: str) -> tuple[str, str]:
            assert post(proxy.url, path, body, **{"x-request-id": name})[0] == 200
            record = proxy.record(name)
            return record["decision"], record["why"]

        long = ask(COMPLETIONS, 60, **GREEDY)
        assert decision(COMPLETIONS, long, "long") == ("split", "200 uncached tokens")
        assert decision(COMPLETIONS, long, "again") == ("colocate", "8 uncached tokens")
        salted = {**long, "cache_salt": "tenant"}
        assert decision(COMPLETIONS, salted, "salted") == ("split", "200 uncached tokens")
        assert decision(COMPLETIONS, salted, "salted again") == ("colocate", "8 uncached tokens")
        short = {**long, "prompt": long["prompt"][100:200]}
        assert decision(COMPLETIONS, short, "short") == ("colocate", "100 uncached tokens")
        one = ask(COMPLETIONS, 61, max_tokens=1)
        assert decision(COMPLETIONS, one, "one") == ("colocate", "one token")
        assert proxy.record("one")["decode"] == fleet.p.url
        text = ask(CHAT, 62, **GREEDY)
        assert post(fleet.d.url, f"{CHAT}/render", text)[0] == 200, "the first time takes longer than the proxy waits"
        split, why = decision(CHAT, text, "chat")
        tokens = post(fleet.d.url, "/tokenize", {"model": MODEL, "messages": text["messages"]})[1]["count"]
        assert (split, why) == ("split", f"{tokens} uncached tokens")


@pytest.mark.timeout(400)
def test_an_engines_events_show_what_it_computed_for_others(fleet: Fleet, tmp_path: Path) -> None:
    body = ask(COMPLETIONS, 63, **GREEDY)
    assert post(fleet.d.url, COMPLETIONS, body)[0] == 200
    for number, (more, why) in enumerate(
        [([f"--events={fleet.d.url}={fleet.events}"], "8 uncached tokens"), ([], "200 uncached tokens")]
    ):
        with ProxyProcess(tmp_path / str(number), *fleet.options, "--split-tokens=150", *more) as proxy:

            def decided(proxy: ProxyProcess = proxy, why: str = why, number: int = number) -> bool:
                name = f"{number}-{len(proxy.access.read_text().splitlines())}"
                fresh = {**body, "prompt": [*body["prompt"][:192], *range(300, 308)]}
                assert post(proxy.url, COMPLETIONS, fresh, **{"x-request-id": name})[0] == 200
                return bool(proxy.record(name)["why"] == why)

            if more:
                wait_until(decided, what="the events are heard")
            else:
                assert decided(), "the proxy itself has sent nothing"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stream", [False, True])
def test_a_user_who_disconnects_frees_both_engines(fleet: Fleet, stream: bool) -> None:
    body = ask(COMPLETIONS, 70 + stream, max_tokens=1800, ignore_eos=True, **GREEDY)
    with (Reading if stream else Asking)(fleet.proxy.url, COMPLETIONS, body):
        wait_until(lambda: fleet.d.metric("vllm:num_requests_running"), what="the decode engine answers")
    for engine in (fleet.p, fleet.d):
        wait_until(lambda engine=engine: not engine.metric("vllm:num_requests_running"), what="the engine is free")


@pytest.mark.timeout(400)
def test_engines_are_paired_while_they_find_each_others_blocks(fleet: Fleet, tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, *fleet.options, "--policy=split") as proxy:

        def named() -> set[tuple[str, int]]:
            pools = proxy.status()["pools"]
            return {(each["namespaces"], each["generation"]) for role in pools for each in pools[role]}

        def decision(name: str) -> str:
            body = ask(COMPLETIONS, 90, **GREEDY)
            assert post(proxy.url, COMPLETIONS, body, **{"x-request-id": name})[0] == 200
            return str(proxy.record(name)["decision"])

        [(namespaces, generation)] = named()
        assert namespaces and decision("first") == "split"
        purge(fleet.store)
        wait_until(
            lambda: {(name, number > generation) for name, number in named()} == {(namespaces, True)},
            what=f"both have said that they know of the purge: {named()}",
        )
        assert decision("after the purge") == "split"
        fleet.d.stop()
        try:
            fleet.d.start(tenant="another")
            fleet.d.await_health()
            wait_until(lambda: proxy.status()["unpaired"], what="it names blocks differently")
            [apart] = proxy.status()["unpaired"]
            assert apart["prefill"][0]["why"] == "other namespaces" and apart["decode"]["url"] == fleet.d.url
            assert decision("apart") == "colocate"
        finally:
            fleet.d.stop()
            fleet.d.start(tenant="")
            fleet.d.await_health()
        wait_until(lambda: not proxy.status()["unpaired"] and len(named()) == 1, what="they agree again")
        assert decision("last") == "split"


@pytest.mark.timeout(400)
def test_sigterm_lets_streams_finish_and_refuses_new_requests(fleet: Fleet, tmp_path: Path) -> None:
    proxy = ProxyProcess(tmp_path, *fleet.options, "--policy=split")
    body = ask(COMPLETIONS, 80, max_tokens=200, ignore_eos=True, **GREEDY)
    with Reading(proxy.url, COMPLETIONS, body) as reading:
        chunks = [next(iter(reading))]
        proxy.process.terminate()
        wait_until(lambda: proxy.status()["draining"], what="the proxy drains")
        assert post(proxy.url, COMPLETIONS, body)[0] == 503
        chunks += reading
    assert reading.done
    assert text_of(chunks) == text_of(chunks_of(fleet.d.url, COMPLETIONS, body))
    assert proxy.stop() == 0


@pytest.mark.timeout(400)
def test_engines_exchange_roles_while_streams_run(fleet: Fleet, tmp_path: Path) -> None:
    """Two engines exchange their roles and change back. No answer changes, and later prompts are handed over in the
    other direction."""

    def write(prefill: ServedEngine, decode: ServedEngine) -> None:
        roles = ((prefill, "prefill"), (decode, "decode"))
        entries = [f'[[engines]]\nurl = "{engine.url}"\nroles = ["{role}"]\n' for engine, role in roles]
        (tmp_path / "new.toml").write_text("".join(entries))
        os.replace(tmp_path / "new.toml", tmp_path / "pools.toml")

    def handed_over() -> list[float]:
        """Return the numbers of hand-overs of `p` and of `d`, on each side."""
        name = "vllm:kvstore_hand_overs_total"
        return [engine.metric(name, side=side) for engine in (fleet.p, fleet.d) for side in ("prefill", "decode")]

    def begin(group: int) -> Stream:
        path, how = (CHAT, SEEDED) if group % 2 else (COMPLETIONS, GREEDY)
        body = ask(path, 200 + group, max_tokens=400, ignore_eos=True, **how)
        return path, body, Reading(proxy.url, path, body)

    def exchanged(proxy: ProxyProcess, prefill: ServedEngine, decode: ServedEngine) -> bool:
        pools = proxy.status()["pools"]
        return [[each["url"] for each in pools[role]] for role in ("prefill", "decode")] == [
            [prefill.url],
            [decode.url],
        ]

    def works(engine: ServedEngine) -> bool:
        return any(engine.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))

    fleet.keep_parts(4)
    write(fleet.p, fleet.d)
    before = handed_over()
    options = (*fleet.store_options, f"--pools={tmp_path / 'pools.toml'}")
    with ProxyProcess(tmp_path, *options, "--policy=split") as proxy:
        streams = [begin(0)]
        for group, pair in enumerate([(fleet.d, fleet.p), (fleet.p, fleet.d)], 1):
            write(*pair)
            wait_until(lambda pair=pair: exchanged(proxy, *pair), what="the roles are exchanged")
            wait_until(lambda pair=pair: works(pair[0]), what="a stream still runs: else nothing is shown")
            streams.append(begin(group))
        with ThreadPoolExecutor(len(streams)) as users:
            answers = list(users.map(lambda stream: answer_of(list(stream[2])), streams))
        for _, _, reading in streams:
            assert reading.done
            reading.leave()
        with ThreadPoolExecutor(4) as users:
            right = list(users.map(lambda stream: answer_of(chunks_of(fleet.d.url, *stream[:2])), streams))
        assert answers == right, "one engine alone says something else"
        gained = [now - then for now, then in zip(handed_over(), before, strict=True)]
        assert gained == [2, 1, 1, 2]
        assert not any(name.startswith("kvstore_proxy_retries_total") and n for name, n in proxy.metrics().items())
