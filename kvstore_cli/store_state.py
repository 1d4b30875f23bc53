"""Every shard of a store asked for its state: who answers what, and who does not answer and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.cluster.placement import Placement
from kvstore.wire import ShardInfo
from kvstore_cli.output import CommandFailed
from kvstore_client import KVStoreClient, ShardStatus
from kvstore_client.keys import KeyArray


def owners_of(shards: Sequence[ShardStatus], keys: KeyArray) -> list[str]:
    """The name of the shard that each block is set on first."""
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
    """What `kvstore info` shows."""

    shards: Sequence[ShardInfo]  # that answered
    silent: Sequence[SilentShard]

    @property
    def failure(self) -> CommandFailed | None:
        """Why the state is not complete; None: it is."""
        if not self.silent:
            return None
        total = len(self.shards) + len(self.silent)
        reasons = "; ".join(dict.fromkeys(shard.reason for shard in self.silent))
        return CommandFailed("unreachable", f"{len(self.silent)} of {total} shards did not answer: {reasons}")


def store_state(client: KVStoreClient) -> StoreState:
    """The state of all shards. `client` should be `fail_open`, so that it can be made while a node is down."""
    shards = client.shards()
    return StoreState(
        [shard.info for shard in shards if shard.info is not None],
        [
            SilentShard(shard.node, shard.endpoint.removeprefix("tcp://"), shard.error)
            for shard in shards
            if shard.info is None
        ],
    )
