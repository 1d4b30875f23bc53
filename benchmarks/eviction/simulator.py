"""The server's own cache, used as clients use it, without sockets and without bytes.

`ServerCache` is a shard without its loop. A request of the trace does what an engine does: MATCH_PREFIX of the whole
chain, GET of the run that is there, SET of the rest. Each goes to the method that the shard's connections call with a
decoded request. So every decision between the wire and the policy is the server's: which blocks a GET touches and when,
how room is made, how the parts of a chain are joined, in which order blocks become readable. Blocks have no content,
since no policy looks at it.

With `call_blocks` it calls as the vLLM connector does: the look-up counts as a use and has a connection of its own;
blocks are read and set in calls of so many, and before each SET its blocks are looked up again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from benchmarks.eviction.traces import KEY_BYTES, Chain, Keys, Trace
from kvstore import wire
from kvstore._index import BlockIndex
from kvstore.shard.account import Share
from kvstore.shard.answers import Answers
from kvstore.shard.outbox import Outbox
from kvstore.shard.peer import Peer
from kvstore.shard.places import Places
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Stream
from kvstore.shard.turns import Line
from kvstore.store.namespaces import Store
from kvstore.wire.status import MAX_SEGMENT_SLOTS, segment_slots
from kvstore_client import Namespace

BLOCK_BYTES: Final = 64  # nothing is written to them
POLICIES: Final[tuple[str, ...]] = BlockIndex.POLICIES
_DEADLINE_MS: Final = 600_000


class Cache(Protocol):
    """A cache that can be asked for chains of blocks."""

    def request(self, chain: Chain) -> int:
        """Ask for a chain, head first, and store the missing blocks. -> how many leading blocks were there."""


class _Answered(Outbox):
    """Of a connection whose socket is never used: it keeps the shard's last answer."""

    answer: wire.Reply
    stream: Stream

    def reply(self, answer: wire.Reply) -> None:
        self.answer = answer

    def add_stream(self, stream: Stream) -> None:
        self.stream = stream

    def resume(self, stream: Stream) -> None:
        """Never needed: no block is half written between two requests."""


class _Connection(Peer):
    def __init__(self, state: ShardState, port: int) -> None:
        share = Share(state.account, "simulated")
        super().__init__(state, socket.socket(), share, "simulated", port, Line(), lambda peer: None)
        self.outbox = self.answered = _Answered(state, self.sock, share, self.session, Line())


class ServerCache:
    """A shard with room for exactly `segments * slots_per_segment` blocks, all of one namespace.

    `keys`: by block number. `call_blocks`: blocks a call, of the connector's way of calling; None: all of a request's
    blocks in one call, on one connection. It must be closed, since it has a memory mapping and a thread.
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
        self._store = Store(config.memory_bytes, config.segment_bytes, config.policy, config.rules)
        self._answers = Answers(
            config, self._store, None, self._state, Places(self._state.account, "", lambda share: False)
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
        """A shard with room for `capacity` blocks, or a few less if they do not fit one segment."""
        segments = -(-capacity // MAX_SEGMENT_SLOTS)
        return cls(policy, keys, capacity // segments, segments, call_blocks)

    def __enter__(self) -> ServerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.arena.close()
        self._asking.sock.close()
        self._moving.sock.close()

    def request(self, chain: Chain) -> int:
        """Ask for a chain, head first, and set the missing blocks. -> how many leading blocks were there."""
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
        """How many blocks it holds now."""
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
    """The hit rate: the blocks of leading runs that were there, as a share of all references. `progress` is called with
    the requests done."""
    hits = 0
    for number, chain in enumerate(trace.chains):
        if len(chain):
            hits += cache.request(chain)
        if number % 500 == 499:
            progress(500)
    return hits / max(1, trace.references)
