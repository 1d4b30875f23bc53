"""A toy engine with a paged KV cache: the work of an inference engine in a hundred lines, without kvstore.

Two layers of causal attention with random weights. Each key and value depends on all tokens before it, so a block with
wrong bytes changes every later token. Requests are scheduled in steps; each step computes some tokens of every request
that is not waiting. `Connector` is the interface to a cache outside of the engine; `adapter.py` implements it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

BLOCK_TOKENS = 16
HEADS, HEAD_SIZE, LAYERS, VOCABULARY = 2, 32, 2, 512
STEP_TOKENS = 64  # for one request


@dataclass
class Request:
    """A request. blocks: its blocks of the KV cache, one for each `BLOCK_TOKENS` tokens. computed: the number of
    leading tokens whose keys and values are in them. loading: whether the connector is filling some of them."""

    id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    loading: bool = False


class Connector(Protocol):
    """A cache outside of the engine. All calls come from the engine's thread, and none may block."""

    def matched_tokens(self, request: Request) -> int | None:
        """Return how many leading tokens it can load, fewer than all; None if that is not known yet, and the engine
        must ask again in the next step."""

    def load(self, request: Request, tokens: int) -> None:
        """Load this many tokens into the request's blocks."""

    def begin_step(self) -> None:
        """Called before the step's tokens are computed."""

    def computed(self, request: Request) -> None:
        """Called for each request after its tokens of the step were computed."""

    def end_step(self) -> tuple[dict[str, set[int]], set[str]]:
        """Return two things: requests whose loads have ended, with the blocks that did not come; and ended requests
        whose blocks may be reused now."""

    def ended(self, request: Request) -> bool:
        """Called when the request has ended. Return whether its blocks must be kept until `end_step` names it."""


class Engine:
    """Computes one token after each prompt. `kv_caches`: for each layer, (blocks, heads, tokens, key and value)."""

    name = "examples/toy-engine"

    def __init__(self, num_blocks: int = 256) -> None:
        shape = (num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
        self.num_blocks = num_blocks
        self.kv_caches = {f"layer.{layer}": torch.zeros(shape) for layer in range(LAYERS)}
        self.connector: Connector | None = None
        self.tokens_computed = 0
        self._free = list(range(num_blocks))
        self._kept: dict[str, list[int]] = {}
        self._numbers = itertools.count()
        draw = torch.Generator().manual_seed(0)  # every engine has the same weights
        width = HEADS * HEAD_SIZE
        self._embedding = torch.randn(VOCABULARY, width, generator=draw)
        self._weights = torch.randn(LAYERS, 3, width, width, generator=draw) / width**0.5

    def generate(self, prompts: Sequence[list[int]]) -> list[int]:
        """Return the next token of each prompt."""
        requests = [Request(str(next(self._numbers)), tokens) for tokens in prompts]
        answers: dict[str, int] = {}
        while len(answers) < len(requests):
            self._step([request for request in requests if request.id not in answers], answers)
        return [answers[request.id] for request in requests]

    def _step(self, requests: list[Request], answers: dict[str, int]) -> None:
        connector = self.connector
        for request in requests:
            if not request.blocks:
                self._admit(request)
        if connector is not None:
            connector.begin_step()
        for request in requests:
            if not request.blocks or request.loading:
                continue
            end = min(len(request.tokens), request.computed + STEP_TOKENS)
            for position in range(request.computed, end):
                answer = self._compute(request, position)
            request.computed = end
            if connector is not None:
                connector.computed(request)
            if end == len(request.tokens):
                answers[request.id] = answer
                self._kept[request.id] = request.blocks
                if connector is None or not connector.ended(request):
                    self._free += self._kept.pop(request.id)
        if connector is not None:
            loaded, free = connector.end_step()
            for request in requests:
                if (missing := loaded.get(request.id)) is not None:
                    request.loading = False
                    good = itertools.takewhile(lambda block: block not in missing, request.blocks)
                    request.computed = min(request.computed, len(list(good)) * BLOCK_TOKENS)
            for request_id in free:
                self._free += self._kept.pop(request_id)

    def _admit(self, request: Request) -> None:
        tokens = self.connector.matched_tokens(request) if self.connector is not None else 0
        count = -(-len(request.tokens) // BLOCK_TOKENS)
        if tokens is None or count > len(self._free):
            return
        request.blocks, self._free = self._free[:count], self._free[count:]
        if tokens and self.connector is not None:
            request.computed, request.loading = tokens, True
            self.connector.load(request, tokens)

    def _compute(self, request: Request, position: int) -> int:
        """Compute keys and values of one token. Return the token that would follow it."""
        self.tokens_computed += 1
        hidden = self._embedding[request.tokens[position]]
        block, at = request.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        for cache, (query, key, value) in zip(self.kv_caches.values(), self._weights, strict=True):
            heads = [(hidden @ weight).view(HEADS, HEAD_SIZE) for weight in (query, key, value)]
            cache[block, :, at] = torch.cat(heads[1:], dim=1)
            seen = cache[request.blocks].transpose(0, 1).flatten(1, 2)[:, : position + 1]
            scores = (seen[..., :HEAD_SIZE] @ heads[0].unsqueeze(2)).squeeze(2) / HEAD_SIZE**0.5
            hidden = hidden + (scores.softmax(1).unsqueeze(1) @ seen[..., HEAD_SIZE:]).flatten()
        return int((self._embedding @ hidden).argmax())
