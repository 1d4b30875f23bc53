"""The memory and processors that a server's container gets, and how the server uses them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from kvstore_client import KVStoreClient
from tests.containers.client_program import NAMESPACE, SIZE
from tests.containers.clients import use
from tests.support.disk import wait_until_durable, wait_until_on
from tests.support.harness import OVERHEAD_BYTES, blocks_of, make_keys, put, shard_info, wait_until
from tests.support.podman import Container, Network, Volume

MIB = 1 << 20
PLACE = "/var/lib/kvstore"
DISK = (f"--disk={PLACE}/blocks", "--disk-size=1GiB")
GRACE_S = 60
BATCH = 128  # blocks of a set: 8 MiB


def flags(memory: str, *more: str) -> list[str]:
    return [f"--memory={memory}", "--insecure", *more]


def connect(server: Container) -> KVStoreClient:
    server.wait_ready()
    return KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE)


def fill(client: KVStoreClient, first: int, count: int) -> None:
    for begin in range(first, first + count, BATCH):
        put(client, make_keys(BATCH, begin))


class Group:
    """The control group that limits a container's memory, of version 2 or 1, as the machine sees it."""

    def __init__(self, pid: int) -> None:
        groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
        self._v1 = "memory" in groups
        self.tree = Path("/sys/fs/cgroup/memory") if self._v1 else Path("/sys/fs/cgroup")
        self.folder = self.tree / groups["memory" if self._v1 else ""].lstrip("/")

    @property
    def limit(self) -> Path:
        return self.folder / ("memory.limit_in_bytes" if self._v1 else "memory.max")

    @property
    def used_bytes(self) -> int:
        return int((self.folder / ("memory.usage_in_bytes" if self._v1 else "memory.current")).read_text())

    @property
    def kills(self) -> int:
        """The number of the group's processes that the kernel has killed for lack of memory."""
        text = (self.folder / ("memory.oom_control" if self._v1 else "memory.events")).read_text()
        (found,) = re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found)


# ---- a limit that is too low -------------------------------------------------------------------------------------


def assert_refused(server: Container, *said: str) -> None:
    assert server.wait() == 2, server.logs()
    (line,) = server.logs().splitlines()
    assert line.startswith("error: ") and all(each in line for each in said), line


def test_a_store_larger_than_the_containers_limit_is_refused_with_both_figures(network: Network) -> None:
    with Container(*flags("600MiB"), network=network, memory="512m") as server:
        assert_refused(
            server,
            "--memory 600MiB: with 256.0 MiB for each of 1 shard(s) the server takes up to 856.0 MiB, and its control "
            "group allows 512.0 MiB (/sys/fs/cgroup/",
            "lower --memory to 256MiB, or raise that limit to 1.8 GiB",
        )


def test_a_store_that_leaves_the_shards_too_little_is_refused(network: Network) -> None:
    with Container(*flags("400MiB"), network=network, memory="512m") as server:
        assert_refused(server, "takes up to 656.0 MiB", "allows 512.0 MiB", "lower --memory to 256MiB")
    with Container(*flags("400MiB"), "--check-config", network=network, memory="512m") as check:
        assert_refused(check, "takes up to 656.0 MiB", "allows 512.0 MiB", "lower --memory to 256MiB")
    with Container(network=network, environment={"KVSTORE_SERVER_INSECURE": "true"}, memory="1g") as server:
        assert_refused(server, "--memory", "takes up to 4.2 GiB", "allows 1.0 GiB", "lower --memory to 768MiB")


def group_above(limit_bytes: int) -> str:
    """Make a group with this limit, and return its name for podman's --cgroup-parent. check_image.sh removes the group
    later, because podman's own processes outlive the containers."""
    tree, limit = Group(os.getpid()).tree, Group(os.getpid()).limit.name
    (tree / "libpod_parent_above").mkdir(exist_ok=True)
    (tree / "libpod_parent_above" / limit).write_text(str(limit_bytes))
    return "/libpod_parent_above"


def test_a_limit_of_the_group_above_the_container_counts(network: Network) -> None:
    """The container's own limit is larger than that of the group above it. The container sees the host's groups,
    because with version 2 it could not see the other limit in a view of its own."""
    options = [f"--cgroup-parent={group_above(512 * MIB)}", "--cgroupns=host"]
    with Container(*flags("400MiB"), network=network, memory="2g", options=options) as server:
        assert_refused(server, "control group", "allows 512.0 MiB", "lower --memory to 256MiB")
    with Container(*flags("128MiB"), network=network, memory="2g", options=options) as server:
        assert server.wait_ready() and server.stop(GRACE_S) == 0


# ---- a limit that is enough --------------------------------------------------------------------------------------


def test_a_store_that_fits_is_filled_and_read_at_full_size(network: Network) -> None:
    """The server stays within the documented limit: its memory plus 256 MiB per shard. Twice as many blocks are set as
    fit into memory, while a disk tier writes and reads."""
    memory = 256 * MIB
    limit = memory + OVERHEAD_BYTES
    with (
        Volume() as volume,
        Container(
            *flags("256MiB", *DISK), network=network, memory=f"{limit}", volumes=[f"{volume.name}:{PLACE}"]
        ) as server,
        connect(server) as client,
    ):
        wait_until_on(client)
        group, count = Group(server.pid), 2 * memory // SIZE
        fill(client, 0, count)
        info = shard_info(client)
        assert info.memory_used_bytes > 0.95 * memory and info.evicted > 0
        for begin in range(0, count, BATCH):
            keys = make_keys(BATCH, begin)
            assert [block and bytes(block) for block in client.get(keys).blocks] == blocks_of(keys, SIZE)
        assert group.used_bytes > memory and group.kills == 0 and int(group.limit.read_text()) == limit
        assert "died" not in server.logs() and server.healthy()
        assert server.stop(GRACE_S) == 0


def test_an_oom_kill_costs_only_blocks_in_memory(network: Network) -> None:
    """The limit is lowered while the server runs, so the kernel kills a shard. The shard that replaces it, and later
    the next container, read every block on disk with the right bytes."""
    with Volume() as volume:
        volumes = [f"{volume.name}:{PLACE}"]
        with Container(*flags("512MiB", *DISK), network=network, memory="2g", volumes=volumes) as server:
            keys = make_keys(8 * BATCH)
            with connect(server) as client:
                wait_until_on(client)
                fill(client, 0, len(keys))
                wait_until_durable(client)
                group = Group(server.pid)
                group.limit.write_text(str(group.used_bytes + 16 * MIB))
                more = 10_000
                while not group.kills:  # the shard is killed, so these blocks may be lost
                    client.set(some := make_keys(BATCH, more), blocks_of(some, SIZE), deferred=False)
                    more += BATCH
                wait_until(lambda: "died: signal 9" in server.logs(), what="the log has the kill")
                group.limit.write_text(str(2 << 30))
                wait_until(lambda: "is serving again" in server.logs(), what="the shard is back")
                assert server.running
            with connect(server) as client:
                wait_until_on(client)
                assert_all_there(client, keys)
            assert server.stop(GRACE_S) == 0
        with (
            Container(*flags("512MiB", *DISK), network=network, memory="2g", volumes=volumes) as server,
            connect(server) as client,
        ):
            wait_until_on(client)
            assert_all_there(client, keys)


def assert_all_there(client: KVStoreClient, keys: list[bytes]) -> None:
    for begin in range(0, len(keys), BATCH):
        some = keys[begin : begin + BATCH]
        assert [block and bytes(block) for block in client.get(some).blocks] == blocks_of(some, SIZE)


@pytest.mark.parametrize("init", [False, True], ids=["server-is-pid-1", "init-is-pid-1"])
def test_a_killed_server_is_restarted_with_its_blocks(network: Network, init: bool) -> None:
    """The supervisor is killed, as the machine's OOM killer may do, and its shards end with it. The container engine
    restarts the server because of its restart policy."""
    with Volume() as volume:
        options = ["--restart=always", *(["--init"] if init else [])]
        volumes = [f"{volume.name}:{PLACE}"]
        with Container(*flags("64MiB", *DISK), network=network, volumes=volumes, options=options) as server:
            keys = make_keys(BATCH)
            with connect(server) as client:
                put(client, keys)
                wait_until_durable(client)
            first = psutil.Process(server.pid)
            supervisor = first.children()[0] if init else first
            shards = supervisor.children(recursive=True)
            supervisor.kill()
            wait_until(lambda: server.logs().count("kvstore-server ready") == 2, what="it runs again")
            assert not any(each.is_running() for each in shards)
            with connect(server) as client:
                wait_until_on(client)
                assert_all_there(client, keys)
            assert server.stop(GRACE_S) == 0


# ---- processors, /dev/shm ----------------------------------------------------------------------------------------


def test_half_a_processor_changes_only_the_speed(network: Network) -> None:
    """The defaults are the same with half a processor: none depends on the number of processors."""
    settings = {}
    for processors in ("0.5", ""):
        options = [f"--cpus={processors}"] if processors else []
        with Container("--print-config", "--insecure", network=network, options=options) as shown:
            assert shown.wait() == 0
            settings[processors] = shown.logs()
    assert settings["0.5"] == settings[""] and "\nshards = 1  # source: default" in settings[""]
    with Container(*flags("64MiB"), network=network, options=["--cpus=0.5"]) as server, connect(server) as client:
        keys = make_keys(BATCH)
        put(client, keys)
        assert_all_there(client, keys)
        assert server.healthy() and server.stop(GRACE_S) == 0


def test_the_size_of_dev_shm_does_not_limit_shared_memory(network: Network) -> None:
    """/dev/shm has 64 MiB, docker's default. Segments are files outside of it (memfd), so a client can read all blocks
    of a larger store."""
    count = 3000  # 188 MiB
    with (
        Volume() as socket,
        Container(
            *flags("256MiB", "--unix-socket=/run/kvstore/kv.sock"),
            network=network,
            volumes=[f"{socket.name}:/run/kvstore"],
            options=["--shm-size=64m"],
        ) as server,
        connect(server) as client,
    ):
        fill(client, 0, count)
        endpoint = f"tcp://{server.name}:7070"
        found, logged = use(endpoint, "get", count, network=network, volumes=[f"{socket.name}:/run/kvstore"])
        assert found == {"hit": count, "wrong": 0, "path": "shared memory"} and not logged
        assert server.run("ls", "-A", "/dev/shm").stdout == ""
        (shard,) = psutil.Process(server.pid).children()
        assert sum(each.size for each in shard.memory_maps() if each.path.startswith("/memfd:")) >= 256 * MIB
        assert server.healthy() and "died" not in server.logs()
