"""What a rank knows of a copy out of the cache, from its start until its blocks are sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore_client.vllm.connector.layout import Copy
from kvstore_client.vllm.connector.plan import Saves

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass
class OrderedCopies:
    """A job of which one part of the blocks is being copied out of the cache."""

    saves: Saves
    part: int
    blocks: int  # that this rank copies
    copy: Copy | None  # None: it failed, or could not be started
    started: float

    def ended(self) -> bool:
        try:
            return self.copy is None or self.copy.done()
        except Exception:
            self.failed()
            return True

    def failed(self) -> None:
        """Called where its error is caught: what it copied cannot be trusted."""
        logger.exception("kvstore: copying %d blocks out of the cache failed", len(self.saves.slots))
        self.copy = None
