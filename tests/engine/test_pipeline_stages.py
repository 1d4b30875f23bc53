"""Two pipeline stages store their layers in one store. The connector's worker halves are real; there is no model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.lookup import PrefixLookups
from tests.support.harness import Server, make_keys, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvstore_client.engine.paged.layout import BlockLayout
    from kvstore_client.engine.paged.plan import Load, RankStore, SavedBlock, Saves, StepPlan
    from kvstore_client.engine.paged.worker import WorkerHalf
    from kvstore_client.vllm.connector.rank_namespace import rank_namespace
    from tests.engine.engine_config import PLAIN, Layer, Rank

BLOCKS = 8
STAGES = (range(5), range(5, 8))  # the layers of each stage; vLLM may give stages different numbers of layers


class Stage:
    """The worker half of one stage, as in an engine that has just started."""

    def __init__(self, server: Server, place: Rank, number: int) -> None:
        place.be(pp_rank=number, pp=len(STAGES))
        layers: dict[str, Any] = {f"model.layers.{at}.attn": Layer(FullAttentionSpec(**PLAIN)) for at in STAGES[number]}
        place.config.compilation_config.static_forward_context = layers
        self.caches = {name: torch.zeros((BLOCKS, 2, 32, 16), dtype=torch.bfloat16) for name in layers}
        self.layout = BlockLayout(self.caches, BLOCKS)
        namespace = rank_namespace(
            place.config, self.layout, list(layers.values()), "page-0", tenant="", weights="stages"
        )
        counters = Counters()
        self.guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
        self.worker = WorkerHalf(
            self.guard,
            self.layout,
            store=RankStore(namespace, 32),
            timeout_s=5,
            replica=(0, 1),
            counters=counters,
        )

    def compute(self) -> None:
        for tensor in self.caches.values():
            tensor.copy_(torch.randint(-100, 100, tensor.shape))

    def save(self, keys: Sequence[bytes]) -> None:
        parents = [None, *keys[:-1]]
        saves = Saves(0, [SavedBlock(key, at, at, parents[at]) for at, key in enumerate(keys)])
        self.worker.begin_step(StepPlan(saves=saves))
        self.worker.saves.save()
        self.worker.saves.order_copies()
        self.worker.take_report()
        assert self.worker.saves._out.drain(10)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> set[int]:
        """Load these blocks, and return those that could not be loaded."""
        self.worker.loads.load(Load("it", keys=list(keys), block_ids=list(block_ids), within_s=10.0))
        wait_until(self.worker.loads.take_loaded)
        return self.worker.loads.take_failed_block_ids()

    def close(self) -> None:
        self.worker.close()
        self.guard.close()


def test_a_block_exists_once_all_stages_have_stored_their_layers(server: Server, rank: Rank) -> None:
    keys = make_keys(4)
    before = [Stage(server, rank, number) for number in range(2)]
    assert [each.layout.block_bytes for each in before] == [5 * 2048, 3 * 2048]
    for stage, count in zip(before, (4, 3), strict=True):
        stage.compute()
        stage.save(keys[:count])
    lookups = PrefixLookups([each.guard for each in before], timeout_s=5, counters=Counters())
    lookup = lookups.ask(keys)
    assert wait_until(lambda: lookups.poll(lookup)) == 3, "the second stage has not saved the last block"

    after = [Stage(server, rank, number) for number in range(2)]
    for old, new in zip(before, after, strict=True):
        assert new.guard.namespace == old.guard.namespace
        assert not new.load(keys[:3], [6, 0, 3])
        for name, tensor in new.caches.items():
            assert (tensor[[6, 0, 3]] == old.caches[name][:3]).all()
    assert [each.load(keys[3:], [7]) for each in after] == [set(), {7}]
    lookups.close()
    for each in (*before, *after):
        each.close()
