"""`ClientStore`, a client that implements `Store`, and the options that all clients of one engine share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.link import Link
from kvstore_client.client import DEFAULT_CONNECTIONS, KVStoreClient
from kvstore_client.engine.store import Present


class ClientStore(KVStoreClient):
    """A client with the additional calls that an engine needs."""

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        return self.contains(keys)

    def get_into_steps(
        self,
        keys: Sequence[bytes],
        out: npt.NDArray[np.uint8],
        slots: Sequence[int],
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[Present]:
        return self._get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s, alone=alone)

    def first_shards(self, keys: Sequence[bytes]) -> frozenset[Link]:
        return self._asked(keys)

    def learn_generation(self, generation: int) -> None:
        """Raise this store's generation to that of another store. Each shard is informed before its next request."""
        self._pool.generations.learn(generation)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """Options of `KVStoreClient` that an engine's operator chooses. Names, values and defaults are those of the
    client."""

    replicas: int = 1
    connections: int = DEFAULT_CONNECTIONS
    transport: str | None = None
    token: str | os.PathLike[str] | None = dataclasses.field(default=None, repr=False)
    block_secret: bytes | str | None = dataclasses.field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments of `KVStoreClient`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


DEFAULT_OPTIONS: Final = ClientOptions()
