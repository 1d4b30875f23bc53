"""How a server's container ends, and what its successor with the same volume finds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from kvstore_client import KVStoreClient
from tests.containers.client_program import NAMESPACE, SIZE
from tests.containers.clients import ClientContainer
from tests.support.deployment import compose
from tests.support.harness import blocks_of, make_keys, put, wait_until
from tests.support.podman import ETCD, SERVER, Container, Network, Volume, podman

PLACE = "/var/lib/kvstore"
FLAGS = ("--segment=4MiB", "--insecure", f"--disk={PLACE}/blocks", "--disk-size=2GiB", "--shards=2")
GRACE_S = 60
BATCH = 128


@pytest.fixture
def volume() -> Iterator[Volume]:
    with Volume() as volume:
        yield volume


def start(
    volume: Volume, network: Network, *more: str, name: str = "", init: bool = False, image: str = SERVER
) -> Container:
    return Container(
        *FLAGS,
        *more,
        image=image,
        name=name,
        network=network,
        volumes=[f"{volume.name}:{PLACE}"],
        options=["--init"] if init else [],
    )


def connect(server: Container) -> KVStoreClient:
    server.wait_ready()
    client = KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE)
    wait_until(lambda: all(each.disk.state == "on" for each in client.info().shards), what="the disk tier is on")
    return client


def found(client: KVStoreClient, keys: list[bytes]) -> int:
    """Return how many blocks are there, and check their bytes."""
    hits = 0
    for begin in range(0, len(keys), BATCH):
        some = keys[begin : begin + BATCH]
        blocks = [block and bytes(block) for block in client.get(some).blocks]
        assert all(block in (None, right) for block, right in zip(blocks, blocks_of(some, SIZE), strict=True))
        hits += sum(block is not None for block in blocks)
    return hits


def fill(client: KVStoreClient, keys: list[bytes]) -> None:
    for begin in range(0, len(keys), BATCH):
        put(client, keys[begin : begin + BATCH])


# ---- signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [False, True], ids=["server-is-pid-1", "init-is-pid-1"])
@pytest.mark.parametrize("write", ["all", "evicted"])
def test_sigterm_loses_nothing_acknowledged(write: str, init: bool, network: Network, volume: Volume) -> None:
    """After SIGTERM, all acknowledged blocks are on disk, including those that were only in memory."""
    keys = make_keys(1024)
    more = ("--memory=128MiB", f"--disk-write={write}")
    with start(volume, network, *more, init=init) as server:
        with connect(server) as client:
            fill(client, keys)
        assert server.stop(GRACE_S) == 0, "it was killed"
        assert "SIGTERM: stopping" in server.logs() and "exit status 0" in server.logs()
    with start(volume, network, *more) as server, connect(server) as client:
        assert found(client, keys) == len(keys)


def test_a_second_sigterm_ends_it_at_once(network: Network, volume: Volume) -> None:
    """After the first signal the server writes the blocks that are only in memory; the second signal stops that. The
    blocks that the next server finds have the right bytes."""
    keys = make_keys(8192)  # 512 MiB
    more = ("--memory=640MiB", "--disk-write=evicted")
    with start(volume, network, *more) as server:
        with connect(server) as client:
            fill(client, keys)
        process = psutil.Process(server.pid)
        process.terminate()
        wait_until(lambda: "blocks before the server stops" in server.logs(), what="it writes")
        process.terminate()
        assert server.wait() == 0 and "exit status 0" in server.logs()
    with start(volume, network, *more) as server, connect(server) as client:
        assert 0 <= found(client, keys) < len(keys)


@pytest.mark.parametrize("init", [False, True], ids=["server-is-pid-1", "init-is-pid-1"])
def test_dead_shards_leave_no_zombies(init: bool, network: Network, volume: Volume) -> None:
    """Neither dead shards nor their keepers, which pid 1 inherits, stay as zombies."""
    with start(volume, network, "--memory=64MiB", init=init) as server:
        server.wait_ready()
        first = psutil.Process(server.pid)
        supervisor = first.children()[0] if init else first
        for turn in range(1, 4):
            shard = next(each for each in supervisor.children() if each.children())
            shard.kill()  # pid 1 inherits the shard's keeper, which ends by itself
            wait_until(lambda turn=turn: server.logs().count("is serving again") == turn, what="the shard is back")

        def zombies() -> list[psutil.Process]:
            return [each for each in first.children(recursive=True) if each.status() == psutil.STATUS_ZOMBIE]

        wait_until(lambda: not zombies(), what=f"there are no zombies: {zombies()}")
        assert server.stop(GRACE_S) == 0


# ---- a new image -------------------------------------------------------------------------------------------------


def test_the_image_can_be_replaced_under_load(network: Network, volume: Volume) -> None:
    """A client stores and reads blocks at the server's host name, while another container with that name takes over the
    volume."""
    name, new = "kvstore-replaced", "localhost/kvstore:replaced"
    podman("tag", SERVER, new)
    flags = ("--memory=256MiB",)
    try:
        with start(volume, network, *flags, name=name) as server:
            server.wait_ready()
            with ClientContainer(f"tcp://{name}:7070", "load", 0, network=network) as client:
                wait_set(client, 100)
                began = time.monotonic()
                assert server.stop(GRACE_S) == 0
                server.remove()
                with start(volume, network, *flags, name=name, image=new) as replaced, connect(replaced) as own:
                    wait_set(client, client.said()[-1]["set"] + 20)
                    ended = time.monotonic()
                    wait_set(client, client.said()[-1]["set"] + 100)
                    client.signal("TERM")
                    assert client.wait() == 0, client.logs()
                    steps = client.said()
                    assert not any(step["wrong"] for step in steps)
                    failed = [step["at"] for step in steps if step["raised"] or step["missed"]]
                    assert all(began - 1.0 < at < ended for at in failed), (began, ended, failed)
                    assert found(own, make_keys(steps[-1]["set"])) == steps[-1]["set"]
    finally:
        podman("untag", SERVER, new)  # without a name, podman removes all tags


def wait_set(client: ClientContainer, count: int) -> None:
    wait_until(lambda: client.said() and client.said()[-1]["set"] >= count, what=f"{count} blocks are set")


# ---- etcd --------------------------------------------------------------------------------------------------------


def test_etcd_runs_with_the_flags_of_the_compose_file(network: Network) -> None:
    """etcd runs on a read-only root as user 10001 without capabilities. Its health check succeeds, and it keeps its
    data."""
    service = compose()["services"]["etcd"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    test = service["healthcheck"]["test"]
    with Volume() as volume:
        given = {"image": ETCD, "network": network, "memory": service["mem_limit"]}
        given["volumes"] = [f"{volume.name}:{service['volumes'][0].split(':')[1]}"]
        for turn in range(2):
            with Container(*service["command"], **given) as etcd:
                wait_until(lambda: etcd.run(*test[1:], check=False).returncode == 0, what="etcd is healthy")
                assert etcd.run("id", "-u").stdout.strip() == "10001"
                if not turn:
                    etcd.run("etcdctl", "put", "key", "value")
                assert "value" in etcd.run("etcdctl", "get", "key").stdout
                assert etcd.stop(GRACE_S) == 0, etcd.logs()
