"""Prompts that several engines know of: one computes their blocks, the others wait for them.

A request says in its ``kv_transfer_params`` on which side of a hand-over its engine is, as with other connectors.
``do_remote_decode``: this engine computes the prompt and another one goes on; it promises the prompt's blocks at once,
and sends them before all others. ``do_remote_prefill``: another engine computes the prompt; this one loads all whole
blocks of it, and waits for those that are promised. It computes what does not come. Every request says it anew, so an
engine takes either side at any time.

Single flight, an option, does the same among engines that get the same prompt at once: the first to promise a block
computes it. Requests of one engine do not even promise what another of them is computing: they follow it, until the
engine's own cache has the block.

Of a model with states, a prompt that is handed over has all its blocks of the other layers, and the states before its
last token, which the engine keeps. They are promised and waited for together.

Every wait has a bound. Thread: the engine core's, for everything here. Nothing blocks.
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

# How long a handed-over prompt may stay unpromised: its other engine may be in the middle of a long step.
UNPROMISED_S: Final = 2.0
# How long the store keeps the tail of a prompt, which is of use to nobody but the decode side.
TAIL_S: Final = 60.0


class Side(enum.Enum):
    """What a request's engine is to do for it."""

    BOTH = "both"  # the prompt and the answer
    PREFILL = "do_remote_decode"
    DECODE = "do_remote_prefill"


def side_of(request: Request) -> Side:
    """What the request says. The flags of a request that another connector hands over are not for this one."""
    params = request.kv_transfer_params or {}
    if "remote_engine_id" in params:
        return Side.BOTH
    sides = [side for side in (Side.PREFILL, Side.DECODE) if params.get(side.value)]
    if len(sides) > 1:
        logger.warning(
            "kvstore: request %s: kv_transfer_params has do_remote_decode and do_remote_prefill; expected one of them. "
            "It is computed here",
            request.request_id,
        )
    return sides[0] if len(sides) == 1 else Side.BOTH


@dataclass
class _Shared:
    """A request whose blocks others compute, or wait for."""

    request: Request
    side: Side
    flight: Flight
    chain: Sequence[bytes]  # the keys of the blocks that are handed over
    promised: Sequence[bytes]  # keys that it leads, for the other requests of this engine
    wait_s: float  # how long it waits for blocks that others have promised
    added: float
    follow_until: float
    tail: bytes | None = None  # the key of the block that the prompt's end fills in part
    tail_saved: bool = False
    finished: float = 0.0
    sending: set[bytes] | None = None  # once it has finished: the keys of blocks on their way; None: not known yet


class HandOvers:
    """The requests of one engine that others know of. ``flights``: what was promised for them."""

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
        """single_flight_s: how long a request waits for what another computes, hand-overs apart; 0: not at all."""
        self._flights = flights
        self._groups = groups
        self._keys = keys
        self._block_tokens = block_tokens
        self._single_flight_s = single_flight_s
        self._counters = counters
        self._spans = spans
        self._shared: dict[str, _Shared] = {}
        self._leaders: dict[bytes, Request] = {}  # key -> the request of this engine that computes it
        self._finishing: dict[str, _Shared] = {}

    @property
    def under_way(self) -> int:
        """Requests that somebody may wait for, or that wait."""
        return len(self._shared) + len(self._finishing)

    @property
    def ending(self) -> bool:
        """Whether others still wait for blocks of requests that have ended. Only a step tells that they are set."""
        return bool(self._finishing)

    def add(self, request: Request, keys: Sequence[bytes], usable: int, wait_s: float | None, may_save: bool) -> None:
        """A request, unless it is known: it may come back after the engine has taken its blocks.

        keys: of its prompt's whole blocks, or of those that can be shared. usable: how many of them may be loaded.
        wait_s: for a prompt that is handed over; None: as long as a promise holds. may_save: whether all its blocks are
        saved."""
        if request.request_id in self._shared:
            return
        side = side_of(request)
        keys = keys[: request.num_prompt_tokens // self._block_tokens]  # it may come back with an answer
        if self._groups.states:  # the engine keeps those before the prompt's last token, and not those before others
            last = (request.num_prompt_tokens - 1) // self._block_tokens
            keys = keys[:last] if len(keys) >= last else []
        now = time.monotonic()
        promised: list[bytes] = []
        groups = self._groups
        tail = None if side is Side.BOTH or groups.windows else self._keys.tail(request)
        if side is Side.PREFILL and request.max_tokens != 1:
            tail = None  # the engine would go on to fill that block while it is copied
        prompt = [*keys, tail] if tail is not None else keys
        if side is Side.DECODE:
            if not usable or not keys:
                return
            wait_s = PROMISE_S if wait_s is None else wait_s
            names = groups.names_to_last_states(keys) if groups.states else prompt
            enough = len(names) if groups.states else len(keys)
            flight = self._flights.expect(names, enough, min(UNPROMISED_S, wait_s))
        elif keys and may_save and (side is Side.PREFILL or self._single_flight_s):
            wait_s = self._single_flight_s if usable else 0.0
            if self._single_flight_s:
                promised = [key for key in keys if self._leaders.setdefault(key, request) is request]
            leads = promised or side is Side.PREFILL  # otherwise it only follows
            names = groups.names_to_last_states(keys) if groups.states else prompt
            flight = self._flights.promise(names) if leads else Flight(keys, now, coming=0)
        else:
            return
        if side is not Side.BOTH:
            self._counters.add("hand_overs_in" if side is Side.DECODE else "hand_overs_out")
        self._shared[request.request_id] = _Shared(
            request, side, flight, prompt, promised, wait_s, now, now + self._single_flight_s, tail
        )

    def knows(self, request: Request) -> bool:
        """Whether others may compute the request's blocks, or wait for them."""
        return request.request_id in self._shared

    def is_handed_over(self, request: Request) -> bool:
        """Whether another engine waits for the request's blocks."""
        shared = self._shared.get(request.request_id)
        return shared is not None and shared.side is Side.PREFILL

    def is_expected(self, request: Request) -> bool:
        """Whether another engine computes the request's prompt."""
        shared = self._shared.get(request.request_id)
        return shared is not None and shared.side is Side.DECODE

    def answered_at(self, request: Request) -> float:
        """When the store had answered who computes the request's prompt, by `time.monotonic`; 0: it has not."""
        shared = self._shared.get(request.request_id)
        return shared.flight.known_at if shared is not None else 0.0

    def loadable(self, request: Request) -> Sequence[bytes] | None:
        """The keys of all blocks of a prompt that another engine computes, the last one perhaps filled in part; None:
        it is computed here, or was loaded."""
        shared = self._shared.get(request.request_id)
        if shared is None or shared.side is not Side.DECODE or not shared.wait_s:
            return None
        return shared.chain

    def tail_to_save(self, request: Request, computed_tokens: int) -> bytes | None:
        """The key of the block that the prompt's end fills in part, if so many tokens are the prompt and another engine
        waits for that."""
        shared = self._shared.get(request.request_id)
        if shared is None or shared.side is not Side.PREFILL or computed_tokens != request.num_prompt_tokens:
            return None
        if shared.tail_saved or shared.tail is None or shared.tail != self._keys.tail(request):
            return None  # what is in the block may not be known for sure any more
        return shared.tail

    def tail_is_saved(self, request: Request) -> None:
        """It is on its way."""
        self._shared[request.request_id].tail_saved = True

    def follows(self, request: Request, keys: Sequence[bytes], local: int) -> bool:
        """Whether to wait until another request of this engine has computed block `local`, the first that this one
        lacks."""
        shared = self._shared.get(request.request_id)
        if shared is None or not self._single_flight_s or local >= len(keys) or time.monotonic() > shared.follow_until:
            return False
        leader = self._leaders.get(keys[local])
        return leader is not None and leader is not request and leader.num_computed_tokens <= local * self._block_tokens

    def coming(self, request: Request) -> int | None:
        """How many leading blocks are in the store or promised by others; 0: nobody was asked. None: ask again."""
        shared = self._shared.get(request.request_id)
        if shared is None or not shared.wait_s:
            return 0
        coming = self._flights.poll(shared.flight)
        if coming is not None and self._groups.states:  # of use with the states at the end alone
            coming = len(shared.chain) if coming == len(shared.flight.keys) else 0
        if coming is not None and shared.side is Side.DECODE and shared.added:
            self._counters.add("hand_over_seconds_promise", time.monotonic() - shared.added)
            shared.added = 0.0
        return coming

    def take_wait_s(self, request: Request) -> float:
        """How long a load of the request may wait for promised blocks. From now on, no other one may."""
        shared = self._shared.get(request.request_id)
        if shared is None:
            return 0.0
        wait_s, shared.wait_s = shared.wait_s, 0.0
        return wait_s

    def forget(self) -> None:
        """What was promised is withdrawn, and current requests neither wait for others nor lead them."""
        self._leaders.clear()
        for shared in self._shared.values():
            shared.wait_s, shared.tail = 0.0, None
            self._flights.end(shared.flight)
            shared.flight = Flight(shared.flight.keys, time.monotonic(), coming=0)
        for request_id in list(self._finishing):
            self._end(request_id)

    def finish(self, request: Request, sending: Iterable[bytes], whole: bool = True) -> None:
        """The request has ended. What it promised is withdrawn, once those of its blocks are set that are on their way.
        sending: the keys of blocks that are. whole: that is all; otherwise `placed` tells when it is."""
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
        """All blocks of a finished request that will be sent are on their way, or were sent."""
        if (shared := self._finishing.get(request.request_id)) is not None:
            keys = shared.flight.keys
            shared.sending = set(keys if self._groups.states else self._groups.keys(keys)).intersection(sending)
            if not shared.sending:
                self._end(request.request_id)

    def sent(self, key: bytes) -> None:
        """A block is not on its way any more."""
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
        if shared.side is Side.PREFILL:
            self._counters.add("hand_over_seconds_send", time.monotonic() - shared.finished)

    def reply(self, request: Request) -> dict[str, Any] | None:
        """What the engine's answer says to whoever sends the request to the next engine."""
        return {Side.DECODE.value: True, Side.PREFILL.value: False} if self.is_handed_over(request) else None

    def close(self) -> None:
        """Withdraw all promises."""
        self._flights.close()
