"""Measures the cost of shards: placing keys, splitting a batch, and two shards compared with one on the same cores.

* placement: keys a second over 64 shards on one thread, with equal weights, different weights, and two replicas in
  zones.
* split: the client's CPU time to divide a batch of 512 keys among 64 shards: the owners, the groups, the keys of each
  request and its bytes. Only the sockets are left out.
* two shards: the same bytes through one shard and through two, in each round, on the same cores of this machine.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, random_keys
from benchmarks.remote_kv_cache.transfers import (
    Blocks,
    connect,
    get_into_operation,
    set_operation,
    stream_get_operation,
)
from kvstore import wire
from kvstore.cluster.placement import Placement
from kvstore_client._calls.batches import keyed_message, milliseconds, take
from kvstore_client._links.call import Call, Message
from kvstore_client._links.link import Link
from kvstore_client._links.link_pool import LinkPool
from kvstore_client._links.view import ShardEntry, View
from kvstore_client.endpoints import parse_endpoints

SHARDS: Final = 64
SHARDS_PER_NODE: Final = 4
ZONES: Final = 4
KEYS: Final = 1 << 20
QUICK_KEYS: Final = 1 << 16
BATCH: Final = 512
SPLITS: Final = 200
QUICK_SPLITS: Final = 10

PLACEMENT: Final = "placement"
SPLIT: Final = "split"
TWO_SHARDS: Final = "two shards"
EQUAL: Final = "64 equal shards"
DIFFERENT: Final = "64 shards of different weights"
REPLICAS: Final = "2 replicas, 16 nodes, 4 zones"
SPLIT_512: Final = "512 keys over 64 shards"


def _names() -> list[str]:
    return [f"node-{number // SHARDS_PER_NODE}/{number % SHARDS_PER_NODE}" for number in range(SHARDS)]


def measure_placement(benchmark: Benchmark) -> None:
    """Measure placement in keys a second."""
    keys = random_keys(QUICK_KEYS if benchmark.quick else KEYS, 1)
    names = _names()
    nodes = [name.partition("/")[0] for name in names]
    zones = [f"zone-{number // SHARDS_PER_NODE % ZONES}" for number in range(SHARDS)]
    equal = Placement(names, [1.0] * SHARDS, nodes, zones)
    different = Placement(names, [1.0 + number % 7 / 3 for number in range(SHARDS)], nodes, zones)

    def owners_of_equal() -> None:
        equal.owners(keys)

    def owners_of_different() -> None:
        different.owners(keys)

    def replicas() -> None:
        equal.replicas(keys, 2)

    runs = {EQUAL: owners_of_equal, DIFFERENT: owners_of_different, REPLICAS: replicas}
    benchmark.measure(PLACEMENT, [Operation(name, run) for name, run in runs.items()], keys=len(keys))


def measure_split(benchmark: Benchmark) -> None:
    """Measure the CPU seconds of one batch, as the median of many."""
    pool = LinkPool(parse_endpoints("tcp://127.0.0.1:1"), b"", 1.0, 1)  # never connected; it only numbers the requests
    places = []
    for name in _names():
        link = Link(name, "127.0.0.1", 1, pool.hello, lambda: None)
        node = name.partition("/")[0]
        places.append(ShardEntry(link, node, node))
    view = View(places)
    keys = random_keys(BATCH, 2)
    everything = np.arange(BATCH)

    def message(call: Call) -> Message:
        mine = take(keys, call.positions)
        request = wire.Get(call.id, milliseconds(10.0), len(mine), mine.shape[1], 0)
        return keyed_message(request, mine)

    def split() -> None:
        readers = view.readers(keys, 1)
        calls = [
            Call(link, pool.next_id(), positions, message) for link, positions in view.split(readers[:, 0], everything)
        ]
        for call in calls:
            for _ in call.message():
                pass

    def run() -> float:
        times = []
        for _ in range(QUICK_SPLITS if benchmark.quick else SPLITS):
            begin = time.process_time()
            split()
            times.append(time.process_time() - begin)
        return float(np.median(times))

    benchmark.measure(SPLIT, [Operation(SPLIT_512, run)])


def measure_two_shards(benchmark: Benchmark) -> None:
    """Measure one shard and two shards with the same bytes."""
    operations = []
    with contextlib.ExitStack() as stack:
        for count in (1, 2):
            blocks = Blocks(benchmark.batch, HEADLINE.block_bytes, seed=count)
            # Twice the bytes, because keys are not spread evenly over two shards.
            endpoint = stack.enter_context(kvstore_server(2 * blocks.total_bytes, shards=count))
            client = stack.enter_context(connect(endpoint, "shards", HEADLINE.block_bytes))
            name = f"{count} shard{'s' * (count > 1)}"
            operations += [
                set_operation(client, blocks, f"set {name}", ""),
                get_into_operation(client, blocks, f"get_into {name}", ""),
                stream_get_operation(client, blocks, f"stream_get {name}", ""),
            ]
        benchmark.measure(TWO_SHARDS, operations, references=("set 1 shard", "get_into 1 shard", "stream_get 1 shard"))


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    measure_placement(benchmark)
    measure_split(benchmark)
    measure_two_shards(benchmark)
    benchmark.finish()


if __name__ == "__main__":
    main()
