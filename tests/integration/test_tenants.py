"""Quotas of tenants: a tenant that floods the store takes nothing that is guaranteed to another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore.wire import TenantInfo
from kvstore_client import ConnectionLost, KVStoreClient, Namespace, ProtocolError
from kvstore_client.engine.client_store import ClientOptions
from kvstore_client.engine.guard import Counters, StoreGuard
from tests.support.harness import Server, blocks_of, make_keys, make_namespace, wait_until

BLOCK_BYTES = 65_536
MIB = 1 << 20
LIMITS = """
[tenants.quiet]
memory_guaranteed = "12MiB"

[tenants.small]
memory = "4MiB"
disk = "8MiB"
pinned = "1MiB"
connections = 2

[tenants.slow]
requests_per_s = 5

[tenants.heavy]
bytes_per_s = "1MiB"
"""


class Tenants:
    """A server with the tenants above, and a token for each."""

    def __init__(self, folder: Path, disk_write: str = "evicted") -> None:
        self.file = file = folder / "auth.toml"
        self.tokens = {
            name: add(file, name, name, ["read", "write", "delete", "monitor"])
            for name in ("quiet", "noisy", "small", "slow", "heavy")
        }
        file.write_text(file.read_text() + LIMITS)
        self.audit = folder / "audit.jsonl"
        self.server = Server(
            folder / "log",
            *("--auth", str(file), "--audit", str(self.audit), "--memory", "32MiB", "--segment", "1MiB"),
            *("--disk", str(folder / "disk"), "--disk-size", "64MiB", "--http", "127.0.0.1:0"),
            *("--disk-write", disk_write),
        )

    def client(self, tenant: str, namespace: Namespace | None = None) -> KVStoreClient:
        return KVStoreClient(
            self.server.endpoint, namespace or make_namespace(BLOCK_BYTES, "m"), token=self.tokens[tenant]
        )


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Tenants]:
    tenants = Tenants(tmp_path)
    yield tenants
    if tenants.server.running:
        tenants.server.stop()


def test_a_burst_that_waits_for_the_disk_is_refused_beyond_the_memory_of_its_tenant(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path, disk_write="all")
    try:
        with tenants.client("small") as client:
            keys = make_keys(160)  # 10 MiB, and the tenant has 4 MiB
            found = [client.set(some, blocks_of(some, BLOCK_BYTES)) for some in (keys[:48], keys[48:])]
            assert (found[0].created, found[0].refused) == (48, 0)
            assert found[1].refused >= 48 and found[1].created + found[1].refused == 112
            present = client.contains(keys)
            assert present[:48].all() and present.sum() == 160 - found[1].refused, "nothing that was stored is lost"
    finally:
        tenants.server.stop()


def state(client: KVStoreClient) -> TenantInfo:
    (info,) = client.info().shards[0].tenants
    return info


def fill(client: KVStoreClient, count: int, first: int) -> list[bytes]:
    keys = make_keys(count, first)
    for at in range(0, count, 16):
        some = keys[at : at + 16]
        client.set(some, blocks_of(some, BLOCK_BYTES))
    return keys


def test_a_tenant_that_floods_the_store_evicts_itself(tenants: Tenants) -> None:
    with tenants.client("quiet") as quiet, tenants.client("noisy") as noisy:
        kept = fill(quiet, 160, 0)  # 10 MiB, less than its guaranteed memory
        flood = fill(noisy, 1600, 10_000)  # 100 MiB
        assert int(quiet.contains(kept).sum()) == 160
        assert quiet.get(kept[:32]).blocks == blocks_of(kept[:32], BLOCK_BYTES)
        assert state(quiet).memory_bytes >= 10 * MIB
        assert noisy.contains(flood[-64:]).sum() > 0  # it gets the remaining memory
        # A tenant also gets its guaranteed memory if the other one has taken everything.
        more = fill(quiet, 32, 1000)
        assert int(quiet.contains(kept + more).sum()) == 192
        assert [each.tenant for each in noisy.info().shards[0].tenants] == ["noisy"]


def test_without_a_guarantee_tenants_share_equally(tenants: Tenants) -> None:
    with tenants.client("slow") as one, tenants.client("noisy") as noisy:
        del one
        fill(noisy, 1000, 0)
        with tenants.client("quiet") as quiet:
            kept = fill(quiet, 256, 5000)  # 16 MiB: its guaranteed 12 MiB, and a part of the rest
            fill(noisy, 1000, 20_000)
            assert int(quiet.contains(kept).sum()) == 256


def test_a_tenant_stays_below_its_maximum_in_memory_and_on_disk(tenants: Tenants) -> None:
    with tenants.client("small") as small:
        keys = fill(small, 512, 0)  # 32 MiB
        assert state(small).memory_bytes <= 4 * MIB
        assert state(small).disk_bytes <= 8 * MIB
        assert small.contains(keys[-16:]).any()
        info = state(small)
        assert (info.memory_limit_bytes, info.disk_limit_bytes) == (4 * MIB, 8 * MIB)


def test_a_tenant_gives_memory_back_when_its_maximum_is_lowered(tenants: Tenants) -> None:
    with tenants.client("small") as small, tenants.client("quiet") as quiet:
        kept = fill(quiet, 64, 0)
        fill(small, 64, 0)
        assert 2 * MIB < state(small).memory_bytes <= 4 * MIB
        beside = tenants.file.with_suffix(".new")
        beside.write_text(tenants.file.read_text().replace('memory = "4MiB"', 'memory = "2MiB"'))
        beside.chmod(0o600)
        beside.rename(tenants.file)
        wait_until(lambda: state(small).memory_bytes <= 2 * MIB, what="the tenant is within its maximum")
        assert state(small).memory_bytes == 2 * MIB  # and not below
        assert quiet.contains(kept).all()


def test_pins_of_a_tenant_are_limited(tenants: Tenants) -> None:
    with tenants.client("small") as small:
        keys = fill(small, 48, 0)
        assert small.contains(keys, pin_s=30.0).all()  # 3 MiB are found, and 1 MiB is pinned
        assert state(small).refused == {"pinned": 1}
        assert small.contains(keys[-8:], pin_s=30.0).all()
        assert state(small).refused == {"pinned": 2}
        fill(small, 256, 1000)
        assert small.match_prefix(keys) == 16


def test_connections_of_a_tenant_are_limited(tenants: Tenants) -> None:
    with tenants.client("small"), tenants.client("small") as second:
        with pytest.raises(ConnectionLost, match="tenant 'small' is at its limit of connections = 2"):
            tenants.client("small")
        assert "refused at a limit: tenant 'small' is at its limit of connections = 2" in tenants.server.log.read_text()
        assert state(second).connections == 2
        assert state(second).refused == {"connections": 1} and second.info().shards[0].refused["tenant"] == 1
    with tenants.client("quiet") as quiet:  # no other tenant is delayed
        assert quiet.match_prefix(make_keys(1)) == 0
    client = wait_until(lambda: _connected(tenants), what="a place is free again")
    client.close()


def _connected(tenants: Tenants) -> KVStoreClient | None:
    try:
        return tenants.client("small")
    except ConnectionLost:
        return None


def test_requests_and_bytes_beyond_a_limit_are_refused_and_recorded(tenants: Tenants) -> None:
    keys = make_keys(1)
    with tenants.client("slow") as slow:
        with pytest.raises(ProtocolError, match="tenant 'slow' is at its limit of requests_per_s = 5"):
            for _ in range(100):
                slow.contains(keys)
        wait_until(lambda: _asked(slow), what="soon it may ask again")
        assert state(slow).refused.keys() == {"requests_per_s"}
        assert slow.info().shards[0].refused["tenant"] == sum(state(slow).refused.values())
        assert "refused at a limit: tenant 'slow' is at its limit of requests_per_s" in tenants.server.log_text()
    with tenants.client("heavy") as heavy:
        many = make_keys(64, 100)
        heavy.set(many, blocks_of(many, BLOCK_BYTES))  # 4 MiB in one request: accepted, and charged to later ones
        with pytest.raises(ProtocolError, match="bytes_per_s"):
            heavy.get(many)
        assert state(heavy).refused.keys() == {"bytes_per_s"}
    lines = [json.loads(line) for line in tenants.audit.read_text().splitlines()]
    assert {line["limit"] for line in lines if line["event"] == "quota"} == {"requests_per_s", "bytes_per_s"}


def _asked(client: KVStoreClient) -> bool:
    try:
        client.contains(make_keys(1))
    except ProtocolError:
        return False
    return True


def test_an_engine_beyond_its_limit_only_misses(tenants: Tenants) -> None:
    keys, counters = make_keys(1), Counters()
    guard = StoreGuard(
        tenants.server.endpoint,
        make_namespace(BLOCK_BYTES, "m"),
        ClientOptions(token=tenants.tokens["slow"]),
        timeout_s=3.0,
        counters=counters,
    )
    found = [guard.call(lambda store: store.match_prefix(keys), -1) for _ in range(40)]
    guard.close()
    assert set(found) == {0, -1}
    assert counters.take()["failed_calls"] == found.count(-1) > 0
