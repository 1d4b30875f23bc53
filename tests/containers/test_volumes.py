"""How a server in a container uses the volume of its disk tier, depending on its owner, its write access and its free
space. As in all these tests, the container's root is read-only, and the server has no capabilities."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.containers.client_program import NAMESPACE, SIZE
from tests.support.disk import wait_until_durable, wait_until_on, wait_until_out_of_space
from tests.support.harness import blocks_of, make_keys, put
from tests.support.podman import Container, Network, Volume

PLACE = "/var/lib/kvstore"
FLAGS = ("--memory=64MiB", "--segment=4MiB", "--insecure", f"--disk={PLACE}/blocks", "--disk-size=256MiB")
OWN = 10001  # the image's user
OTHER = 12345
KEYS = make_keys(64)
GRACE_S = 60


def connect(server: Container) -> KVStoreClient:
    server.wait_ready()
    client = KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE)
    wait_until_on(client)
    return client


def assert_it_keeps_blocks(network: Network, source: str, user: str = "") -> None:
    """Check that a server stores blocks in the volume, and that the next server with the same settings has them."""
    for turn in range(2):
        with Container(*FLAGS, network=network, volumes=[f"{source}:{PLACE}"], user=user) as server:
            with connect(server) as client:
                if not turn:
                    put(client, KEYS)
                assert [block and bytes(block) for block in client.get(KEYS).blocks] == blocks_of(KEYS, SIZE)
            assert server.stop(GRACE_S) == 0
            assert "WARNING" not in server.logs() and "ERROR" not in server.logs()


def owned(folder: Path, user: int, mode: int = 0o700) -> Path:
    folder.mkdir()
    os.chown(folder, user, user)
    folder.chmod(mode)
    return folder


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(each.stat().st_uid, each.stat().st_gid) for each in folder.rglob("*")}


# ---- whose it is -------------------------------------------------------------------------------------------------


def test_a_new_named_volume_belongs_to_the_images_user(network: Network) -> None:
    with Volume() as volume:
        assert_it_keeps_blocks(network, volume.name)
        assert volume.folder.stat().st_uid == OWN and owners(volume.folder) == {(OWN, OWN)}


def test_a_host_folder_must_belong_to_the_images_user(network: Network, tmp_path: Path) -> None:
    folder = owned(tmp_path / "blocks", OWN)
    assert_it_keeps_blocks(network, str(folder))
    assert owners(folder) == {(OWN, OWN)}


def test_another_user_can_run_it_with_their_own_volume(network: Network, tmp_path: Path) -> None:
    folder = owned(tmp_path / "blocks", OTHER)
    assert_it_keeps_blocks(network, str(folder), f"{OTHER}:{OTHER}")
    assert owners(folder) == {(OTHER, OTHER)}


def test_a_group_of_the_server_may_own_the_folder(network: Network, tmp_path: Path) -> None:
    """The folder belongs to root and a group of the server, as with the `fsGroup` of a pod."""
    folder = owned(tmp_path / "blocks", 0, 0o2770)
    os.chown(folder, 0, OTHER)
    options = [f"--group-add={OTHER}"]
    with Container(*FLAGS, network=network, volumes=[f"{folder}:{PLACE}"], options=options) as server:
        with connect(server) as client:
            put(client, KEYS)
        assert server.stop(GRACE_S) == 0
    assert owners(folder) == {(OWN, OTHER)}


# ---- what it may not do ------------------------------------------------------------------------------------------


def assert_refused(said: str, network: Network, volume: str, user: str = "") -> None:
    """Check that the server ends with status 1 and logs this line, and that --check-config fails with the same
    settings."""
    with Container(*FLAGS, network=network, volumes=[volume], user=user) as server:
        assert server.wait() == 1, server.logs()
        lines = [line for line in server.logs().splitlines() if " ERROR " in line]
        assert len(lines) == 1 and f"the server cannot start: disk tier: {said}" in lines[0], lines
    with Container(*FLAGS, "--check-config", network=network, volumes=[volume], user=user) as check:
        assert check.wait() == 2 and f"error: --disk {PLACE}/blocks: " in check.logs(), check.logs()


def test_a_volume_of_another_owner_is_refused(network: Network, tmp_path: Path) -> None:
    mine, hidden = owned(tmp_path / "mine", 0, 0o755), owned(tmp_path / "hidden", 0)
    for user, number in (("", OWN), (f"{OTHER}:{OTHER}", OTHER)):
        for folder in (mine, hidden):
            right = f"give user {number} the right to read and write {PLACE}/blocks"
            assert_refused(f"no permission to use {PLACE}/blocks: {right}", network, f"{folder}:{PLACE}", user)
    assert not list(mine.iterdir()) and not list(hidden.iterdir())


def test_a_read_only_volume_is_refused(network: Network, tmp_path: Path) -> None:
    folder = owned(tmp_path / "blocks", OWN)
    said = f"{PLACE}/blocks is on a read-only file system: mount it writable, or give --disk another folder"
    assert_refused(said, network, f"{folder}:{PLACE}:ro")


def test_a_disk_without_a_volume_is_refused(network: Network) -> None:
    """The disk tier's folder is in no volume, where the root is read-only. The image's own folder is always a
    volume."""
    flags = [flag.replace(PLACE, "/blocks") for flag in FLAGS]
    with Container(*flags, network=network) as server:
        assert server.wait() == 1
        assert "disk tier: /blocks is on a read-only file system: mount it writable, or give" in server.logs()


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of the image's user, with a file system of 24 MiB."""
    folder = owned(tmp_path / "small", OWN)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=24m,uid={OWN},mode=700", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_server_with_a_full_volume_serves_from_memory(network: Network, small_folder: Path) -> None:
    """The disk tier is configured for 256 MiB, which do not fit: it writes no more blocks, and the log says so."""
    volumes = [f"{small_folder}:{PLACE}"]
    with Container(*FLAGS, network=network, volumes=volumes) as server, connect(server) as client:
        keys = make_keys(700)  # 44 MiB
        put(client, keys)
        wait_until_out_of_space(client)
        (line,) = [line for line in server.logs().splitlines() if " ERROR " in line]
        assert f"disk tier {PLACE}/blocks/shard-0 is out of space: [Errno 28] No space left on device" in line
        assert line.endswith("its blocks are served, and none are written until there is room")
        assert [block and bytes(block) for block in client.get(keys).blocks] == blocks_of(keys, SIZE)
        more = make_keys(50, first=10_000)
        put(client, more)
        assert client.get(more).hit == 50 and server.running and server.healthy()
        assert server.stop(GRACE_S) == 0


def test_files_left_by_a_kill_are_read_by_the_next_container(network: Network) -> None:
    with Volume() as volume:
        with (
            Container(*FLAGS, network=network, volumes=[f"{volume.name}:{PLACE}"]) as server,
            connect(server) as client,
        ):
            put(client, KEYS)
            wait_until_durable(client)
            server.signal("KILL")
            assert server.wait() == 137
        with (
            Container(*FLAGS, network=network, volumes=[f"{volume.name}:{PLACE}"]) as server,
            connect(server) as client,
        ):
            assert [block and bytes(block) for block in client.get(KEYS).blocks] == blocks_of(KEYS, SIZE)
