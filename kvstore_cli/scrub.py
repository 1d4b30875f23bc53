"""Scrubs a running store: asks every shard to check all blocks on its disk, and waits until all checks have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kvstore.wire import DiskInfo, ShardInfo
from kvstore_client.client import KVStoreClient

POLL_S: Final = 0.2

Progress = Callable[[int, int], None]  # called with the checked blocks and the total


class NoDiskTier(ValueError):
    """No shard of the store has a disk tier."""


class ScrubbedShard(msgspec.Struct, frozen=True):
    """The result of one shard's check. `failure`: why the check did not finish; empty if it finished."""

    shard: str
    blocks: int  # the number of checked blocks
    bytes: int
    damaged: int  # the number of damaged blocks, which the shard has dropped and logged
    failure: str


class ScrubReport(msgspec.Struct, frozen=True):
    """The results of all shards. `ok`: whether all checks finished and no block is damaged."""

    ok: bool
    shards: list[ScrubbedShard]


def verify(client: KVStoreClient, progress: Progress) -> ScrubReport:
    """Make every shard check all of its blocks on disk. `client` must not be `fail_open`.

    Returns when all checks have ended. If a disk tier is still recovering, this first waits for the recovery. Raises
    `NoDiskTier`, or `KVStoreError` if a shard does not answer.
    """
    before = _tiers(client)
    while any(shard.disk.state == "recovering" for shard in before.values() if shard.disk):
        time.sleep(POLL_S)
        before = _tiers(client)
    if not before:
        raise NoDiskTier("no shard of this store has a disk tier: start the server with --disk PATH")
    passes = client.scrub()
    total = sum(shard.disk.blocks for shard in before.values() if shard.disk)
    while True:
        after = _tiers(client)
        rows = {name: _row(shard, after.get(name)) for name, shard in before.items()}
        progress(min(total, sum(row.blocks for row in rows.values())), total)
        if all(row.failure or _complete(after[name], passes, name) for name, row in rows.items()):
            progress(total, total)
            report = list(rows.values())
            return ScrubReport(not any(row.failure or row.damaged for row in report), report)
        time.sleep(POLL_S)


def _tiers(client: KVStoreClient) -> dict[str, ShardInfo]:
    return {shard.name: shard for shard in client.info().shards if shard.disk is not None}


def _complete(shard: ShardInfo, passes: Mapping[str, int], name: str) -> bool:
    return shard.disk is not None and shard.disk.scrub_passes >= passes[name]


def _row(before: ShardInfo, after: ShardInfo | None) -> ScrubbedShard:
    old, name = before.disk, f"{before.node}/{before.shard}"
    assert old is not None
    new: DiskInfo | None = after.disk if after is not None and after.pid == before.pid else None
    if new is None:
        return ScrubbedShard(name, 0, 0, 0, "the shard was restarted during the check")
    return ScrubbedShard(
        name,
        new.scrubbed_blocks - old.scrubbed_blocks,
        new.scrubbed_bytes - old.scrubbed_bytes,
        new.scrub_corrupt_blocks - old.scrub_corrupt_blocks,
        f"its disk tier is off: {new.reason}" if new.state == "off" else "",
    )
