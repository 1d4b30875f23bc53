"""The server's own cache, used as clients use it, but without sockets and without the content of blocks.

`ServerCache` is a shard without its event loop. For each request of the trace, it gets an engine's commands:
MATCH_PREFIX of the whole chain, GET of the leading run that is present, and SET of the rest. Each command goes to the
method that the shard's connections call with a decoded request. So every decision between the wire and the policy is
the server's own. Examples are which blocks a GET touches and when, how room is made, how the parts of a chain are
joined, and in which order blocks become readable. Blocks have no content, because no policy uses it.

If `call_blocks` is given, the cache makes the same calls as the vLLM connector. The look-up counts as a use, and is
made on a separate connection. Each call reads or sets this many blocks, and blocks are looked up again before each SET.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from benchmarks.eviction.traces import KEY_BYTES, Chain, Keys, Trace
from kvstore import wire
from kvstore._index import BlockIndex
from kvstore.shard.account import AddressBudget
from kvstore.shard.connection_limits import ConnectionLimits
from kvstore.shard.handlers import RequestHandlers
from kvstore.shard.outbox import Outbox
from kvstore.shard.peer import Peer
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.stream import ReplyStream
from kvstore.shard.turns import SliceQueue
from kvstore.store.namespaces import ShardStore
from kvstore.wire.status import MAX_SEGMENT_SLOTS, segment_slots
from kvstore_client import Namespace

BLOCK_BYTES: Final = 64  # no bytes are written to them
POLICIES: Final[tuple[str, ...]] = BlockIndex.POLICIES
_DEADLINE_MS: Final = 600_000


class Cache(Protocol):
    """A cache that takes requests for chains of blocks."""

    def request(self, chain: Chain) -> int:
        """Request a chain, head first, and store the missing blocks. Return the number of leading blocks that were
        present."""


class _Answered(Outbox):
    """Replaces a connection and its socket, and keeps the shard's last answer."""

    answer: wire.Reply
    stream: ReplyStream

    def reply(self, answer: wire.Reply) -> None:
        self.answer = answer

    def add_stream(self, stream: ReplyStream) -> None:
        self.stream = stream

    def resume(self, stream: ReplyStream) -> None:
        """Do nothing. This is never called, because no block is half written between two requests."""


class _Connection(Peer):
    def __init__(self, state: ShardState, port: int) -> None:
        share = AddressBudget(state.account, "simulated")
        super().__init__(state, socket.socket(), share, "simulated", port, SliceQueue(), lambda peer: None)
        self.outbox = self.answered = _Answered(state, self.sock, share, self.session, SliceQueue())


class ServerCache:
    """A shard with room for exactly `segments * slots_per_segment` blocks, all of one namespace.

    `keys`: the key of each block number. `call_blocks`: the number of blocks in a call, to make the same calls as the
    connector. If it is None, all blocks of a request are sent in one call, on one connection. The cache must be closed,
    because it has a memory mapping and a thread.
    """

    def __init__(
        self, policy: str, keys: Keys, slots_per_segment: int, segments: int = 1, call_blocks: int | None = None
    ) -> None:
        segment_bytes = slots_per_segment * BLOCK_BYTES
        if segment_slots(segment_bytes, BLOCK_BYTES) != slots_per_segment:
            raise ValueError(f"slots_per_segment={slots_per_segment}: expected at most {MAX_SEGMENT_SLOTS}")
        config = ShardConfig(
            node="simulated",
            shard=0,
            listen_fd=-1,
            ready_fd=-1,
            memory_bytes=segments * segment_bytes,
            segment_bytes=segment_bytes,
            shards=[],
            log_level="warning",
            drain_s=0.0,
            policy=policy,
            rules=[],
            disk=None,
        )
        self._state = ShardState(time.monotonic())
        self._store = ShardStore(config.memory_bytes, config.segment_bytes, config.policy, config.rules)
        self._answers = RequestHandlers(
            config, self._store, None, self._state, ConnectionLimits(self._state.account, "", lambda share: False)
        )
        namespace = Namespace(model="benchmarks.eviction", dtype="uint8", block_tokens=1, block_bytes=BLOCK_BYTES)
        self._asking, self._moving = (_Connection(self._state, port) for port in (0, 1))
        if call_blocks is None:
            self._moving.sock.close()
            self._moving = self._asking
        self._asking.session.namespace = self._moving.session.namespace = namespace.canonical()
        self._keys = keys
        self._call_blocks = call_blocks

    @classmethod
    def of(cls, policy: str, keys: Keys, capacity: int, call_blocks: int | None = None) -> ServerCache:
        """Return a shard with room for `capacity` blocks, or for a few blocks less if they do not fit one segment."""
        segments = -(-capacity // MAX_SEGMENT_SLOTS)
        return cls(policy, keys, capacity // segments, segments, call_blocks)

    def __enter__(self) -> ServerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.arena.close()
        self._asking.sock.close()
        self._moving.sock.close()

    def request(self, chain: Chain) -> int:
        """Request a chain, head first, and set the missing blocks. Return the number of leading blocks that were
        present."""
        as_connector, most = self._call_blocks is not None, self._call_blocks or len(chain)
        run = self._match(self._keys[chain].tobytes(), as_connector)
        for start in range(0, run, most):
            self._get(self._keys[chain[start : min(run, start + most)]].tobytes())
        for start in range(run, len(chain), most):
            keys = self._keys[chain[start : start + most]].tobytes()
            if as_connector:
                self._contains(keys)
            self._set(keys, self._keys[chain[start - 1]].tobytes() if start else b"", start)
        return run

    @property
    def blocks(self) -> int:
        """The number of blocks that the shard holds now."""
        return sum(namespace.memory.index.ready for namespace in self._store)

    def _match(self, keys: bytes, refresh: bool) -> int:
        request = wire.MatchPrefix(1, _DEADLINE_MS, len(keys) // KEY_BYTES, KEY_BYTES, refresh)
        self._answers.handle_keyed(self._asking, request, keys)
        answer = self._asking.answered.answer
        assert isinstance(answer, wire.MatchReply)
        return answer.length

    def _get(self, keys: bytes) -> None:
        request = wire.Get(1, _DEADLINE_MS, len(keys) // KEY_BYTES, KEY_BYTES)
        self._answers.handle_keyed(self._moving, request, keys)
        stream = self._moving.answered.stream
        while not stream.done:
            outgoing = stream.next_part(self._state.now)
            assert outgoing is not None
            if outgoing.release is not None:
                outgoing.release(True)
        stream.close()

    def _contains(self, keys: bytes) -> None:
        request = wire.Contains(1, _DEADLINE_MS, len(keys) // KEY_BYTES, KEY_BYTES)
        self._answers.handle_keyed(self._moving, request, keys)

    def _set(self, keys: bytes, parent: bytes, position: int) -> None:
        count = len(keys) // KEY_BYTES
        request = wire.Set(1, _DEADLINE_MS, count, KEY_BYTES, chained=True, parent=parent, position=position)
        write = self._answers.sets.begin_write(self._moving, request, keys)
        self._answers.sets.commit(self._moving, write, bytes(count * wire.CHECKSUM_BYTES))


def replay(trace: Trace, cache: Cache, progress: Callable[[int], object] = lambda done: None) -> float:
    """Return the hit rate, which is the share of all references that were to present blocks of a leading run.
    `progress` is called with the number of finished requests."""
    hits = 0
    for number, chain in enumerate(trace.chains):
        if len(chain):
            hits += cache.request(chain)
        if number % 500 == 499:
            progress(500)
    return hits / max(1, trace.references)
