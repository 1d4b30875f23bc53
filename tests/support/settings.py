"""The settings of a server, from all sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.node.config import ServerConfig, read
from kvstore.node.fitting import misfits
from kvstore.node.settings import ConfigError


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> ServerConfig:
    """Return the settings from all sources; the arguments are those of `read`. Raises `ConfigError` with all
    problems."""
    config, sources = read(file, environment, flags)
    sources.add(misfits(config))
    if sources.problems:
        raise ConfigError(*sources.problems)
    return config
