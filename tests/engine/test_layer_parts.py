"""Blocks that are divided into layer slices: real engines send each slice when it is computed, and read it when it
arrives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from kvstore_client import KVStoreClient
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.slices import slice_keys
from kvstore_client.engine.transfer_out import SLICE_TTL_S
from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Expected,
    StartEngine,
    check_answers,
    full_blocks,
    namespaces,
    prompt,
)
from tests.engine.test_hand_over import CHUNKS
from tests.engine.test_kv_layout import BLOCKS, LAYERS, caches, equal
from tests.support.clock import Clock
from tests.support.harness import Server, StartServer, make_keys, make_namespace, namespace_info, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.engine.paged.layout import BlockLayout
    from kvstore_client.engine.paged.plan import Load, RankStore, SavedBlock, Saves, StepPlan, WorkerReport
    from kvstore_client.engine.paged.worker import WorkerHalf

PARTS = {"layer_parts": 4}
OF = 4
KEYS = make_keys(3)


# ---- one rank ----------------------------------------------------------------------------------------------------


class Rank:
    """A rank without an engine: its tensors, its worker half and a store."""

    def __init__(self, server: Server, slices: int = OF) -> None:
        self.tensors = caches("LBHNC")
        self.counters = Counters()
        layout = BlockLayout(self.tensors, BLOCKS, slices=slices)
        self.namespace = make_namespace(layout.slice_bytes, "layer-parts")
        self.guard = StoreGuard(server.endpoint, self.namespace, timeout_s=5, counters=self.counters)
        self.worker = WorkerHalf(
            self.guard,
            layout,
            store=RankStore(self.namespace, 16, None, slices),
            timeout_s=5,
            replica=(0, 1),
            counters=self.counters,
        )

    def begin_step(self, job: int = 0) -> None:
        """Begin a step that computes and saves the cache's first blocks."""
        saves = Saves(job, list(map(SavedBlock, KEYS, [4, 9, 2], [0, 1, 2], [None, *KEYS[:2]])))
        self.worker.begin_step(StepPlan(saves=saves))

    def end_step(self) -> WorkerReport:
        """End the step, wait until everything is sent, and return the worker's report."""
        self.worker.saves.save()
        self.worker.saves.take_saved()
        assert self.worker.saves._out.drain(10)
        report = self.worker.take_report()
        assert report is not None
        return report

    def compute(self, *layers: int) -> None:
        for layer in layers:
            self.worker.saves.layer_computed(f"model.layers.{layer}.attn")
        assert self.worker.saves._out.drain(10)

    def load(self, **how: float | bool) -> set[int]:
        """Load all blocks into cache blocks 3, 4 and 5. Returns those that could not be loaded."""
        self.worker.loads.load(Load("it", keys=KEYS, block_ids=[3, 4, 5], within_s=5.0, **how))  # type: ignore[arg-type]
        wait_until(self.worker.loads.take_loaded)
        return self.worker.loads.take_failed_block_ids()

    def close(self) -> None:
        self.worker.close()
        self.guard.close()


@pytest.fixture
def timed(start_server: StartServer, clock: Clock) -> Server:
    return start_server(**clock.environment)


@pytest.fixture
def rank(timed: Server) -> Iterator[Rank]:
    rank = Rank(timed)
    yield rank
    rank.close()


@pytest.fixture
def client(timed: Server, rank: Rank) -> Iterator[KVStoreClient]:
    with KVStoreClient(timed.endpoint, rank.namespace) as client:
        yield client


def there(client: KVStoreClient) -> list[list[bool]]:
    """Return, for each block, which of its slices the store has."""
    return client.contains(slice_keys(KEYS, range(OF))).reshape(-1, OF).tolist()  # type: ignore[no-any-return]


def test_a_slice_is_sent_when_its_last_layer_is_computed(rank: Rank, client: KVStoreClient) -> None:
    rank.begin_step()
    rank.compute(0, 1)
    assert not any(map(any, there(client)))
    rank.compute(2)
    assert there(client) == [[True, False, False, False]] * 3
    rank.compute(6, 7, 8)  # in any order
    assert there(client) == [[True, False, True, False]] * 3
    report = rank.end_step()
    assert there(client) == [[True] * 4] * 3, "at the end of a step all layers are computed, whoever told of them"
    assert report.copied == {0: 1} and not report.broken
    assert report.released == report.stored == {(0, 4): 1, (0, 9): 1, (0, 2): 1}
    counted = rank.counters.take()
    assert counted["transfer_out_blocks"] == counted["swap_out_blocks"] == 3


def test_a_slice_that_never_comes_leaves_nothing_behind(rank: Rank, client: KVStoreClient, clock: Clock) -> None:
    rank.begin_step()
    rank.compute(*range(LAYERS - 1))
    assert there(client) == [[True, True, True, False]] * 3
    clock.advance(SLICE_TTL_S - 1)
    assert there(client) == [[True, True, True, False]] * 3
    clock.advance(1.5)
    wait_until(lambda: not client.info().shards[0].namespaces, what="the store is empty")


def test_a_complete_block_outlives_the_ttl_of_its_slices(rank: Rank, client: KVStoreClient, clock: Clock) -> None:
    rank.begin_step()
    rank.compute(*range(LAYERS))
    clock.advance(10 * SLICE_TTL_S)
    assert there(client) == [[True] * 4] * 3
    assert not rank.load()
    for tensor in rank.tensors.values():
        assert all(equal(tensor[new], tensor[old]) for old, new in enumerate((3, 4, 5)))


def test_a_block_that_lost_a_slice_early_does_not_count_as_stored(
    rank: Rank, client: KVStoreClient, clock: Clock
) -> None:
    rank.begin_step()
    rank.compute(0, 1, 2)
    clock.advance(SLICE_TTL_S + 1)
    rank.compute(*range(3, LAYERS))
    report = rank.end_step()
    assert report.released.total() == 3 and not report.stored
    assert rank.load() == {3, 4, 5}
    rank.begin_step(job=1)
    rank.compute(*range(LAYERS))
    assert not rank.load()


def test_slices_of_another_engine_combine_with_this_ones(
    timed: Server, rank: Rank, client: KVStoreClient, clock: Clock
) -> None:
    """Another engine has set half of the slices and then died, so its slices alone would expire."""
    other = Rank(timed)
    other.begin_step()
    other.compute(*range(6))
    clock.advance(SLICE_TTL_S - 5)
    rank.begin_step()
    rank.compute(*range(LAYERS))
    other.close()
    clock.advance(10)
    assert there(client) == [[True] * 4] * 3 and namespace_info(client).created == 12


def test_slices_are_loaded_on_arrival_and_blocks_count_when_complete(rank: Rank, client: KVStoreClient) -> None:
    wanted = [tensor[:3].clone() for tensor in rank.tensors.values()]
    rank.begin_step()
    rank.compute(*range(6))
    with client.promise(slice_keys(KEYS, range(OF))):
        rank.worker.loads.load(Load("it", keys=KEYS, block_ids=[3, 4, 5], within_s=30.0, waits=True))
        tensors = list(rank.tensors.values())
        wait_until(lambda: equal(tensors[5][3:6], wanted[5]), what="the first parts are there")
        assert not rank.worker.loads.take_loaded() and not equal(tensors[6][3:6], wanted[6])
        rank.compute(*range(6, LAYERS))
        wait_until(rank.worker.loads.take_loaded)
    assert not rank.worker.loads.take_failed_block_ids()
    assert all(equal(tensor[3:6], want) for tensor, want in zip(tensors, wanted, strict=True))
    assert rank.counters.take()["transfer_in_blocks"] == 3


def test_blocks_that_lack_a_slice_are_missing(rank: Rank, client: KVStoreClient) -> None:
    rank.begin_step()
    rank.compute(*range(LAYERS))
    client.delete([KEYS[1] + bytes([2])])
    assert rank.load() == {4, 5}, "what is behind a gap is of no use"
    assert rank.load(waits=True) == {4, 5}


def test_layers_must_divide_evenly_into_slices() -> None:
    with pytest.raises(ValueError, match=f"layer_parts is 5.* {LAYERS} layers"):
        BlockLayout(caches("LBHNC"), BLOCKS, slices=5)


# ---- engines; `test_hand_over.py` hands over prompts in parts, too ------------------------------------------------


@pytest.mark.parametrize("cpu_bytes", [0, "8MiB"])
def test_blocks_kept_in_slices_are_loaded_by_every_other_engine(
    server: Server, start_engine: StartEngine, expected: Expected, cpu_bytes: int | str
) -> None:
    """The prompts are computed in chunks. With a CPU tier, the next loads take a part of each prompt from that tier."""
    options = {**PARTS, "cpu_bytes": cpu_bytes, "always_load": True}
    first, second = (start_engine(server.endpoint, options=options, **CHUNKS) for _ in range(2))
    questions = [prompt(seed, 900) for seed in (1, 2, 3)]
    for question in questions:  # one at a time, so that the CPU tier has room for waiting blocks
        check_answers(first, expected, question, cached=0)
        first.settle()
    (namespace,) = namespaces(server)
    assert namespace.block_bytes * OF == BLOCK_BYTES
    assert namespace.blocks == OF * sum(len(question + [0] * 8) // BLOCK for question in questions)
    for engine in (second, first, second):
        engine.reset_prefix_cache()
        check_answers(engine, expected, *questions, cached=full_blocks(900))
    assert second.metrics()["failed_loads"] == first.metrics()["failed_loads"] == 0


def test_engines_with_other_slices_do_not_see_each_others_blocks(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    for options in ({}, PARTS, {"layer_parts": 2}):
        engine = start_engine(server.endpoint, options=options, **CHUNKS)
        check_answers(engine, expected, prompt(1), cached=0)
        engine.settle()
        assert engine.stop() == 0
    assert len(namespaces(server)) == 3
