"""No block that was acknowledged with two copies is lost in any sequence of faults.

There are four nodes of two shards each; two of the nodes have a disk tier on a small file system. Two clients set and
read chains. The test itself sets blocks that no client reads, so that only the nodes can restore their copies. After a
fault is repaired, the next one comes as soon as every shard has all of its copies. Before that, all acknowledged blocks
are read: every byte is right and no block is missing. No call ends more than a moment after its deadline.

KVSTORE_CHAOS_ROUNDS is the number of rounds: 200 under `make chaos`. With the KVSTORE_CHAOS_SEED of an earlier run, the
same faults are repeated, as far as timing allows.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.wire.queries import ShardQueries
from kvstore_client import KVStoreClient
from tests.chaos.cluster_clients import Clients
from tests.chaos.cluster_load import keys_of
from tests.support.cluster import CLIENTS, SERVE_S, Site, lacking
from tests.support.disk import KiB, MiB, compile_io_errors, io_errors_in, mount_tmpfs, unmount
from tests.support.harness import Server, block_of, blocks_of, make_keys, make_namespace, wait_until
from tests.support.network import need, unavailable

FULL = os.environ.get("KVSTORE_CHAOS") == "full"
ROUNDS = int(os.environ.get("KVSTORE_CHAOS_ROUNDS") or 2)
SEED = int(os.environ.get("KVSTORE_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
STRETCH = 10  # rounds with the same blocks; then these are purged, so that memory and time stay bounded
NODES = ("n1", "n2", "n3", "n4")
DISKS = ("n1", "n2")
SHARDS = 2
REPLICAS = 2
BLOCK_BYTES = 8 * KiB
TIMEOUT_S = 2.0
LATE_S = 0.2  # by how much a call may exceed its deadline
RECOVERY_S = 3.0  # until clients find everything again after the members have returned
TWO_COPIES_S = 120.0  # from the end of a fault until there must again be two copies of everything
FIRST_KEY = 1 << 40  # the number of the first key that no client reads; the clients' keys have lower numbers
UNREAD = 64  # this many of them are set before each fault

pytestmark = pytest.mark.exclusive  # calls must end within LATE_S of their deadline


class FaultySite(Site):
    """A site whose nodes have disks that can fail or fill up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, nodes=len(NODES), shards=SHARDS, grace_seconds=20)
        self._shim = compile_io_errors(folder)
        self._mounted = ExitStack()

    def __enter__(self) -> FaultySite:
        with ExitStack() as stack:
            for node in DISKS:
                if not mount_tmpfs(self.disk(node), "256m"):
                    pytest.skip("no right to mount a tmpfs")
                stack.callback(unmount, self.disk(node))
            super().__enter__()
            self._mounted = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._mounted:
            super().__exit__(*error)

    def disk(self, node: str) -> Path:
        return self.folder / f"disk-{node}"

    def trigger(self, node: str) -> Path:
        """Return the file that makes the node's disk fail."""
        return self.folder / f"trigger-{node}"

    def add(self, node: str, environment: Mapping[str, str] | None = None, **flags: object) -> Server:
        if node in DISKS:
            environment = io_errors_in(self.disk(node), self.trigger(node), self._shim)
            flags = {"disk": self.disk(node) / "tier", "disk_size": "192MiB", **flags}
        return super().add(node, environment, **flags)

    def restart(self, node: str, how: str) -> None:
        server = self.cluster.nodes[node]
        if how == "stopped":
            server.stop()
        else:
            server.kill()
        server.restart()


class Load:
    """The load of two clients, and blocks that no client reads. All of their blocks are purged when the `with` block
    ends."""

    def __init__(self, site: FaultySite, name: str) -> None:
        self.site = site
        self.namespace = make_namespace(BLOCK_BYTES, name)
        self.clients = Clients(site, name, REPLICAS, timeout_s=TIMEOUT_S, block_bytes=BLOCK_BYTES, recompute=False)
        self._unread: list[bytes] = []

    def __enter__(self) -> Load:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self.clients.__exit__(kind, error, None)
        if error is None:
            with self._client() as client:
                client.purge()

    def _client(self) -> KVStoreClient:
        return self.site.cluster.client(self.namespace, replicas=REPLICAS, timeout_s=10.0)

    def set_unread(self) -> None:
        keys = make_keys(UNREAD, first=FIRST_KEY + len(self._unread))
        with self._client() as client:
            result = client.set(keys, blocks_of(keys, BLOCK_BYTES), deferred=False)
        assert result.error == 0 and result.copies == REPLICAS, result
        self._unread += keys

    def wait_for_copies(self) -> None:
        """Wait until all shards have their copies. Fails if a shard has evicted blocks, because those would look like
        losses."""
        self.site.cluster.wait_for_members(*NODES, deadline_s=SERVE_S)
        found: list[str] = []

        def complete() -> bool:
            nonlocal found
            keys = self._unread + [key for chain in self.clients.acknowledged() for key in keys_of(chain)]
            array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
            found = lacking(self.site.cluster.membership(), self.namespace, array, REPLICAS)
            return not found

        try:
            wait_until(complete, TWO_COPIES_S)
        except AssertionError:
            raise AssertionError(f"not {REPLICAS} copies within {TWO_COPIES_S:g} s; shards lack {found}") from None
        for member in self.site.cluster.membership().members:
            for shard in member.shards:
                with ShardQueries((shard.host, shard.port), 5.0) as asking:
                    assert asking.info().evicted == 0, f"{shard.name} evicted blocks: give it more memory"

    def check(self) -> None:
        """Check that all acknowledged blocks are there, with the right bytes. A client may take a moment to learn the
        membership."""
        began = time.monotonic()
        while missing := [miss for check in self.clients.check() for miss in check.missing]:
            print(f"  {len(missing)} blocks are missing {time.monotonic() - began:.2f} s after", flush=True)
            assert time.monotonic() - began < RECOVERY_S, f"lost {len(missing)} blocks, e.g. {missing[:3]}"
        with self._client() as client:
            for key, block in zip(self._unread, client.get(self._unread).blocks, strict=True):
                assert block is not None, f"lost {key.hex()}, a block that nobody had read"
                assert bytes(block) == block_of(key, BLOCK_BYTES), f"wrong bytes of {key.hex()}"
        clients = self.clients
        assert not clients.wrong() and not clients.raised(), clients.raised()
        latest = clients.latest()
        assert latest.late_s <= LATE_S, f"a {latest.op} ended {latest.late_s:.3f} s after its deadline"
        for node in self.site.cluster.nodes.values():
            assert "Traceback" not in node.log_text(), node.log_text()[-3000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultySite]:
    need(unavailable())
    with FaultySite(tmp_path_factory.mktemp("rounds")) as site:
        yield site


# ---- a shard, then every other node --------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", range(SHARDS) if FULL else [1])
@pytest.mark.parametrize("node", NODES if FULL else ["n3"])
def test_after_a_dead_shard_is_filled_any_other_node_may_die(site: FaultySite, node: str, shard: int) -> None:
    with Load(site, f"shard {shard} of {node}") as load:
        load.set_unread()
        load.clients.run_for(1.0)
        site.cluster.nodes[node].shards()[shard].kill()
        began = time.monotonic()
        load.wait_for_copies()
        print(f"shard {shard} of {node} killed: two copies after {time.monotonic() - began:.1f} s", flush=True)
        for other in NODES if FULL else NODES[:1]:
            if other == node:
                continue
            site.cluster.nodes[other].kill()
            load.check()
            site.cluster.nodes[other].restart()
            began = time.monotonic()
            load.wait_for_copies()
            print(f"then {other} killed: nothing lost; two copies {time.monotonic() - began:.1f} s after its restart")


# ---- rounds of faults ----------------------------------------------------------------------------------------------

Fault = Callable[[FaultySite, random.Random], AbstractContextManager[str]]


@contextmanager
def shard_killed(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node, shard = chance.choice(NODES), chance.randrange(SHARDS)
    site.cluster.nodes[node].shards()[shard].kill()
    yield f"shard {shard} of {node} killed"


@contextmanager
def shard_paused(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node, shard = chance.choice(NODES), chance.randrange(SHARDS)
    process = site.cluster.nodes[node].shards()[shard]
    process.suspend()
    yield f"shard {shard} of {node} paused"
    process.resume()


@contextmanager
def node_killed(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node = chance.choice(NODES)
    site.cluster.nodes[node].kill()
    yield f"{node} killed"
    site.cluster.nodes[node].restart()


@contextmanager
def node_paused(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node = chance.choice(NODES)
    with site.cluster.nodes[node].stopped():
        yield f"{node} paused"


@contextmanager
def link_cut(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node = chance.choice(NODES)
    site.network.cut(node)
    yield f"{node} cut off"
    site.network.heal(node)


@contextmanager
def link_slow(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node, delay_s, loss = chance.choice(NODES), chance.uniform(0.0, 0.3), chance.uniform(0.0, 0.1)
    site.network.impair(node, delay_s, loss, chance.randrange(1 << 30))
    yield f"{node} {delay_s * 1000:.0f} ms away, {loss:.0%} lost"
    site.network.heal(node)


@contextmanager
def two_separated(site: FaultySite, chance: random.Random) -> Iterator[str]:
    one, other = chance.sample([*NODES, *CLIENTS, "etcd"], 2)
    site.network.separate(one, other)
    yield f"{one} and {other} separated"
    site.network.reunite(one, other)


@contextmanager
def disk_failed(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node, calls, how = chance.choice(DISKS), chance.choice(["all", "read", "write", "sync"]), restarted(chance)
    site.trigger(node).write_text(calls)
    yield f"disk of {node} fails ({calls}), the node is {how} then"
    site.trigger(node).unlink()
    site.restart(node, how)


@contextmanager
def disk_full(site: FaultySite, chance: random.Random) -> Iterator[str]:
    node, how = chance.choice(DISKS), restarted(chance)
    others = site.disk(node) / "others"
    with suppress(OSError), others.open("wb", buffering=0) as opened:
        while True:
            opened.write(bytes(MiB))
    yield f"disk of {node} is full, the node is {how} then"
    others.unlink()
    site.restart(node, how)


def restarted(chance: random.Random) -> str:
    """Return how to end a node whose disk failed before it is restarted."""
    return chance.choice(["killed", "stopped"])


@contextmanager
def etcd_ended(site: FaultySite, chance: random.Random) -> Iterator[str]:
    kill = chance.random() < 0.5
    if kill:
        site.etcd.kill()
    else:
        site.etcd.stop()
    yield f"etcd {'killed' if kill else 'stopped'}"
    site.etcd.restart()


@contextmanager
def etcd_paused(site: FaultySite, chance: random.Random) -> Iterator[str]:
    site.etcd.signal(signal.SIGSTOP)
    yield "etcd paused"
    site.etcd.signal(signal.SIGCONT)


FAULTS: list[Fault] = [
    shard_killed,
    shard_paused,
    node_killed,
    node_paused,
    link_cut,
    link_slow,
    two_separated,
    disk_failed,
    disk_full,
    etcd_ended,
    etcd_paused,
]


def faults(chance: random.Random) -> Iterator[Fault]:
    """Yield all faults in a random order, then all of them in another random order, and so on."""
    while True:
        yield from chance.sample(FAULTS, len(FAULTS))


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_rounds_of_random_faults_lose_nothing(site: FaultySite) -> None:
    print(f"\n{ROUNDS} rounds, KVSTORE_CHAOS_SEED={SEED}", flush=True)
    chance = random.Random(SEED)
    coming = faults(chance)
    longest_s = latest_s = float("-inf")
    for first in range(0, ROUNDS, STRETCH):
        with Load(site, f"rounds from {first}") as load:
            load.wait_for_copies()
            for number in range(first, min(first + STRETCH, ROUNDS)):
                longest_s = max(longest_s, run_round(load, number + 1, next(coming), chance))
            latest_s = max(latest_s, load.clients.latest().late_s)
    print(f"longest until two copies: {longest_s:.1f} s; the latest call {latest_s:+.3f} s from its deadline")


def run_round(load: Load, number: int, fault: Fault, chance: random.Random) -> float:
    """Cause a fault under load. Returns the seconds from the fault's end until there were two copies of every block
    again."""
    what, began = fault.__name__, time.monotonic()
    length_s = chance.uniform(0.2, 3.5)
    try:
        load.set_unread()
        with fault(load.site, chance) as what:
            load.clients.run_for(length_s)
        healed = time.monotonic()
        load.wait_for_copies()
        took_s = time.monotonic() - healed
        load.check()
    except BaseException:
        print(f"round {number} failed: {what}, for {length_s:.1f} s; KVSTORE_CHAOS_SEED={SEED}", flush=True)
        raise
    acknowledged = {*load.clients.acknowledged()}  # the other chains may have had only one copy
    troubles = load.clients.troubles(began, time.monotonic(), lambda call, miss: miss.chain not in acknowledged)
    failed = sum(call.errors > 0 for call in troubles)
    for call in troubles:
        if call.missed:
            print(f"  {call.op} missed {len(call.missed)} blocks {call.at - began:.2f} s after the fault's begin")
    print(
        f"round {number}: {what}, for {length_s:.1f} s; {failed} sets failed, {len(troubles) - failed} reads missed; "
        f"two copies {took_s:.1f} s after; {time.monotonic() - began:.1f} s in all",
        flush=True,
    )
    return took_s
