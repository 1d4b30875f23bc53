"""Hand-overs and single flight: one engine computes the blocks of a prompt, and other engines wait for them.

As with other connectors, ``kv_transfer_params`` of a request says on which side of a hand-over its engine is.

``do_remote_decode``: this engine computes the prompt, and another engine continues. This engine promises the prompt's
blocks at once, and sends them before all others.

``do_remote_prefill``: another engine computes the prompt. This engine loads all whole blocks of the prompt, waits for
those that are promised, and computes those that do not come.

Each request has its own flags, so an engine can be on different sides for different requests.

The option `single_flight_s` does the same among engines that get the same prompt at the same time. The first engine to
promise a block computes it. If another request of the same engine is computing a block, a request does not promise the
block. Instead, it waits for that other request until the engine's own cache has the block.

For a model with states, a hand-over includes all blocks of the layers without states. It also includes the states
before the prompt's last token, which the engine keeps. All of them are promised together, and the other engine waits
for all of them.

Every wait has a time limit. Only the engine core's thread uses this module, and no call blocks.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore_client.engine.flights import PROMISE_S, Flight, Flights
from kvstore_client.engine.guard import Counters
from kvstore_client.vllm.connector.block_groups import BlockGroups
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.request_spans import RequestSpans

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

# How long an engine waits for the promise of a handed-over prompt. The engine that computes the prompt may be in the
# middle of a long step.
UNPROMISED_S: Final = 2.0
# How long the store keeps a prompt's partly filled last block, which only the decode side needs.
TAIL_S: Final = 60.0


class HandOverSide(enum.Enum):
    """The part of a request that its engine computes."""

    BOTH = "both"  # the prompt and the answer
    PREFILL = "do_remote_decode"
    DECODE = "do_remote_prefill"


def side_of(request: Request) -> HandOverSide:
    """Return the side that the request's flags give. Flags of a request that another connector hands over are
    ignored."""
    params = request.kv_transfer_params or {}
    if "remote_engine_id" in params:
        return HandOverSide.BOTH
    sides = [side for side in (HandOverSide.PREFILL, HandOverSide.DECODE) if params.get(side.value)]
    if len(sides) > 1:
        logger.warning(
            "kvstore: request %s: kv_transfer_params has do_remote_decode and do_remote_prefill; expected one of them. "
            "This engine serves the request alone",
            request.request_id,
        )
    return sides[0] if len(sides) == 1 else HandOverSide.BOTH


@dataclass
class _Shared:
    """A request whose blocks are computed or awaited by other engines or requests."""

    request: Request
    side: HandOverSide
    flight: Flight
    chain: Sequence[bytes]  # the keys of the blocks that are handed over
    promised: Sequence[bytes]  # the keys of blocks that it also computes for other requests of this engine
    wait_s: float  # how long it waits for blocks that others have promised
    added: float
    follow_until: float
    tail: bytes | None = None  # the key of the prompt's partly filled last block
    tail_saved: bool = False
    finished: float = 0.0
    sending: set[bytes] | None = None  # after its end: keys of blocks on their way, once known


class HandOvers:
    """The requests of one engine that take part in a hand-over or a single flight."""

    def __init__(
        self,
        flights: Flights,
        groups: BlockGroups,
        keys: BlockKeys,
        *,
        block_tokens: int,
        single_flight_s: float,
        counters: Counters,
        spans: RequestSpans | None = None,
    ) -> None:
        """`flights`: makes the promises for these requests. `single_flight_s`: how long a request waits for blocks that
        another request computes, in seconds; 0 means that it does not wait. This does not apply to hand-overs."""
        self._flights = flights
        self._groups = groups
        self._keys = keys
        self._block_tokens = block_tokens
        self._single_flight_s = single_flight_s
        self._counters = counters
        self._spans = spans
        self._shared: dict[str, _Shared] = {}
        self._leaders: dict[bytes, Request] = {}  # the request of this engine that computes a block, by key
        self._finishing: dict[str, _Shared] = {}

    @property
    def under_way(self) -> int:
        """The number of requests that take part in a hand-over or a single flight. It includes requests that have ended
        but whose blocks are still being sent."""
        return len(self._shared) + len(self._finishing)

    @property
    def ending(self) -> bool:
        """Whether others still wait for blocks of requests that have ended. If so, steps are needed, because only a
        step reports that blocks are set."""
        return bool(self._finishing)

    def add(self, request: Request, keys: Sequence[bytes], usable: int, wait_s: float | None, may_save: bool) -> None:
        """Add a request. Do nothing if the request is already known, because it was preempted.

        keys: the keys of its whole blocks that can be shared.
        usable: the number of these blocks that may be loaded.
        wait_s: how long to wait for a prompt that is handed over, in seconds. None means as long as a promise is valid.
        may_save: whether all its blocks may be saved.
        """
        if request.request_id in self._shared:
            return
        side = side_of(request)
        keys = keys[: request.num_prompt_tokens // self._block_tokens]  # a preempted request may have an answer
        if self._groups.states:  # the engine keeps only the states before the prompt's last token
            last = (request.num_prompt_tokens - 1) // self._block_tokens
            keys = keys[:last] if len(keys) >= last else []
        now = time.monotonic()
        promised: list[bytes] = []
        groups = self._groups
        tail = None if side is HandOverSide.BOTH or groups.windows else self._keys.tail(request)
        if side is HandOverSide.PREFILL and request.max_tokens != 1:
            tail = None  # the engine would write to that block while it is copied
        prompt = [*keys, tail] if tail is not None else keys
        if side is HandOverSide.DECODE:
            if not usable or not keys:
                return
            wait_s = PROMISE_S if wait_s is None else wait_s
            names = groups.names_to_last_states(keys) if groups.states else prompt
            enough = len(names) if groups.states else len(keys)
            flight = self._flights.expect(names, enough, min(UNPROMISED_S, wait_s))
        elif keys and may_save and (side is HandOverSide.PREFILL or self._single_flight_s):
            wait_s = self._single_flight_s if usable else 0.0
            if self._single_flight_s:
                promised = [key for key in keys if self._leaders.setdefault(key, request) is request]
            leads = promised or side is HandOverSide.PREFILL  # otherwise it only waits for others
            names = groups.names_to_last_states(keys) if groups.states else prompt
            flight = self._flights.promise(names) if leads else Flight(keys, now, coming=0)
        else:
            return
        if side is not HandOverSide.BOTH:
            self._counters.add("hand_overs_in" if side is HandOverSide.DECODE else "hand_overs_out")
        self._shared[request.request_id] = _Shared(
            request, side, flight, prompt, promised, wait_s, now, now + self._single_flight_s, tail
        )

    def knows(self, request: Request) -> bool:
        """Return whether others may either compute the request's blocks or wait for them."""
        return request.request_id in self._shared

    def is_handed_over(self, request: Request) -> bool:
        """Return whether another engine waits for the request's blocks."""
        shared = self._shared.get(request.request_id)
        return shared is not None and shared.side is HandOverSide.PREFILL

    def is_expected(self, request: Request) -> bool:
        """Return whether another engine computes the request's prompt."""
        shared = self._shared.get(request.request_id)
        return shared is not None and shared.side is HandOverSide.DECODE

    def answered_at(self, request: Request) -> float:
        """Return the time when the store answered which engine computes the request's prompt, by `time.monotonic`.
        Return 0 if it has not answered."""
        shared = self._shared.get(request.request_id)
        return shared.flight.known_at if shared is not None else 0.0

    def loadable(self, request: Request) -> Sequence[bytes] | None:
        """Return the keys of all blocks of a prompt that another engine computes. The last block may be only partly
        filled. Return None if the prompt is computed here, or if its load has begun."""
        shared = self._shared.get(request.request_id)
        if shared is None or shared.side is not HandOverSide.DECODE or not shared.wait_s:
            return None
        return shared.chain

    def tail_to_save(self, request: Request, computed_tokens: int) -> bytes | None:
        """Return the key of the prompt's partly filled last block. Return None unless exactly the prompt is computed
        and another engine waits for that block."""
        shared = self._shared.get(request.request_id)
        if shared is None or shared.side is not HandOverSide.PREFILL or computed_tokens != request.num_prompt_tokens:
            return None
        if shared.tail_saved or shared.tail is None or shared.tail != self._keys.tail(request):
            return None  # the content of the block may have changed
        return shared.tail

    def tail_is_saved(self, request: Request) -> None:
        """Note that the prompt's partly filled last block is being saved."""
        self._shared[request.request_id].tail_saved = True

    def follows(self, request: Request, keys: Sequence[bytes], local: int) -> bool:
        """Return whether to wait until another request of this engine has computed block `local`, which is the first
        block that this request lacks."""
        shared = self._shared.get(request.request_id)
        if shared is None or not self._single_flight_s or local >= len(keys) or time.monotonic() > shared.follow_until:
            return False
        leader = self._leaders.get(keys[local])
        return leader is not None and leader is not request and leader.num_computed_tokens <= local * self._block_tokens

    def coming(self, request: Request) -> int | None:
        """Return how many leading blocks are either in the store or promised by others. Return 0 if the store was not
        asked, and None if the caller should ask again."""
        shared = self._shared.get(request.request_id)
        if shared is None or not shared.wait_s:
            return 0
        coming = self._flights.poll(shared.flight)
        if coming is not None and self._groups.states:  # blocks are useful only with the states at the end
            coming = len(shared.chain) if coming == len(shared.flight.keys) else 0
        if coming is not None and shared.side is HandOverSide.DECODE and shared.added:
            self._counters.add("hand_over_seconds_promise", time.monotonic() - shared.added)
            shared.added = 0.0
        return coming

    def take_wait_s(self, request: Request) -> float:
        """Return how long a load of the request may wait for promised blocks, in seconds. Later calls for the same
        request return 0."""
        shared = self._shared.get(request.request_id)
        if shared is None:
            return 0.0
        wait_s, shared.wait_s = shared.wait_s, 0.0
        return wait_s

    def forget(self) -> None:
        """Withdraw all promises. From now on, present requests do not wait for others, and others do not wait for
        them."""
        self._leaders.clear()
        for shared in self._shared.values():
            shared.wait_s, shared.tail = 0.0, None
            self._flights.end(shared.flight)
            shared.flight = Flight(shared.flight.keys, time.monotonic(), coming=0)
        for request_id in list(self._finishing):
            self._end(request_id)

    def finish(self, request: Request, sending: Iterable[bytes], whole: bool = True) -> None:
        """Note that the request has ended. Its promise is withdrawn when the store has all of its blocks that were on
        their way. `sending`: the keys of all blocks on their way. `whole`: whether these include all blocks of the
        request that will be sent. If not, `placed` must be called later."""
        shared = self._shared.pop(request.request_id, None)
        if shared is None:
            return
        for key in shared.promised:
            if self._leaders.get(key) is request:
                del self._leaders[key]
        shared.finished = time.monotonic()
        self._finishing[request.request_id] = shared
        if whole:
            self.placed(request, sending)

    def placed(self, request: Request, sending: Iterable[bytes]) -> None:
        """Note that all blocks of a finished request that will be sent are either on their way or already sent.
        `sending`: the keys of all blocks on their way."""
        if (shared := self._finishing.get(request.request_id)) is not None:
            keys = shared.flight.keys
            shared.sending = set(keys if self._groups.states else self._groups.keys(keys)).intersection(sending)
            if not shared.sending:
                self._end(request.request_id)

    def sent(self, key: bytes) -> None:
        """Note that a block is no longer on its way."""
        for request_id, shared in list(self._finishing.items()):
            if shared.sending is not None:
                shared.sending.discard(key)
                if not shared.sending:
                    self._end(request_id)

    def _end(self, request_id: str) -> None:
        shared = self._finishing.pop(request_id)
        self._flights.end(shared.flight)
        if self._spans is not None:
            self._spans.sent(request_id)
        if shared.side is HandOverSide.PREFILL:
            self._counters.add("hand_over_seconds_send", time.monotonic() - shared.finished)

    def reply(self, request: Request) -> dict[str, Any] | None:
        """Return the part of the engine's answer that is meant for the program that sends the request to the next
        engine. Return None if the request is not handed over."""
        return (
            {HandOverSide.DECODE.value: True, HandOverSide.PREFILL.value: False}
            if self.is_handed_over(request)
            else None
        )

    def close(self) -> None:
        """Withdraw all promises."""
        self._flights.close()
