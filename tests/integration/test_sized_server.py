"""A real server of the size that `kvstore size` prints keeps as many contexts as the calculator says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.harness import Server, environment

SHAPE = {"layers": 2, "kv_heads": 2, "head_size": 64}  # 1024 bytes a token in bfloat16


def size(*arguments: str) -> Any:
    shape = [word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = forked.run("kvstore_cli", "size", *shape, *arguments, "--json", env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The contexts nearly fill the printed size: with one more user, another segment would be needed.
@pytest.mark.parametrize(
    ("users", "context", "tp", "shards"), [(127, 1024, 1, 1), (120, 1024, 2, 1), (115, 1024, 1, 2)], ids=str
)
def test_the_printed_server_holds_all_contexts_without_eviction(
    users: int, context: int, tp: int, shards: int, tmp_path: Path
) -> None:
    shared = 512
    found = size(
        *("--context", str(context), "--users", str(users), "--shared-tokens", str(shared)),
        *("--tp", str(tp), "--shards", str(shards)),
    )
    assert found["blocks_bytes"] > 0.85 * found["memory_bytes"]
    server = Server(tmp_path / "log", *shlex.split(found["command"])[1:])
    try:
        rng = np.random.default_rng(0)
        beginning = rng.integers(0, 1 << 17, shared)
        contexts = [np.append(beginning, rng.integers(0, 1 << 17, context - shared)) for _ in range(users)]
        for rank in range(tp):
            namespace = Namespace.for_model(
                "sized", **SHAPE | {"kv_heads": 2 // tp}, dtype="bfloat16", block_tokens=16, rank=rank, world=tp
            )
            assert namespace.block_bytes == found["part_bytes"]
            with KVStoreClient(server.endpoint, namespace) as client:
                keys = [namespace.keys(tokens) for tokens in contexts]
                assert all(len(each) == found["context_blocks"] for each in keys)
                blocks = np.zeros((found["context_blocks"], namespace.block_bytes), dtype=np.uint8)
                for each in keys:
                    client.set(each, blocks, deferred=False)
                assert all(client.match_prefix(each) == len(each) for each in keys)
                shown = client.info().shards
        assert sum(each.blocks for shard in shown for each in shard.namespaces) == found["blocks"] * tp
        assert sum(each.evicted for shard in shown for each in shard.namespaces) == 0
        assert sum(shard.memory_limit_bytes for shard in shown) == found["memory_bytes"]
    finally:
        server.kill()
