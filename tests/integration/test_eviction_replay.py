"""A server behaves as the eviction simulator predicts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.eviction import __main__ as program
from benchmarks.eviction.baselines import Optimum
from benchmarks.eviction.live import AGREEMENT, LiveError, own_server, replay_live
from benchmarks.eviction.simulator import POLICIES, replay
from benchmarks.eviction.synthetic import make_trace
from kvstore_client import KVStoreClient, Namespace
from tests.support.harness import StartServer

TRACE = make_trace("agents-and-conversations").first(1000)
NAMESPACE = Namespace(model="another", dtype="uint8", block_tokens=1, block_bytes=4096)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("memory", "wanted", "call_blocks"), [("1MiB", 300, 16), ("4MiB", 1500, None)])
def test_a_live_server_has_the_simulated_hit_rate(
    policy: str, memory: str, wanted: int, call_blocks: int | None, start_server: StartServer
) -> None:
    server = start_server("--policy", policy, memory=memory, segment="1MiB")
    result = replay_live(TRACE, server.endpoint, wanted, call_blocks)
    assert result.policy == policy
    assert result.capacity == pytest.approx(wanted, rel=0.02)
    assert abs(result.live - result.simulated) <= (0.0 if policy == "lru" else AGREEMENT)  # others hash with a new key
    most = replay(TRACE, Optimum(TRACE, TRACE.distinct))
    assert most / 4 < result.live < most  # the server had to evict blocks, and had useful hits
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        assert not any(namespace.blocks for shard in client.info().shards for namespace in shard.namespaces)


def test_shared_memory_reads_evict_as_simulated(start_server: StartServer, tmp_path: Path) -> None:
    """Blocks that the client has released in shared memory can be evicted at once, although it has sent no message."""
    server = start_server("--policy", "lru", "--unix-socket", str(tmp_path / "s"), memory="1MiB", segment="1MiB")
    result = replay_live(TRACE.first(500), server.endpoint, 300)
    assert result.live == result.simulated


def test_a_server_that_could_not_agree_is_refused(start_server: StartServer) -> None:
    two = start_server("--shards", "2", memory="2MiB", segment="1MiB")
    with pytest.raises(LiveError, match="has 2 shards"):
        replay_live(TRACE, two.endpoint, 300)
    server = start_server(memory="1MiB", segment="1MiB")
    with pytest.raises(LiveError, match=r"start the server with --memory between 2000000B and"):
        replay_live(TRACE, server.endpoint, 2_000_000)
    with pytest.raises(LiveError, match="start the server with --memory between"):
        replay_live(TRACE, server.endpoint, 2)
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        client.set([bytes(16)], [bytes(4096)])
        with pytest.raises(LiveError, match="holds 1 other blocks"):
            replay_live(TRACE, server.endpoint, 300)


def test_the_program_prints_both_hit_rates(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--policy", "lru", memory="1MiB", segment="1MiB")
    arguments = ["--synthetic", "agents", "--requests", "300", "--capacities", "5", "--policy", "lru"]
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks.eviction", *arguments, "--endpoint", server.endpoint])
    assert program.main() == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("agents at 5 %: lru, ") and line.endswith(": agree")


def test_a_started_server_has_the_requested_room() -> None:
    with own_server(1500) as endpoint:
        assert replay_live(TRACE.first(500), endpoint, 1500).capacity == pytest.approx(1500, rel=0.02)
