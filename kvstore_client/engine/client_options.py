"""How the clients of one engine reach their store: what every `StoreGuard` of the engine is given alike."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from kvstore_client.client import DEFAULT_CONNECTIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """Options of `KVStoreClient` that an engine's operator chooses: the names, values and defaults are the client's."""

    replicas: int = 1
    connections: int = DEFAULT_CONNECTIONS
    nixl: bool = False
    token: str | os.PathLike[str] | None = dataclasses.field(default=None, repr=False)
    block_secret: bytes | str | None = dataclasses.field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """As `KVStoreClient` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


DEFAULT_OPTIONS: Final = ClientOptions()
