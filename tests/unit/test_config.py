"""Settings from file, environment and flags: which wins, and what is said about one that cannot be."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore.cluster.url import EtcdURL
from kvstore.node.config import ConfigError, NamespaceRule, ServerConfig, load

CLUSTER = "etcd://a:2379/n"


def refused(
    file: Path | None = None, environment: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, environment or {}, flags or {})
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        file = tmp_path / "server.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_the_defaults_are_the_documented_ones() -> None:
    config = load(None, {}, {})
    assert config == ServerConfig()
    assert (config.host, config.port, config.shards, config.log_level) == ("127.0.0.1", 7070, 1, "info")
    assert config.memory_bytes == 4 << 30
    assert (config.disk, config.disk_size, config.disk_write, config.scrub_mbps) == (None, "50GiB", "all", 0)
    assert (config.cluster, config.node_id, config.advertise, config.zone) == (None, None, None, "")
    assert (config.drain_seconds, config.grace_seconds, config.lease_seconds) == (0, 300, 2)
    assert (config.policy, config.ttl_seconds, config.namespaces, config.warm_start) == ("default", 0, [], True)


def test_every_setting_is_in_the_operators_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for name in ServerConfig.__struct_fields__:
        assert ("[[namespaces]]" if name == "namespaces" else f"`--{name.replace('_', '-')}`") in manual, name


def test_a_flag_beats_the_environment_and_that_the_file(write: Any) -> None:
    file = write('port = 1000\nshards = 2\nmemory = "1GiB"\nlog_level = "debug"\n')
    environment = {"KVSTORE_SERVER_PORT": "2000", "KVSTORE_SERVER_SHARDS": "4", "PATH": "/bin"}
    config = load(file, environment, {"port": 3000, "shards": None, "memory": None})
    assert (config.port, config.shards, config.memory_bytes, config.log_level) == (3000, 4, 1 << 30, "debug")
    assert config.shard_memory_bytes == 1 << 28


def test_every_setting_can_come_from_everywhere(write: Any) -> None:
    settings = {
        "host": "0.0.0.0",
        "port": 7171,
        "shards": 2,
        "memory": "128MiB",
        "segment": "2MiB",
        "log_level": "error",
        "metrics_port": 9100,
        "policy": "lru",
        "ttl_seconds": 3600,
        "disk": "/data/kv",
        "disk_size": "1GiB",
        "disk_write": "reused",
        "warm_start": False,
        "scrub_mbps": 20,
        "cluster": "etcd://etcd-0:2379,etcd-1:2379/prod",
        "node_id": "node-7",
        "advertise": "10.0.0.7",
        "zone": "rack-3",
        "drain_seconds": 120,
        "grace_seconds": 600,
        "lease_seconds": 5,
    }
    assert set(settings) == set(ServerConfig.__struct_fields__) - {"namespaces"}
    toml = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    environment = {f"KVSTORE_SERVER_{name.upper()}": text for name, text in texts.items()}
    from_file, from_environment = load(write(toml), {}, {}), load(None, environment, {})
    assert from_file == from_environment == load(None, {}, settings)
    assert {name: getattr(from_file, name) for name in settings} == settings


def test_rules_for_namespaces_are_tables_of_the_file(write: Any) -> None:
    rules = """
ttl_seconds = 3600
[[namespaces]]
match = "Qwen/*"
ttl_seconds = 60
priority = 2
[[namespaces]]
match = "*"
"""
    config = load(write(rules), {}, {})
    assert config.namespaces == [NamespaceRule("Qwen/*", 60, 2), NamespaceRule("*", 0, 0)]
    assert config.ttl_seconds == 3600


def test_a_member_advertises_where_it_listens_and_is_called_as_its_host() -> None:
    config = load(None, {}, {"cluster": "etcd://a:2379/n", "host": "10.0.0.7"})
    assert config.advertised_host == "10.0.0.7" and config.cluster_node_id == socket.gethostname()
    assert config.cluster_url == EtcdURL((("a", 2379),), "n")
    config = load(None, {}, {"cluster": "etcd://a:2379/n", "host": "0.0.0.0", "advertise": "fd00::7", "node_id": "x"})
    assert config.advertised_host == "fd00::7" and config.cluster_node_id == "x"


SIZES = [f"{count}{unit}" for unit in ("MiB", "GiB", "TiB") for count in (8, 9, 15, 31, 64, 100)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_disk_of_any_size_is_cut_into_some_dozens_to_some_hundreds_of_segments(size: str, shards: int) -> None:
    config = ServerConfig(disk_size=size, shards=shards)
    segment, limit = config.disk_segment_bytes, config.shard_disk_bytes
    assert segment >= 1 << 20 and segment & (segment - 1) == 0
    if limit >= 8 << 20:
        config.check()
        assert 8 <= limit // segment <= 1024
    if limit >= 16 << 20:
        assert limit // segment >= 16


def test_no_more_segments_than_needed_while_they_may_be_larger() -> None:
    assert ServerConfig(disk_size="8MiB").disk_segment_bytes == 1 << 20
    assert ServerConfig(disk_size="50GiB").disk_segment_bytes == 256 << 20
    assert ServerConfig(disk_size="100TiB").disk_segment_bytes == 128 << 30


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_an_unknown_key_of_the_file_is_named(write: Any) -> None:
    message = refused(write('memroy = "1GiB"\n'))
    assert "'memroy'" in message and "server.toml" in message and "memory" in message


def test_an_unknown_variable_is_named() -> None:
    message = refused(environment={"KVSTORE_SERVER_MEMROY": "1GiB"})
    assert "'KVSTORE_SERVER_MEMROY'" in message and "KVSTORE_SERVER_MEMORY" in message


def test_variables_of_others_are_left_alone() -> None:
    assert load(None, {"KVSTORE_CACHE": "x", "KVSTORE_SERVERS": "y"}, {}) == ServerConfig()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "none.toml")
    assert "none.toml" in message and "No such file" in message


@pytest.mark.parametrize("data", [b"port = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "server.toml"
    file.write_bytes(data)
    assert "server.toml" in (message := refused(file)) and "TOML" in message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"port": 70000}, ["port", "70000", "65535"]),
        ({"port": -1}, ["port", "-1", "0"]),
        ({"shards": 0}, ["shards", "0", "1"]),
        ({"shards": 257}, ["shards", "257", "256"]),
        ({"port": "7070"}, ["port", "7070", "int"]),
        ({"memory": "lots"}, ["memory", "'lots'", "4GiB"]),
        ({"memory": "-1GiB"}, ["memory", "'-1GiB'", "4GiB"]),
        ({"memory": "4 GiBs"}, ["memory", "'4 GiBs'"]),
        ({"memory": "9" * 400}, ["memory", "999"]),
        ({"memory": ""}, ["memory", "''"]),
        ({"segment": "much"}, ["segment", "'much'", "MiB"]),
        ({"segment": "4KiB"}, ["segment", "'4KiB'", "1.0 MiB"]),
        ({"segment": "1048577"}, ["segment", "'1048577'", "multiple of 4 KiB"]),
        ({"memory": "16MiB"}, ["memory", "'16MiB'", "one segment", "33554432", "--segment"]),
        ({"memory": "64MiB", "shards": 3}, ["memory", "3 shard", "22369621", "--shards"]),
        ({"policy": "mru"}, ["policy", "'mru'", "default", "lru"]),
        ({"ttl_seconds": -1}, ["ttl_seconds", "-1", "0"]),
        ({"ttl_seconds": 10**10}, ["ttl_seconds", "10000000000", "315360000"]),
        ({"disk": ""}, ["disk", "empty", "folder"]),
        ({"disk": 5}, ["disk", "5", "str"]),
        ({"disk_size": "big"}, ["disk_size", "'big'", "GiB"]),
        ({"disk_size": "4MiB"}, ["disk_size", "'4MiB'", "4194304", "8.0 MiB", "--disk-size"]),
        ({"disk_size": "64MiB", "shards": 9}, ["disk_size", "9 shard", "7456540", "8.0 MiB"]),
        ({"disk_write": "some"}, ["disk_write", "'some'", "all, reused, evicted"]),
        ({"scrub_mbps": -1}, ["scrub_mbps", "-1", "0"]),
        ({"scrub_mbps": 200_000}, ["scrub_mbps", "200000", "100000"]),
        ({"cluster": "10.0.0.1:2379"}, ["cluster", "'10.0.0.1:2379'", "etcd://HOST:PORT"]),
        ({"cluster": "etcd://a/n"}, ["cluster", "'etcd://a/n'", "HOST:PORT"]),
        ({"cluster": "etcd://a:2379"}, ["cluster", "'etcd://a:2379'", "/NAME"]),
        ({"cluster": ""}, ["cluster", "''", "etcd://HOST:PORT"]),
        ({"cluster": "dns://kvstore:7070"}, ["cluster", "'dns://kvstore:7070'", "etcd://", "do not register"]),
        ({"cluster": CLUSTER, "node_id": "a/b"}, ["node_id", "'a/b'", "letters", "1 to 64"]),
        ({"cluster": CLUSTER, "node_id": ""}, ["node_id", "''", "letters"]),
        ({"cluster": CLUSTER, "host": "0.0.0.0"}, ["host", "'0.0.0.0'", "--advertise"]),
        ({"cluster": CLUSTER, "advertise": "::"}, ["advertise", "'::'", "--advertise"]),
        ({"cluster": CLUSTER, "advertise": "10.0.0.7:7070"}, ["advertise", "'10.0.0.7:7070'", "without a port"]),
        ({"cluster": CLUSTER, "advertise": "a b"}, ["advertise", "'a b'", "host name"]),
        ({"cluster": CLUSTER, "zone": "a,b"}, ["zone", "'a,b'", "letters"]),
        ({"cluster": CLUSTER, "drain_seconds": -1}, ["drain_seconds", "-1", "0"]),
        ({"cluster": CLUSTER, "lease_seconds": 1}, ["lease_seconds", "1", "2"]),
        ({"cluster": CLUSTER, "grace_seconds": 100_000}, ["grace_seconds", "100000", "86400"]),
        ({"advertise": "10.0.0.7"}, ["advertise", "'10.0.0.7'", "--cluster"]),
        ({"drain_seconds": 5}, ["drain_seconds", "5", "--cluster"]),
        ({"log_level": "loud"}, ["log_level", "'loud'", "debug, info, warning, error"]),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) and len(str(value)) < 40 else "",
)
def test_a_setting_that_cannot_be_says_what_was_given_and_what_is_expected(
    flags: dict[str, Any], parts: list[str]
) -> None:
    message = refused(flags=flags)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("value", ["many", "", "1.5", "0x10"])
def test_a_number_in_the_environment_is_a_number(value: str) -> None:
    message = refused(environment={"KVSTORE_SERVER_SHARDS": value})
    assert "KVSTORE_SERVER_SHARDS" in message and repr(value) in message and "whole number" in message


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ('match = "*"\nttl = 5', ["namespaces", "ttl"]),
        ("ttl_seconds = 5", ["namespaces", "match"]),
        ('match = "*"\nttl_seconds = "5"', ["namespaces", "'5'", "int"]),
        ('match = "*"\nttl_seconds = -1', ["namespaces", "-1", ">= 0"]),
        ('match = "*"\npriority = 4', ["namespaces", "4", "<= 3"]),
        ("match = 5", ["namespaces", "5", "str"]),
    ],
)
def test_a_rule_that_cannot_be_is_named(write: Any, rule: str, parts: list[str]) -> None:
    message = refused(write(f"[[namespaces]]\n{rule}\n"))
    assert all(part in message for part in parts), message


def test_no_variable_makes_rules_for_namespaces() -> None:
    message = refused(environment={"KVSTORE_SERVER_NAMESPACES": "[]"})
    assert "KVSTORE_SERVER_NAMESPACES" in message and "[[namespaces]]" in message and "--config" in message
    unknown = refused(environment={"KVSTORE_SERVER_NAMESPACE": "[]"})
    assert "'KVSTORE_SERVER_NAMESPACE'" in unknown and "KVSTORE_SERVER_NAMESPACES" not in unknown


@pytest.mark.parametrize("value", ["yes", "", "1", "True"])
def test_a_switch_in_the_environment_is_true_or_false(value: str) -> None:
    message = refused(environment={"KVSTORE_SERVER_WARM_START": value})
    assert "KVSTORE_SERVER_WARM_START" in message and repr(value) in message and "true or false" in message


def test_a_value_of_the_wrong_kind_in_the_file_is_named(write: Any) -> None:
    message = refused(write("memory = 5\n"))
    assert "memory" in message and "5" in message
