"""Settings that CONFIGURE shows, and changes until the server is restarted.

A change applies to the node: the client sends it to every shard, and each shard takes its part of it. A shard first
informs the supervisor, which applies a log level to itself and gives all changes to shards that it restarts. A quota
also ends when the file of `--auth` gets another quota for the tenant, because then the file is the later change.

Used by the loop's thread only.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec

from kvstore import logs, wire
from kvstore.auth.policy import Policy
from kvstore.disk.config import MAX_SCRUB_MBPS, scrub_bytes_per_s
from kvstore.disk.tier import DiskTier
from kvstore.shard.peer import Peer
from kvstore.shard.setup import SettingChange, ShardConfig
from kvstore.shard.tenants import Tenants
from kvstore.sizes import parse_size, spell_size
from kvstore.wire import ErrorCode, WireError

log = logging.getLogger("kvstore.server")

LOG_LEVEL: Final = "log-level"
SCRUB_MBPS: Final = "scrub-mbps"
QUOTA: Final = "quota-bytes."  # the tenant's name follows
NO_QUOTA: Final = "none"
MAX_QUOTA_BYTES: Final = 1 << 62
_SHOWN: Final = 20  # the most settings that an error lists


class _Setting(Protocol):
    """One setting. `value`: the value in force, as text. `configured`: the value at the start or in the file."""

    name: str
    expected: str

    @property
    def value(self) -> str: ...

    @property
    def configured(self) -> str: ...

    def parse(self, text: str) -> str | None:
        """Return a value in the form in which it is shown, or None if it is not allowed."""

    def apply(self, value: str) -> None:
        """Put a value in force that `parse` has returned."""

    def keep(self, value: str) -> str:
        """Return where to write a value so that it outlives a restart."""


class _LogLevel:
    name = LOG_LEVEL
    expected = f"one of {', '.join(logs.LEVELS)}"

    def __init__(self, configured: str) -> None:
        self.value = self.configured = configured

    def parse(self, text: str) -> str | None:
        return text if text in logs.LEVELS else None

    def apply(self, value: str) -> None:
        self.value = value
        logs.set_level(value)

    def keep(self, value: str) -> str:
        return f'log_level = "{value}" in the file of --config, or give --log-level {value}'


class _ScrubRate:
    name = SCRUB_MBPS
    expected = f"a whole number of MB/s from 0 (never) to {MAX_SCRUB_MBPS}"

    def __init__(self, configured: int, shards: int, disk: DiskTier) -> None:
        self.value = self.configured = str(configured)
        self._shards = shards
        self._disk = disk

    def parse(self, text: str) -> str | None:
        fits = re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None and int(text) <= MAX_SCRUB_MBPS
        return str(int(text)) if fits else None

    def apply(self, value: str) -> None:
        self.value = value
        self._disk.set_scrub_rate(scrub_bytes_per_s(int(value), self._shards))

    def keep(self, value: str) -> str:
        return f"scrub_mbps = {value} in the file of --config, or give --scrub-mbps {value}"


class _TenantQuota:
    def __init__(self, tenants: Tenants, tenant: str) -> None:
        self.name = f"{QUOTA}{tenant}"
        self._tenants = tenants
        self._tenant = tenant
        guaranteed = tenants.limits_of(tenant).memory_guaranteed
        self._least = max(tenants.least_quota, guaranteed)
        why = "its guaranteed memory" if guaranteed == self._least else "a segment in each shard"
        self.expected = f"a size from {spell_size(self._least)} ({why}) to {spell_size(MAX_QUOTA_BYTES)}, or {NO_QUOTA}"

    @property
    def value(self) -> str:
        return _spell_quota(self._tenants.limits_of(self._tenant).memory)

    @property
    def configured(self) -> str:
        return _spell_quota(self._tenants.limits_of(self._tenant, changed=False).memory)

    def parse(self, text: str) -> str | None:
        if text == NO_QUOTA:
            return text
        try:
            size = parse_size(text)
        except ValueError:
            return None
        return spell_size(size) if self._least <= size <= MAX_QUOTA_BYTES else None

    def apply(self, value: str) -> None:
        self._tenants.set_quota(self._tenant, None if value == NO_QUOTA else parse_size(value))

    def keep(self, value: str) -> str:
        where = f"[tenants.{self._tenant}] in the file of --auth"
        return f"no memory under {where}" if value == NO_QUOTA else f'memory = "{value}" under {where}'


def _spell_quota(memory: int | None) -> str:
    return NO_QUOTA if memory is None else spell_size(memory)


class Configuring:
    """The settings of one shard that can be changed while it runs."""

    def __init__(self, config: ShardConfig, disk: DiskTier | None, tenants: Tenants | None) -> None:
        self._fd = config.changes_fd
        self._tenants = tenants
        self._fixed: list[_Setting] = [_LogLevel(config.log_level)]
        if disk is not None:
            self._fixed.append(_ScrubRate(config.scrub_mbps, len(config.shards), disk))
        for change in config.changed:
            self._adopt(change)

    def _adopt(self, change: SettingChange) -> None:
        """Apply a change that was made before this process started, if it is still in force."""
        setting = self._find(change.name)
        value = setting.parse(change.value) if setting is not None else None
        if setting is not None and value is not None and setting.configured == change.instead_of:
            setting.apply(value)
        else:
            log.info("%s is not %s any more: the file of --auth was changed", change.name, change.value)
            self._tell(SettingChange(change.name, change.instead_of, change.instead_of))

    def _settings(self) -> Iterator[_Setting]:
        yield from self._fixed
        if self._tenants is not None:
            for tenant in sorted(self._tenants.names):
                yield _TenantQuota(self._tenants, tenant)

    def _find(self, name: str) -> _Setting | None:
        tenant = name.removeprefix(QUOTA)
        if self._tenants is not None and tenant != name:
            return _TenantQuota(self._tenants, tenant) if tenant in self._tenants.names else None
        return next((setting for setting in self._fixed if setting.name == name), None)

    def all(self) -> list[wire.RunningSetting]:
        """Return all settings."""
        return [_described(setting) for setting in self._settings()]

    def change(self, name: str, value: str, peer: Peer) -> tuple[wire.RunningSetting, str]:
        """Put a value of a setting in force. Return the setting, and the value that it had before. Raises `WireError`
        with nothing changed."""
        setting = self._find(name)
        if setting is None:
            raise WireError(ErrorCode.SETTING, self._unknown(name))
        new = value if value == setting.configured else setting.parse(value)
        if new is None:
            raise WireError(ErrorCode.SETTING, f"{name} {value!r}: expected {setting.expected}")
        before = setting.value
        if new != before:
            if not self._tell(SettingChange(name, new, setting.configured)):
                raise WireError(ErrorCode.LIMIT, "the supervisor does not accept changes of settings now: try later")
            self._apply(setting, new, peer)
        return _described(setting), before

    def _apply(self, setting: _Setting, value: str, peer: Peer) -> None:
        """Put a value in force, and log that. A change of the log level is logged under the level that shows more."""
        before, session = setting.value, peer.session
        quieter = setting.name == LOG_LEVEL and logs.LEVELS.index(value) > logs.LEVELS.index(before)
        if not quieter:
            setting.apply(value)
        log.warning(
            "client %s %r, principal %r: changed %s from %s to %s, until the server is restarted",
            *(peer.address, session.client, session.rights.principal, setting.name, before, value),
            extra=logs.fields(setting=setting.name, before=before, value=value),
        )
        if quieter:
            setting.apply(value)

    def _unknown(self, name: str) -> str:
        names = [setting.name for setting in self._settings()]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"{name!r} is not a setting that can be changed while this server runs: expected one of "
            f"{', '.join(names[:_SHOWN])}{more}. {SCRUB_MBPS} needs --disk, and {QUOTA}TENANT needs --auth"
        )

    def take_policy(self, policy: Policy) -> None:
        """Apply a new policy. Quotas that it changes end the changes that were made before."""
        if self._tenants is None:
            return
        for tenant in self._tenants.take_policy(policy):
            setting = _TenantQuota(self._tenants, tenant)
            log.info("%s is %s now: the file of --auth was changed", setting.name, setting.configured)
            self._tell(SettingChange(setting.name, setting.configured, setting.configured))

    def _tell(self, change: SettingChange) -> bool:
        """Inform the supervisor. Return False if it has not read for a long time."""
        if self._fd >= 0:
            try:
                os.write(self._fd, msgspec.json.encode(change) + b"\n")  # never split: it is below PIPE_BUF
            except BlockingIOError:
                return False
        return True


def _described(setting: _Setting) -> wire.RunningSetting:
    value = setting.value
    return wire.RunningSetting(setting.name, value, setting.configured, setting.expected, setting.keep(value))
