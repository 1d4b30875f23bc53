"""Engines that register themselves in a real etcd, and the proxy that follows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_client.engine.directory import EngineRecord, Registered
from tests.support.etcd import Etcd
from tests.support.harness import Server, wait_until
from tests.support.proxies import ProxyProcess, StandInEngine, post
from tests.support.stand_in_engine import MODEL

ASK = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}


def test_the_proxy_follows_engines_that_come_go_and_have_other_weights(server: Server, tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd") as etcd:
        url = etcd.url("fleet")
        arguments = (f"--store={server.endpoint}", f"--engines={url}", "--policy=split", "--check-seconds=0.1")
        engines = [StandInEngine(tmp_path / f"{number}.log") for number in range(2)]
        try:
            with ProxyProcess(tmp_path / "proxy", *arguments) as proxy:
                assert proxy.ready_line.endswith("prefill=0 decode=0")
                assert post(proxy.url, "/v1/completions", ASK)[0] == 503

                def decision() -> tuple[int, str]:
                    name = f"request-{len(proxy.access.read_text().splitlines())}"
                    status = post(proxy.url, "/v1/completions", ASK, **{"x-request-id": name})[0]
                    return status, proxy.record(name)["decision"]

                decode = EngineRecord(engines[0].url, ("decode",), weights="1")
                with Registered(url, "d", decode, ttl_s=3):
                    wait_until(lambda: decision() == (200, "colocate"), 10, "the decode engine is used")
                    with Registered(url, "p", EngineRecord(engines[1].url, ("prefill",), weights="2"), ttl_s=3):
                        wait_until(lambda: proxy.status()["unpaired"], 10, "other weights are noticed")
                        assert decision() == (200, "colocate")
                        assert proxy.metrics()["kvstore_proxy_unpaired_engines"] == 1
                    wait_until(lambda: not proxy.status()["pools"]["prefill"], 10, "the prefill engine has left")
                    with Registered(url, "p", EngineRecord(engines[1].url, ("prefill",), weights="1"), ttl_s=3):
                        wait_until(lambda: decision() == (200, "split"), 10, "the pair is used")
                        etcd.kill()
                        assert decision() == (200, "split")
                        etcd.restart(empty=True)
                        wait_until(lambda: decision() == (200, "split"), 20, "both have registered again")
        finally:
            for engine in engines:
                engine.kill()


def test_records_that_cannot_be_used_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="engine's name"):
        Registered("etcd://127.0.0.1:2379/fleet", "a/b", EngineRecord("http://h:1", ("decode",)))
    with pytest.raises(ValueError, match="url"):
        Registered("etcd://127.0.0.1:2379/fleet", "a", EngineRecord("ftp://h:1", ("decode",)))
    with pytest.raises(ValueError, match="etcd"):
        Registered("dns://cache:7070", "a", EngineRecord("http://h:1", ("decode",)))
