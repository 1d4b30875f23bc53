"""What the connector counted, in the form the engine collects, logs and exports.

Keys: lookups, hit_tokens (counted on, at the scheduler), failed_loads (requests), loaded_blocks, missed_blocks (found
by the lookup but not delivered), saved_blocks, present_blocks (the store had them), unsaved_blocks, failed_calls,
skipped_calls (while a guard pauses), defects.
"""

from __future__ import annotations

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report: name -> number."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add another rank's, or another interval's, counts to these."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data
