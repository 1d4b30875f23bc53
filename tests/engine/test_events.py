"""A router that follows a real engine's KV events knows which blocks the connector's tiers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.engine.routing import Routes
from tests.engine.engines import BLOCK, BLOCK_BYTES, StartEngine, namespaces, prompt
from tests.support.harness import Server, wait_until

TIER_BLOCKS = 64


class Router:
    """Builds an index from the events, as routers do: it subscribes to them, and requests the events that it missed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], live: str, replay: str) -> None:
        self.blocks: dict[str, dict[bytes, list[int]]] = {}  # medium -> hash -> tokens
        self.parents: dict[bytes, bytes | None] = {}
        self.next = 0  # number of the next batch
        self._live = context.socket(zmq.SUB)
        self._live.connect(live)
        self._live.subscribe(b"")
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)

    def catch_up(self) -> None:
        """Request all batches from `next` on."""
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(5000), "no replay"
            *_, number, payload = self._replay.recv_multipart()
            if not payload:
                return
            self._take(int.from_bytes(number, "big", signed=True), payload)

    def listen(self) -> None:
        """Process the events that have arrived. If there is a gap, request the missing ones with `catch_up`."""
        while self._live.poll(200):
            _, number, payload = self._live.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number != self.next:
            assert number < self.next, "a batch was missed"
            return
        self.next += 1
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        blocks = self.blocks.setdefault(event["medium"], {})
        if event["type"] == "BlockStored":
            size = event["block_size"]
            parent = event["parent_block_hash"]
            for number, block_hash in enumerate(event["block_hashes"]):
                blocks[block_hash] = event["token_ids"][number * size : (number + 1) * size]
                self.parents[block_hash] = parent
                parent = block_hash
        else:
            assert event["type"] == "BlockRemoved"
            for block_hash in event["block_hashes"]:
                del blocks[block_hash]

    def close(self) -> None:
        self._live.close(0)
        self._replay.close(0)


def test_an_index_built_from_the_events_is_exact(server: Server, start_engine: StartEngine, tmp_path: Path) -> None:
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay}
    engine = start_engine(
        server.endpoint,
        options={"cpu_bytes": TIER_BLOCKS * BLOCK_BYTES, "cpu_policy": "lru"},
        kv_events_config=events,
        enable_prefix_caching=True,
        num_gpu_blocks_override=80,
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )
    questions = [prompt(seed) for seed in range(90, 98)]
    engine.generate(questions[0])  # before any listener subscribes
    with zmq.Context() as context:
        router = Router(context, live, replay)
        try:
            router.catch_up()
            for question in (*questions, *questions[:3]):  # too many for the tier: the last ones return
                engine.generate(question)
                engine.settle()
            wanted = set(engine.tier_keys())

            def knows() -> bool:
                router.listen()
                return router.blocks["CPU"].keys() == wanted

            wait_until(knows, what="the index is that of the tier")
            assert 0 < len(wanted) <= TIER_BLOCKS
            assert router.blocks["GPU"], "the engine's own events come the same way"

            [described] = [each for each in namespaces(server) if each.blocks]
            namespace = msgspec.json.decode(described.namespace, type=Namespace)
            stored = list(router.blocks["STORAGE"])
            with KVStoreClient(server.endpoint, namespace) as client:
                assert client.contains(stored).all() and described.blocks == len(stored)
            # Hashes, parents and tokens are those of the engine's own events, so a router can follow a prompt.
            found = {tuple(tokens): block_hash for block_hash, tokens in router.blocks["STORAGE"].items()}
            followed = 0
            for question in questions:
                parent = None
                for start in range(0, len(question) // BLOCK * BLOCK, BLOCK):
                    block_hash = found.get(tuple(question[start : start + BLOCK]))
                    if block_hash is None:  # lost in transit
                        break
                    assert router.parents[block_hash] == parent
                    parent, followed = block_hash, followed + 1
            assert followed > TIER_BLOCKS
            with Routes() as routes:  # `Routes` gets all events from the replay, batch by batch
                routes.add("engine", live, replay)
                have = {medium: set(router.blocks[medium]) for medium in ("GPU", "CPU")}  # routers ask the store itself
                have["any"] = have["GPU"] | have["CPU"]

                def agrees() -> bool:
                    for question in questions:
                        hashes, size = routes.index.chain(question)
                        for medium, run in routes.index.runs(hashes).get("engine", {}).items():
                            wanted = next((n for n, each in enumerate(hashes) if each not in have[medium]), len(hashes))
                            if (run, size) != (wanted, BLOCK):
                                return False
                    return routes.index.blocks == len(set().union(*have.values()))

                wait_until(agrees, what="the index of the routes is that of the events")
        finally:
            router.close()
