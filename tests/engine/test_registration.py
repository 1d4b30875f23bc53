"""Engines that register themselves for a proxy, in a real etcd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore_client.engine.block_names import NOT_SHARED
from kvstore_client.engine.directory import ENGINE_TTL_S, EngineList, EngineRecord, Registered
from tests.engine.engines import StartEngine
from tests.support.etcd import Etcd
from tests.support.harness import Server, wait_until
from tests.support.ports import free_ports
from tests.support.proxies import ProxyProcess, StandInEngine, chunks_of, text_of
from tests.support.stand_in_engine import MODEL, expected

URL = "http://127.0.0.1:8000"


def test_an_engine_is_in_the_directory_while_it_runs(
    server: Server, start_engine: StartEngine, model: Path, tmp_path: Path
) -> None:
    with Etcd(tmp_path / "etcd") as etcd:
        heard: list[dict[str, EngineRecord]] = []
        engines = EngineList(etcd.url("fleet"), heard.append)
        options = {"engines": etcd.url("fleet"), "engine_url": URL, "weights_version": "7"}
        publisher, replay = free_ports(2)
        addresses = {"endpoint": f"tcp://*:{publisher}", "replay_endpoint": f"tcp://*:{replay}"}
        events = {"enable_kv_cache_events": True, **addresses}
        engine = start_engine(server.endpoint, options=options, kv_events_config=events)
        wait_until(lambda: heard and heard[-1], what="it is registered")
        reached = f"tcp://127.0.0.1:{publisher}", f"tcp://127.0.0.1:{replay}"
        record = EngineRecord(URL, ("prefill", "decode"), str(model), "7", 1, 1, *reached)
        assert heard[-1] == {"127.0.0.1-8000": record}, "before its first step it does not know its namespaces"
        engine.generate([1, 2, 3])
        wait_until(lambda: heard[-1]["127.0.0.1-8000"].namespaces, what="it has made a step")
        names = heard[-1]["127.0.0.1-8000"]
        assert len(names.namespaces) == 32 and names.generation >= 0
        engine.change_weights(1)

        def not_shared() -> bool:
            engine.generate([4, 5, 6])  # workers report a check with a later step, and an idle engine has no steps
            return heard[-1]["127.0.0.1-8000"].namespaces == NOT_SHARED

        wait_until(not_shared, what="its weights have changed")
        engine.name_weights("step-1")
        engine.generate([1, 2, 3])
        wait_until(lambda: heard[-1]["127.0.0.1-8000"].weights == "step-1", what="its weights have another name")
        renamed = heard[-1]["127.0.0.1-8000"]
        assert renamed.namespaces not in ("", NOT_SHARED, names.namespaces)
        assert engine.stop() == 0
        wait_until(lambda: not heard[-1], what="it has left")
        engines.close()


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[list[StandInEngine]]:
    found: list[StandInEngine] = []
    try:
        for number in range(3):
            found.append(StandInEngine(tmp_path / f"stand-in-{number}.log"))
        yield found
    finally:
        for each in found:
            each.kill()


@pytest.mark.timeout(400)
def test_a_killed_engine_leaves_the_proxy_with_its_lease(
    server: Server, start_engine: StartEngine, stand_ins: list[StandInEngine], tmp_path: Path
) -> None:
    """A real engine registers itself with the URL of a stand-in, which answers its requests. The other engines are
    stand-ins, too."""
    api, prefill, decode = stand_ins
    for each in stand_ins:
        each.behave(gap_s=0.02)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(Etcd(tmp_path / "etcd")).url("fleet")
        others = {"p": EngineRecord(prefill.url, ("prefill",)), "d": EngineRecord(decode.url, ("decode",))}
        for name, record in others.items():
            stack.enter_context(Registered(url, name, record))
        options = (f"--store={server.endpoint}", f"--engines={url}", "--policy=split", "--check-seconds=0.1")
        proxy = stack.enter_context(ProxyProcess(tmp_path / "proxy", *options))
        engine = start_engine(server.endpoint, options={"engines": url, "engine_url": api.url})

        def listed() -> list[set[str]]:
            pools = proxy.status()["pools"]
            return [{each["url"] for each in pools[role] if each["healthy"]} for role in ("prefill", "decode")]

        wait_until(lambda: listed() == [{prefill.url, api.url}, {decode.url, api.url}], what="all are in the pools")
        over = threading.Event()

        def use(user: int) -> int:
            """Send one prompt after another until the test is over. Returns the number of answers."""
            answers = 0
            while not over.is_set():
                prompt = [user, answers, 7]
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0}
                assert text_of(chunks_of(proxy.url, "/v1/completions", body)) == expected(prompt, 20)
                answers += 1
            return answers

        with ThreadPoolExecutor(4) as pool:
            users = [pool.submit(use, user) for user in range(4)]
            try:
                wait_until(lambda: api.seen()["running"], what="the engine answers")
                engine.kill()
                api.kill()
                wait_until(lambda: api.url not in str(proxy.status()["pools"]), ENGINE_TTL_S + 10, "it has left")
            finally:
                over.set()
            assert all(user.result() for user in users)
        wait_until(lambda: listed() == [{prefill.url}, {decode.url}], what="the others are in the pools")


@pytest.mark.parametrize(
    "options",
    [
        {"engines": "etcd://127.0.0.1:2379/fleet"},
        {"engine_url": URL},
        {"engines": "dns://cache:7070", "engine_url": URL},
        {"engines": "etcd://127.0.0.1:2379/fleet", "engine_url": "gpu-7"},
    ],
)
def test_an_engine_that_cannot_register_does_not_start(
    server: Server, start_engine: StartEngine, options: dict[str, str]
) -> None:
    engine = start_engine(server.endpoint, options=options, wait=False)
    assert not engine.ready()
    assert "engine_url" in engine.log_text() or "etcd://" in engine.log_text()
