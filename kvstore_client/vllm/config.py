"""The connector's options: ``kv_connector_extra_config`` of the engine, as one typed struct.

Only this module and the checks in ``identity`` may stop an engine, and only while it starts: a misspelt option that
is silently ignored costs its user a day. Everything after the start is a miss at worst.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.wire import MAX_DEADLINE_MS

LONGEST_TIMEOUT_S = MAX_DEADLINE_MS // 1000


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may say about the store it uses. Durations in seconds, sizes in bytes.

    endpoint: as ``KVStoreClient`` takes it: one address, a list of nodes, or a discovery URL.
    cpu_bytes: memory for a CPU tier between the engine's cache and the store; 0, the only value for now, is none.
    timeout_s: deadline of one transfer of blocks, after which its blocks count as missing.
    lookup_timeout_s: deadline of one lookup; the scheduler waits for it, so it is short.
    min_hit_tokens: a hit that saves fewer tokens than this is not worth a transfer and is ignored.
    tenant: blocks are shared only within one tenant.
    """

    endpoint: str | list[str]
    cpu_bytes: int = 0
    timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    min_hit_tokens: int = 0
    tenant: str = ""

    def __post_init__(self) -> None:
        addresses = [self.endpoint] if isinstance(self.endpoint, str) else self.endpoint
        if not addresses or not all("://" in address for address in addresses):
            raise ValueError(
                f"endpoint is {self.endpoint!r}; expected an address such as 'tcp://127.0.0.1:7070', "
                "a list of them, or a discovery URL"
            )
        if self.cpu_bytes != 0:
            raise ValueError(f"cpu_bytes is {self.cpu_bytes}; there is no CPU tier yet, so it must be 0 or left out")
        for name in ("timeout_s", "lookup_timeout_s"):
            if not 0 < getattr(self, name) <= LONGEST_TIMEOUT_S:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected seconds, above 0 and at most {LONGEST_TIMEOUT_S}"
                )
        if self.min_hit_tokens < 0:
            raise ValueError(f"min_hit_tokens is {self.min_hit_tokens}; expected 0 or more tokens")


def parse_config(extra_config: Mapping[str, Any]) -> ConnectorConfig:
    """Read ``kv_connector_extra_config``. Raises ValueError naming what was given and what is valid."""
    valid = ConnectorConfig.__struct_fields__
    if unknown := [key for key in extra_config if key not in valid]:
        key = unknown[0]
        close = difflib.get_close_matches(key, valid, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"kv_connector_extra_config: unknown option {key!r}{hint} Valid options: {', '.join(valid)}")
    if "endpoint" not in extra_config:
        raise ValueError(
            "kv_connector_extra_config: endpoint is missing; "
            "give the store's address, for example {'endpoint': 'tcp://127.0.0.1:7070'}"
        )
    try:
        return msgspec.convert(dict(extra_config), ConnectorConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None
