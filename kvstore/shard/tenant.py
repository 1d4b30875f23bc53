"""One tenant's use of a shard, and the limits that `tenants` gives it. Used by the loop's thread only."""

from __future__ import annotations

from typing import Final

from kvstore.auth.policy import Limits

CONNECTION_COUNT: Final = "connections"
REQUEST_RATE: Final = "requests_per_s"
BYTES: Final = "bytes_per_s"
PINNED: Final = "pinned"


class Tenant:
    """One tenant's use of a shard."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.connections = 0
        self.limited = False  # its requests or bytes are limited
        self.refused: dict[str, int] = {}
        self._requests = self._bytes = 0.0  # what is left in the tenant's buckets
        self._filled = now
        self.limits = Limits()

    def set_limits(self, limits: Limits, shards: int) -> None:
        """Set the tenant's limits on the node. This shard applies its part of them."""
        self.limits = Limits(
            connections=limits.connections,
            pinned=None if limits.pinned is None else limits.pinned // shards,
            requests_per_s=None if limits.requests_per_s is None else limits.requests_per_s / shards,
            bytes_per_s=None if limits.bytes_per_s is None else limits.bytes_per_s // shards,
        )
        self.limited = limits.requests_per_s is not None or limits.bytes_per_s is not None
        self._requests, self._bytes = self.limits.requests_per_s or 0.0, float(self.limits.bytes_per_s or 0)

    def spend(self, nbytes: int) -> None:
        """Count `nbytes` bytes that the tenant has sent or received."""
        self._bytes -= nbytes

    def check_request(self, now: float) -> str:
        """Count a request. Return the name of the limit that the request exceeds, or "" if it exceeds none."""
        limits, passed = self.limits, now - self._filled
        self._filled = now
        if limits.bytes_per_s is not None:
            self._bytes = min(limits.bytes_per_s, self._bytes + passed * limits.bytes_per_s)
        if limits.requests_per_s is not None:
            self._requests = min(max(1.0, limits.requests_per_s), self._requests + passed * limits.requests_per_s)
            if self._requests < 1:
                return REQUEST_RATE
            self._requests -= 1
        return BYTES if limits.bytes_per_s is not None and self._bytes <= 0 else ""
