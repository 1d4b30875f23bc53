"""Settings from file, environment and flags: which wins, and what is said about one that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import ConfigError, ServerConfig, load


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
    }
    assert set(settings) <= set(ServerConfig.__struct_fields__)
    toml = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    environment = {f"KVSTORE_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    from_file, from_environment = load(write(toml), {}, {}), load(None, environment, {})
    assert from_file == from_environment == load(None, {}, settings)
    assert {name: getattr(from_file, name) for name in settings} == settings


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


def test_a_value_of_the_wrong_kind_in_the_file_is_named(write: Any) -> None:
    message = refused(write("memory = 5\n"))
    assert "memory" in message and "5" in message
