"""What both planners of the scheduler's half use: an engine has one of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_client.engine.guard import Counters
from kvstore_client.engine.lookup import PrefixLookups
from kvstore_client.engine.paged.host_tier import HostTier, Slots
from kvstore_client.engine.paged.sharing import Sharing
from kvstore_client.vllm.connector.block_groups import BlockGroups
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.events import KVEvents
from kvstore_client.vllm.connector.hand_over import HandOvers
from kvstore_client.vllm.connector.request_spans import RequestSpans


@dataclass(frozen=True)
class Books:
    """block_tokens: of a block. tier: which slots have which blocks. groups: of the engine's cache. hand_overs: prompts
    that other engines know of. spans: what writes the times of requests; None: nobody wants them. sharing: whether
    anything may be loaded or saved. Not thread-safe."""

    block_tokens: int
    keys: BlockKeys
    lookups: PrefixLookups
    tier: HostTier
    groups: BlockGroups
    hand_overs: HandOvers
    events: KVEvents
    counters: Counters
    spans: RequestSpans | None = None
    sharing: Sharing = field(default_factory=Sharing)

    def reserve(self, keys: Sequence[bytes]) -> Slots:
        """`HostTier.reserve`; what it evicts is told."""
        slots = self.tier.reserve(keys)
        self.events.evicted(self.tier.take_evicted())
        return slots
