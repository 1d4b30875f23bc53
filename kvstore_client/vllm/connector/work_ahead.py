"""Estimates how long the engine would need, without a store, to compute the prompts before a request and the request's
own prompt.

Only the engine core's thread uses this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore_client.engine.computing_pace import ComputingPace
from kvstore_client.vllm.connector.pending import PendingLoad, TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


class WorkAhead:
    """Makes estimates from the pace at which the engine computes. Not thread-safe."""

    def __init__(
        self,
        computing: ComputingPace,
        tracked: Mapping[str, TrackedRequest],
        loading: Mapping[str, PendingLoad],
        *,
        block_tokens: int,
        whole_groups: int,
    ) -> None:
        """`tracked`, `loading`: the planners' records of requests that have blocks and of loads in progress.
        `whole_groups`: the number of groups of the cache that have all blocks."""
        self._computing = computing
        self._tracked = tracked
        self._loading = loading
        self._block_tokens = block_tokens
        self._whole_groups = max(1, whole_groups)
        self._work_s: float | None = None  # for all requests; None if not added up yet in this step

    def step(self) -> None:
        """Note that the engine has planned a step."""
        self._work_s = None

    def computing_s(self, request: Request, first: int, end: int) -> float:
        """Return how many seconds the engine would need without a store to compute these tokens of the request after
        the prompts of other requests. Return `math.inf` if that is not known."""
        own = self._computing.seconds(first, end)
        return math.inf if own is None else self.before_s(request) + own

    def before_s(self, request: Request) -> float:
        """Return how many more seconds the engine would need, without a store, to compute other requests' prompts.
        Return 0 while nothing is measured."""
        if self._work_s is None:
            self._work_s = sum(map(self._left_s, self._tracked.values()))
        mine = self._tracked.get(request.request_id)
        return self._work_s - (self._left_s(mine) if mine is not None else 0.0)

    def add(self, request: Request, first: int) -> float:
        """Note that the request has blocks from now on, and that its tokens from `first` on are to be computed or
        loaded. Return how many more seconds the engine would need, without a store, to compute the prompts before
        it."""
        before_s = self.before_s(request)
        self._work_s = before_s + (self._computing.seconds(first, request.num_prompt_tokens) or 0.0)
        return before_s

    def _left_s(self, tracked: TrackedRequest) -> float:
        request = tracked.request
        load = self._loading.get(request.request_id)
        blocks = load.from_store // self._whole_groups if load is not None else 0
        first = max(0, request.num_computed_tokens - blocks * self._block_tokens)
        return self._computing.seconds(first, max(first, request.num_prompt_tokens)) or 0.0
