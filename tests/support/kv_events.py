"""Publishes KV events as an engine does, without an engine."""

from __future__ import annotations

import msgspec
import zmq

from tests.support.ports import free_ports


class Publisher:
    """Publishes KV events in numbered batches, as vLLM does."""

    def __init__(self) -> None:
        self.live, self.replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(self.live)
        self._sent = 0

    def store(self, tokens: list[int]) -> None:
        """Publish that the engine has a block of these tokens, at the beginning of a prompt."""
        event = {"type": "BlockStored", "block_hashes": [bytes(32)], "parent_block_hash": None, "token_ids": tokens}
        batch = [0.0, [{**event, "block_size": len(tokens)}], None]
        self._publisher.send_multipart([b"", self._sent.to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
        self._sent += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
