"""The objects that both planners of the scheduler's half use. An engine has one object of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_client.engine.guard import Counters
from kvstore_client.engine.lookup import PrefixLookups
from kvstore_client.engine.paged.host_tier import HostTier, Slots
from kvstore_client.engine.paged.sharing import SharingChecks
from kvstore_client.vllm.connector.block_groups import BlockGroups
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.events import KVEvents
from kvstore_client.vllm.connector.hand_over import HandOvers
from kvstore_client.vllm.connector.request_spans import RequestSpans


@dataclass(frozen=True)
class PlannerState:
    """The objects that both planners use. Not thread-safe.

    block_tokens: the number of tokens of a block.
    keys: makes the keys of blocks.
    lookups: looks up prefixes in the store.
    tier: the index of the host tier, which says which slot has which block.
    groups: the groups of the engine's cache.
    hand_overs: the requests that take part in a hand-over or a single flight.
    events: the KV events.
    counters: the counters of the connector.
    spans: writes the spans of requests, or None if no spans are to be written.
    sharing: decides whether blocks may be loaded and saved.
    """

    block_tokens: int
    keys: BlockKeys
    lookups: PrefixLookups
    tier: HostTier
    groups: BlockGroups
    hand_overs: HandOvers
    events: KVEvents
    counters: Counters
    spans: RequestSpans | None = None
    sharing: SharingChecks = field(default_factory=SharingChecks)

    def reserve(self, keys: Sequence[bytes]) -> Slots:
        """Do the same as `HostTier.reserve`, and report evicted blocks as events."""
        slots = self.tier.reserve(keys)
        self.events.evicted(self.tier.take_evicted())
        return slots
