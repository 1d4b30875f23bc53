"""A shard's answer to INFO. The parts of the shard keep its values, and the fields of `ShardInfo` say where they are.

Each field gives the path from `Report` to its value, such as "state.sets". Only values that are not kept but counted
for each request are computed here. Used by the loop's thread only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvstore import __version__, wire
from kvstore.auth.rights import EVERY_TENANT, Rights
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import MAX_HELD_BYTES
from kvstore.shard.leases import LeaseTotals
from kvstore.shard.logins import Logins
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.tenants import Tenants
from kvstore.store.generations import Generations
from kvstore.store.namespaces import ShardStore
from kvstore.wire.status import report


@dataclass(frozen=True)
class Report:
    """The parts of a shard that INFO describes."""

    config: ShardConfig
    state: ShardState
    store: ShardStore
    disk: DiskTier | None
    lending: LeaseTotals
    generations: Generations
    logins: Logins | None
    tenants: Tenants | None

    def info(self, rights: Rights) -> wire.ShardInfo:
        """Return the state and the counters of this shard, with those namespaces that a principal with these rights may
        use."""
        config, state, store, arena = self.config, self.state, self.store, self.store.arena
        self.lending.collect()
        with open("/proc/self/statm") as statm:
            rss_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return report(
            wire.ShardInfo,
            self,
            pid=os.getpid(),
            version=__version__,
            uptime_s=state.now - state.started,
            memory_used_bytes=(arena.segments - arena.free) * arena.segment_bytes,
            rss_bytes=rss_bytes,
            bytes_out=state.bytes_out + self.lending.total_bytes,
            namespaces=[
                namespace.info(state.now, self.generations.of(namespace.id))
                for namespace in store
                if rights.owns(namespace.tenant) and rights.use(namespace.model)
            ],
            disk=self.disk.info() if self.disk is not None else None,
            name=config.shards[config.shard].name,
            held_limit_bytes=MAX_HELD_BYTES,
            transient_bytes=store.memory.transient_segments * arena.segment_bytes,
            transient_limit_bytes=store.transient_segments * arena.segment_bytes,
            tenants=self.tenants.info(store, rights) if self.tenants is not None else [],
            tenant="" if rights.tenant == EVERY_TENANT else rights.tenant,
            requests=state.timing.rows(),
        )
