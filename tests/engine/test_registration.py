"""Engines that register themselves for a proxy, in a real etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_client.engine.directory import EngineList, EngineRecord
from tests.engine.engines import StartEngine
from tests.support.etcd import Etcd
from tests.support.harness import Server, wait_until
from tests.support.ports import free_ports

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
        record = EngineRecord(URL, ("prefill", "decode"), str(model), "7", 1, *reached)
        assert heard[-1] == {"127.0.0.1-8000": record}
        assert engine.stop() == 0
        wait_until(lambda: not heard[-1], 20, what="it has left")
        engines.close()


@pytest.mark.parametrize(
    "options",
    [
        {"engines": "etcd://127.0.0.1:2379/fleet"},
        {"engine_url": URL},
        {"engines": "dns://cache:7070", "engine_url": URL},
        {"engines": "etcd://127.0.0.1:2379/fleet", "engine_url": "gpu-7"},
    ],
)
def test_what_cannot_be_registered_stops_the_engine(
    server: Server, start_engine: StartEngine, options: dict[str, str]
) -> None:
    engine = start_engine(server.endpoint, options=options, wait=False)
    assert not engine.ready()
    assert "engine_url" in engine.log_text() or "etcd://" in engine.log_text()
