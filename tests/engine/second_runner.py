"""vLLM's second model runner (V2) around both halves of the connector, without a model.

These parts are real: the asynchronous scheduler, its KV cache manager, the connector, the store, and
`ActiveKVConnector`, through which this runner calls a worker's half. `Pages` replaces the model: what it writes for a
token depends on all tokens before it, and so does the token that it samples. A step is executed before the outcome of
the previous step is reported to the scheduler.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector

from kvstore_client.engine.paged.plan import StepPlan
from tests.engine.scheduled_engine import cache_config, scheduler_config
from tests.engine.scheduled_ranks import BLOCK_TOKENS
from tests.support.harness import wait_until

HEADS, CONTENT = 4, 64  # the shape of a token's KV, in elements of two bytes
VOCABULARY = 50


def states(tokens: Sequence[int]) -> list[int]:
    """Return the model's state at each token: a number that depends on all tokens up to this one."""
    known, state = [], 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        known.append(state & 0x7FFF)
    return known


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the model's answer to a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(states(tokens)[-1] % VOCABULARY)
    return tokens[len(prompt) :]


class Pages:
    """The KV cache of one layer, and the model that computes it."""

    def __init__(self, blocks: int, device: str) -> None:
        self.cache = torch.zeros((blocks, HEADS, BLOCK_TOKENS, CONTENT), dtype=torch.bfloat16, device=device)
        # A view as integers, which are compared exactly.
        self._elements = self.cache.view(torch.int16).permute(0, 2, 1, 3)

    def compute(self, tokens: Sequence[int], start: int, end: int, block_ids: Sequence[int]) -> int:
        """Read the KV of the tokens before `start`, and write that of the tokens from there to `end`. Returns the next
        token."""
        known = states(tokens[:end])
        expected = torch.tensor(known, dtype=torch.int16, device=self.cache.device)
        positions = torch.arange(end, device=self.cache.device)
        blocks = torch.tensor(block_ids, device=self.cache.device)[positions // BLOCK_TOKENS]
        found = self._elements[blocks[:start], positions[:start] % BLOCK_TOKENS]
        assert bool((found == expected[:start, None, None]).all()), "the cache holds other bytes than were computed"
        self._elements[blocks[start:], positions[start:] % BLOCK_TOKENS] = expected[start:, None, None]
        return known[-1] % VOCABULARY


class SecondRunnerEngine:
    """An engine of one rank. blocks: the size of its cache. budget: tokens per step."""

    def __init__(
        self,
        model: Path,
        endpoint: str,
        *,
        blocks: int = 64,
        budget: int = 512,
        device: str = "cpu",
        options: dict[str, Any] | None = None,
    ) -> None:
        init_none_hash(sha256)
        config = copy.deepcopy(scheduler_config(model, blocks, budget, True, True, False))
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_extra_config = {
            "endpoint": endpoint,
            "always_load": True,
            "staging_bytes": "1MiB",
            **(options or {}),
        }
        self.scheduler = AsyncScheduler(
            config, cache_config(blocks, (0,)), StructuredOutputManager(config), block_size=BLOCK_TOKENS
        )
        self.pages = Pages(blocks, device)
        assert kv_transfer_state._KV_CONNECTOR_AGENT is None
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config(blocks, (0,)))
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.runner = get_kv_connector(config, {"layer0": self.pages.cache})
        assert isinstance(self.runner, ActiveKVConnector)
        self.requests: dict[str, Request] = {}
        self.preemptions = 0
        self.loaded: Counter[str] = Counter()  # request -> tokens to load from the store
        self._tokens: dict[str, list[int]] = {}  # the block ids of each request, as the runner knows them
        self._outcomes: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        wait_until(self._has_started)

    def _has_started(self) -> bool:
        self.step()
        return self.scheduler.connector._scheduler is not None

    def add(self, prompt: Sequence[int], max_tokens: int = 8) -> Request:
        name = f"request{len(self.requests)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.requests[name], self._tokens[name] = request, list(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Plan and execute a step; then report the previous step to the scheduler."""
        output = self.scheduler.schedule()
        self._outcomes.append((output, self._execute(output)))
        while len(self._outcomes) > bool(output.total_num_scheduled_tokens):
            self.scheduler.update_from_output(*self._outcomes.popleft())

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.preemptions += len(output.preempted_req_ids or ())
        for load in cast(StepPlan, output.kv_connector_metadata).loads:
            self.loaded[load.request_id] += len(load.keys) * BLOCK_TOKENS
        names = list(output.num_scheduled_tokens)
        if not names:
            return self.runner.no_forward(output)
        batch: Any = SimpleNamespace(
            idx_mapping=torch.arange(len(names)), req_ids=names, num_tokens=output.total_num_scheduled_tokens
        )
        self.runner.pre_forward(output, batch)
        sampled = [self._forward(name, output.num_scheduled_tokens[name]) for name in names]
        self.runner.finish_forward()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.runner.post_forward(output.finished_req_ids),
        )

    def _forward(self, name: str, count: int) -> list[int]:
        request, tokens = self.requests[name], self._tokens[name]
        end = request.num_computed_tokens
        [block_ids] = self.scheduler.kv_cache_manager.get_block_ids(name)
        token = self.pages.compute(tokens, end - count, end, block_ids)
        if request.is_prefill_chunk:
            return []
        if end == len(tokens):
            tokens.append(token)
        assert tokens[end] == token
        return [token]

    def finish(self, *requests: Request) -> list[list[int]]:
        """Run steps until these requests have ended. Returns their answers."""
        wait_until(lambda: self.step() or all(request.is_finished() for request in requests), 60)
        return [list(request.output_token_ids) for request in requests]

    def settle(self) -> None:
        """Run steps until nothing is in progress."""
        half = self.scheduler.connector._scheduler

        def idle() -> bool:
            self.step()
            return not self._outcomes and not self.scheduler.requests and not any(half.under_way.values())

        wait_until(idle, what=f"{half.under_way}")

    def close(self) -> None:
        kv_transfer_state.ensure_kv_transfer_shutdown()
        self.scheduler.connector.shutdown()
