"""Settings that were changed while the node runs: the supervisor's side of `kvstore/shard/configuring.py`.

The shards write each change to one pipe, which outlives them. The supervisor keeps the changes, so that a shard that it
restarts has them, too, and applies a log level to itself. They end with the supervisor.

Used by the supervisor's main thread only, except that any thread may read `shown`.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import msgspec

from kvstore import logs
from kvstore.node.config import ServerConfig
from kvstore.node.settings import listed
from kvstore.shard.setup import SettingChange

log = logging.getLogger("kvstore.server")

_READ_BYTES: Final = 1 << 16
_LEVEL: Final = "log_level"
_decoder = msgspec.json.Decoder(SettingChange)


class Changes:
    """The changes that are in force. `fd`: readable when a shard has sent one. `told_fd`: where shards send them."""

    def __init__(self, config: ServerConfig) -> None:
        self.fd, self.told_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.shown = listed(config)  # all settings as text, with the changed values
        self._in_force: dict[str, SettingChange] = {}
        self._rest = b""  # the beginning of a line whose end was not read yet

    @property
    def in_force(self) -> list[SettingChange]:
        """The changes for a shard that is about to start."""
        return list(self._in_force.values())

    def take(self) -> None:
        """Receive changes. Call it when `fd` is readable."""
        *lines, self._rest = (self._rest + os.read(self.fd, _READ_BYTES)).split(b"\n")
        for line in lines:
            change = _decoder.decode(line)
            self._in_force.pop(change.name, None)
            if change.value != change.instead_of:
                self._in_force[change.name] = change
            name = change.name.replace("-", "_")
            if name in self.shown:
                self.shown[name] = change.value
            if name == _LEVEL:
                logs.set_level(change.value)
