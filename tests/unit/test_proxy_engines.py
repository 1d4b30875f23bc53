"""How the proxy gets its engines, from flags, a file or the directory, and to which publishers it listens."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore_cli.plan_search import _pools_file
from kvstore_cli.proxy import ProxyOptions
from kvstore_client.engine.directory import EngineRecord
from kvstore_client.engine.routing import Routes
from kvstore_client.vllm.connector.registration import as_reached
from kvstore_serving.planning.document import PlanDocument
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.pools_file import PoolsFile, read_pools
from kvstore_serving.proxy.settings import _DURATIONS, Settings, SettingsError
from tests.unit.test_cli_tables import Filler

A, B = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
STORE = ("tcp://127.0.0.1:7070",)


def entry(url: str, *roles: str, more: str = "") -> str:
    names = ", ".join(f'"{role}"' for role in roles)
    return f'[[engines]]\nurl = "{url}"\nroles = [{names}]\n{more}\n'


def test_a_file_names_engines(tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    more = 'weights = "7"\nevents = "tcp://h:5557"\nreplay = "tcp://h:5558"'
    file.write_text(entry(A, "prefill", "decode", more=more) + entry(B, "decode"))
    both = ("prefill", "decode")
    assert [(each.url, each.roles, each.weights, each.events, each.replay) for each in read_pools(file)] == [
        (A, both, "7", "tcp://h:5557", "tcp://h:5558"),
        (B, ("decode",), "", "", ""),
    ]


def test_a_plans_file_has_both_degrees_of_parallelism(tmp_path: Path) -> None:
    made: PlanDocument = Filler(True).of(PlanDocument)
    shapes = {"prefill": (1, 2), "decode": (4, 3)}
    placed = {
        role: msgspec.structs.replace(getattr(made.placement, role), tp=tp, pp=pp, instances=1)
        for role, (tp, pp) in shapes.items()
    }
    made = msgspec.structs.replace(made, placement=msgspec.structs.replace(made.placement, **placed))
    file = tmp_path / "pools.toml"
    file.write_text(_pools_file(made, "m", "http://p-{}:80", "http://d-{}:80"))
    found = {each.roles[0]: (each.tensor_parallel_size, each.pipeline_parallel_size) for each in read_pools(file)}
    assert found == shapes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "engines"),
        ("engines = []", "engines"),
        ("[[engines]]\nurl = 1", "url"),
        (entry(A), "roles"),
        (entry(A, "reader"), "reader"),
        (entry("127.0.0.1:8001", "decode"), "url"),
        (entry(A, "decode", more="role = 1"), "role"),
        (entry(A, "decode") + "[pools]\n", "pools"),
        (entry(A, "decode") + entry(A, "prefill"), "named twice"),
        ("[[engines", "end of an array"),
        (f"engines = {'[' * 20_000}", "pools.toml"),
    ],
)
def test_an_unusable_file_is_an_error_that_names_the_mistake(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "pools.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="pools") as raised:
        read_pools(file)
    assert says in str(raised.value) and "expected" in str(raised.value)


def test_a_missing_or_binary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        PoolsFile(str(tmp_path / "pools.toml"))
    (tmp_path / "pools.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="pools"):
        PoolsFile(str(tmp_path / "pools.toml"))


def test_file_changes_are_followed_through_links_and_errors_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file changes like a ConfigMap of Kubernetes: its path is a link to a link, and the second link is
    replaced."""
    for name, text in (("1", entry(A, "decode")), ("2", entry(B, "decode")), ("3", "[[engines")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pools.toml").write_text(text)
    (tmp_path / "data").symlink_to("1")
    path = tmp_path / "pools.toml"
    path.symlink_to("data/pools.toml")
    heard: list[list[str]] = []

    def point_at(name: str) -> None:
        (tmp_path / "new").symlink_to(name)
        os.replace(tmp_path / "new", tmp_path / "data")

    async def changed(engines: Sequence[EngineRecord]) -> None:
        heard.append([each.url for each in engines])

    async def until(happened: Callable[[], bool]) -> None:
        for _ in range(6000):
            if happened():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"heard {heard}, logged {caplog.messages}")

    async def follow() -> None:
        file = PoolsFile(str(path))
        following = asyncio.create_task(file.follow(changed, 0.01))
        point_at("2")
        await until(lambda: heard == [[B]])
        point_at("3")
        await until(lambda: len(caplog.records) == 1)
        path.unlink()
        await until(lambda: len(caplog.records) == 2)
        assert heard == [[B]]
        (tmp_path / "whole").write_text(entry(A, "decode") + entry(B, "decode"))
        os.replace(tmp_path / "whole", path)
        await until(lambda: len(heard) == 2)
        assert heard == [[B], [A, B]]
        following.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(follow())
    assert [record.getMessage().count("stay as they are") for record in caplog.records] == [1, 1]


def test_a_half_written_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pools.toml"
    path.write_text(entry(A, "decode") + entry(B, "decode"))
    heard: list[int] = []

    async def changed(engines: Sequence[EngineRecord]) -> None:
        heard.append(len(engines))

    async def follow() -> None:
        file = PoolsFile(str(path))
        following = asyncio.create_task(file.follow(changed, 0.05))
        with path.open("w") as writing:
            for number in range(20):  # each part alone is a valid file
                writing.write(entry(f"{A}{number}", "decode"))
                writing.flush()
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        following.cancel()

    asyncio.run(follow())
    assert heard == [20]


@pytest.mark.parametrize(
    "given",
    [
        {"decode": (A,), "pools": "pools.toml"},
        {"pools": "pools.toml", "engines": "etcd://127.0.0.1:2379/fleet"},
        {"prefill": (A,), "engines": "etcd://127.0.0.1:2379/fleet"},
        {},
        {"pools": "pools.toml", "events": ((A, "tcp://h:1", ""),)},
    ],
)
def test_engines_are_given_in_one_way_only(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        Settings(host="127.0.0.1", port=0, store=STORE, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [*_DURATIONS.values(), "--max-in-flight", "--max-body"])
def test_an_error_names_a_flag_that_exists(flag: str) -> None:
    fields = {flag: field for field, flag in _DURATIONS.items()}
    fields |= {"--max-in-flight": "max_in_flight", "--max-body": "max_body_bytes"}
    with pytest.raises(SettingsError, match=f"^{flag} is -1; expected"):
        Settings("127.0.0.1", 0, STORE, decode=(A,), **{fields[flag]: -1})  # type: ignore[arg-type]
    assert flag.removeprefix("--").replace("-", "_") in {each.name for each in dataclasses.fields(ProxyOptions)}


def test_flags_give_the_same_records() -> None:
    settings = Settings("127.0.0.1", 0, STORE, prefill=(A, B), decode=(B,), events=((B, "tcp://h:1", "tcp://h:2"),))
    both = EngineRecord(B, ("prefill", "decode"), events="tcp://h:1", replay="tcp://h:2")
    assert settings.named() == [EngineRecord(A, ("prefill",)), both]


def test_publishers_are_followed_while_their_engines_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    add, remove = Routes.add, Routes.remove

    def added(routes: Routes, name: str, events: str, replay: str = "") -> None:
        calls.append(("add", name, events, replay))
        add(routes, name, events, replay)

    def removed(routes: Routes, name: str) -> None:
        calls.append(("remove", name))
        remove(routes, name)

    monkeypatch.setattr(Routes, "add", added)
    monkeypatch.setattr(Routes, "remove", removed)

    async def follow() -> None:
        events = EngineEvents()
        assert await events.follow({}) == [] and not events.heard
        assert await events.follow({A: ("tcp://127.0.0.1:9", "")}) == []
        assert await events.follow({A: ("tcp://127.0.0.1:9", "")}) == []
        assert events.find([1, 2, 3], lives={A: 1}, lora_name="", cache_salt="").tokens == 0
        [problem] = await events.follow({A: ("tcp://127.0.0.1:9", "tcp://127.0.0.1:10"), B: ("nonsense", "")})
        assert B in problem and "'nonsense'" in problem and "expected tcp://HOST:PORT" in problem
        [problem] = await events.follow({B: ("tcp://127.0.0.1:9", "tcp://127.0.0.1")})
        assert not events.heard, "nothing of an engine is left whose replay address is wrong"
        assert await events.follow({}) == []
        await events.close()

    asyncio.run(follow())
    first, second = ("tcp://127.0.0.1:9", ""), ("tcp://127.0.0.1:9", "tcp://127.0.0.1:10")
    assert [call for call in calls if call[1] == A] == [
        ("add", A, *first),
        ("remove", A),
        ("add", A, *second),
        ("remove", A),
    ]


def test_events_without_pyzmq_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)

    async def follow() -> list[str]:
        events = EngineEvents()
        found = await events.follow({A: ("tcp://127.0.0.1:9", "")})
        assert not events.heard
        await events.close()
        return found

    [problem] = asyncio.run(follow())
    assert 'pip install "llm-kvstore[routing]"' in problem


@pytest.mark.parametrize(
    ("bound", "url", "reached"),
    [
        ("tcp://*:5557", "http://gpu-7:8000", "tcp://gpu-7:5557"),
        ("tcp://0.0.0.0:5557", "http://10.0.0.7:8000", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "http://[fe80::1]:8000", "tcp://[fe80::1]:5557"),
        ("tcp://10.1.0.7:5557", "http://gpu-7:8000", "tcp://10.1.0.7:5557"),
        ("ipc:///run/events", "http://gpu-7:8000", "ipc:///run/events"),
        ("inproc://events", "http://gpu-7:8000", ""),
        ("", "http://gpu-7:8000", ""),
    ],
)
def test_an_engine_registers_reachable_event_addresses(bound: str, url: str, reached: str) -> None:
    assert as_reached(bound, url) == reached
