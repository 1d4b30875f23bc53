"""The state of a store: the answers of its shards, and the reasons why other shards do not answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.cluster.placement import Placement
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore_cli.output import CommandFailed, fail
from kvstore_client import KVStoreClient, KVStoreError, NotAuthorized, ShardStatus
from kvstore_client.keys import KeyArray

_SECOND_CHANCE_S: Final = 1.5
_POLL_S: Final = 0.1


def owners_of(shards: Sequence[ShardStatus], keys: KeyArray) -> list[str]:
    """Return the names of the keys' owners, on which their blocks are set first. The list is empty if no shard accepts
    sets."""
    owners = [shard for shard in shards if shard.takes_sets]
    if not owners:
        return []
    placement = Placement(
        [shard.name for shard in owners],
        [shard.weight for shard in owners],
        [shard.node for shard in owners],
        [shard.zone or shard.node for shard in owners],
    )
    return [owners[number].name for number in placement.owners(keys).tolist()]


class SilentShard(msgspec.Struct, frozen=True):
    """A shard that did not answer."""

    node: str
    address: str  # HOST:PORT
    reason: str


class StoreState(msgspec.Struct, frozen=True):
    """The state that `kvstore info` shows."""

    shards: Sequence[ShardInfo]  # the shards that answered
    silent: Sequence[SilentShard]
    nodes: Sequence[str]  # the node of each of `shards`, by the name that other commands use
    paths: Sequence[str]  # how this host reads blocks from `shards`: "shared memory" or "tcp"

    @property
    def names(self) -> dict[str, str]:
        """The names of `shards` for people, NODE/NUMBER, by their own names."""
        return {shard.name: f"{node}/{shard.shard}" for node, shard in zip(self.nodes, self.shards, strict=True)}

    @property
    def namespaces(self) -> list[NamespaceInfo]:
        """What the shards report about namespaces, with an entry for each shard that has the namespace."""
        return [info for shard in self.shards for info in shard.namespaces]

    @property
    def failure(self) -> CommandFailed | None:
        """The failure that says why the state is not complete. It is None if the state is complete."""
        if not self.silent:
            return None
        total = len(self.shards) + len(self.silent)
        reasons = "; ".join(dict.fromkeys(shard.reason for shard in self.silent))
        return CommandFailed("unreachable", f"{len(self.silent)} of {total} shards did not answer: {reasons}")


def reported(client: KVStoreClient) -> list[ShardStatus]:
    """Ask all shards for their state. `client` should be `fail_open`, because it can then be made while a node is down.
    If shards refuse and none reports, this raises `CommandFailed` with their reasons."""
    shards = client.shards()
    refused = [shard.error for shard in shards if shard.answered and shard.info is None]
    if refused and all(shard.info is None for shard in shards):
        reasons = "; ".join(dict.fromkeys(refused))
        said = f"{len(refused)} of {len(shards)} shards refused: {reasons}"
        try:
            client.info()  # raises the error itself
        except NotAuthorized:
            fail("refused", said)
        except KVStoreError:
            fail("failed", said)
    return shards


def need_all_answers(client: KVStoreClient) -> None:
    """End the command if a shard does not answer, within a few seconds and whatever the timeout is. `client` must be
    `fail_open`. A shard that refuses to report its state answers. A shard that was too slow for the client's first
    attempt, which is short, has a little more time."""
    deadline = time.monotonic() + _SECOND_CHANCE_S
    while True:
        shards = client.shards()
        silent = [shard.error for shard in shards if not shard.answered]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if silent:
        fail("unreachable", f"{len(silent)} of {len(shards)} shards did not answer: {'; '.join(dict.fromkeys(silent))}")


def store_state(client: KVStoreClient) -> StoreState:
    """Ask all shards for their state, as `reported` does. Raises `CommandFailed` if no shard is known."""
    shards = reported(client)
    if not shards:
        nodes = "no node is registered: check the name of the cluster, and that its nodes run"
        fail("unreachable", client.directory_error or nodes)
    return StoreState(
        [shard.info for shard in shards if shard.info is not None],
        [
            SilentShard(shard.node, shard.endpoint.partition("://")[2], shard.error)
            for shard in shards
            if shard.info is None
        ],
        [shard.node for shard in shards if shard.info is not None],
        [shard.path for shard in shards if shard.info is not None],
    )
