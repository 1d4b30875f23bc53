"""Server configuration: one typed structure, filled from a TOML file, then the environment, then flags.

The same name everywhere: flag ``--log-level``, variable ``KVSTORE_SERVER_LOG_LEVEL``, key ``log_level``. A name nobody
knows is an error in each of the three; a value of the wrong kind says what was given and what is expected.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstore.logs import LEVELS
from kvstore.sizes import format_size, parse_size
from kvstore.wire import ShardAddress

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX: Final = "KVSTORE_SERVER_"
MIN_SEGMENT_BYTES: Final = 1 << 20
MAX_SHARDS: Final = 256


class ConfigError(Exception):
    """The configuration cannot be used. The message names the setting, its value and what is expected."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of `kvstore-server`, as given."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7070
    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)] = 1
    memory: str = "4GiB"
    segment: str = "32MiB"
    log_level: str = "info"
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None

    @property
    def memory_bytes(self) -> int:
        """Block memory of the whole node."""
        return parse_size(self.memory)

    @property
    def segment_bytes(self) -> int:
        """What memory is handed to namespaces in."""
        return parse_size(self.segment)

    @property
    def shard_memory_bytes(self) -> int:
        """Block memory of one shard."""
        return self.memory_bytes // self.shards

    def check(self) -> None:
        """Raise `ConfigError` where settings do not fit each other."""
        for name in ("memory", "segment"):
            try:
                parse_size(getattr(self, name))
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level {self.log_level!r}: expected one of {', '.join(LEVELS)}")
        if not self.segment_bytes >= MIN_SEGMENT_BYTES or self.segment_bytes % 4096:
            raise ConfigError(
                f"segment {self.segment!r}: expected at least {format_size(MIN_SEGMENT_BYTES)}, a multiple of 4 KiB"
            )
        if self.shard_memory_bytes < self.segment_bytes:
            raise ConfigError(
                f"memory {self.memory!r} gives each of {self.shards} shard(s) {self.shard_memory_bytes} bytes: "
                f"expected at least one segment of {self.segment_bytes} bytes; raise --memory, or lower --shards or "
                "--segment"
            )


class ShardConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells a shard."""

    node: str
    shard: int
    listen_fd: int
    ready_fd: int
    memory_bytes: int
    segment_bytes: int
    shards: list[ShardAddress]
    epoch: int
    log_level: str
    drain_s: float


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> ServerConfig:
    """The configuration from all three sources; a flag that is None was not given. Raises `ConfigError`."""
    settings: dict[str, Any] = {}
    if file is not None:
        settings.update(_from_file(file))
    settings.update(_from_environment(environment))
    settings.update({name: value for name, value in flags.items() if value is not None})
    for name, value in settings.items():
        try:
            msgspec.convert({name: value}, ServerConfig)
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at ")[0]
            raise ConfigError(f"{name}={value!r}: {expected[:1].lower()}{expected[1:]}") from None
    config = msgspec.convert(settings, ServerConfig)
    config.check()
    return config


def _known(names: list[str], unknown: list[str], where: str) -> None:
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(names)}")


def _from_file(file: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(file)!r} is no TOML: {error}") from None
    names = list(ServerConfig.__struct_fields__)
    _known(names, sorted(set(settings) - set(names)), f"configuration file {str(file)!r}")
    return settings


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = [ENVIRONMENT_PREFIX + name.upper() for name in ServerConfig.__struct_fields__]
    given = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    _known(names, sorted(set(given) - set(names)), "environment")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        field = name[len(ENVIRONMENT_PREFIX) :].lower()
        if ServerConfig.__annotations__[field] == "str":
            settings[field] = value
        else:
            try:
                settings[field] = int(value)
            except ValueError:
                raise ConfigError(f"environment: {name}={value!r}: expected a whole number") from None
    return settings
