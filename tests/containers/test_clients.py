"""Clients in separate containers: over TCP by the server's name, and in shared memory over a Unix socket on a volume
that both mount. They have their own PID namespaces, and share only the volume's files with the server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.containers.client_program import NAMESPACE
from tests.containers.clients import ClientContainer, use
from tests.support.harness import make_keys, put, shard_info, wait_until
from tests.support.podman import Container, Network, Volume

OWN, OTHER, STRANGER = 10001, 12345, 12346
SOCKET = "/run/kvstore/kv.sock"
FLAGS = ("--memory=64MiB", "--segment=4MiB", "--insecure", f"--unix-socket={SOCKET}", f"--unix-users={OTHER},0")
COUNT = 64
first_keys = itertools.count(COUNT, COUNT)  # first keys that no other client uses
ALL = {"hit": COUNT, "wrong": 0}


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    """A volume for the socket."""
    with Volume() as volume:
        yield volume


@pytest.fixture(scope="module")
def server(network: Network, volume: Volume) -> Iterator[Container]:
    """A server that has the blocks of the first keys."""
    with Container(*FLAGS, network=network, volumes=[f"{volume.name}:/run/kvstore"]) as container:
        container.wait_ready()
        with KVStoreClient(f"tcp://{container.address}:7070", NAMESPACE) as client:
            put(client, make_keys(COUNT))
        yield container


def endpoint(server: Container) -> str:
    return f"tcp://{server.name}:7070"


def lent(server: Container) -> int:
    with KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE) as client:
        return shard_info(client).lent_blocks


# ---- shared memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [OWN, OTHER, 0], ids=["same-user", "user-who-is-named", "root-who-is-named"])
@pytest.mark.parametrize("mount", ["", ":ro"], ids=["writable", "read-only"])
def test_clients_read_and_write_in_shared_memory_over_a_volume(
    user: int, mount: str, network: Network, server: Container, volume: Volume
) -> None:
    """The socket's folder in /run belongs to the server alone, so clients of other users trust it by default."""
    given = {"network": network, "volumes": [f"{volume.name}:/run/kvstore{mount}"], "user": f"{user}:{user}"}
    first = next(first_keys)
    with ClientContainer(endpoint(server), "set", COUNT, first=first, **given) as client:
        assert client.result() == {"created": COUNT, "errors": 0, "path": "shared memory"} and not client.logged()
    with ClientContainer(endpoint(server), "get", COUNT, first=first, **given) as client:
        assert client.result() == {**ALL, "path": "shared memory"} and not client.logged()
    wait_until(lambda: not lent(server), what="all is given back")


@pytest.mark.parametrize("user", [OWN, OTHER], ids=["same-user", "user-who-is-named"])
def test_a_killed_client_container_returns_its_loans(
    user: int, network: Network, server: Container, volume: Volume
) -> None:
    given = {"network": network, "volumes": [f"{volume.name}:/run/kvstore:ro"], "user": f"{user}:{user}"}
    with ClientContainer(endpoint(server), "hold", COUNT, **given) as client:
        assert client.first_said() == {**ALL, "path": "shared memory"}
        assert lent(server) == COUNT
        client.signal("KILL")
        assert client.wait() == 137
        wait_until(lambda: not lent(server), what="what the client held is given back")


def test_a_killed_server_takes_no_byte_from_a_reading_client(network: Network) -> None:
    """The memory stays as long as the client maps it, whatever happens to the server's container."""
    with Volume() as volume:
        volumes = [f"{volume.name}:/run/kvstore"]
        with Container(*FLAGS, network=network, volumes=volumes) as server:
            server.wait_ready()
            with KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE) as client:
                put(client, make_keys(COUNT))
            with ClientContainer(endpoint(server), "hold", COUNT, network=network, volumes=volumes) as holder:
                assert holder.first_said() == {**ALL, "path": "shared memory"}
                server.signal("KILL")
                assert server.wait() == 137
                holder.signal("USR1")  # the client compares all bytes once more
                wait_until(lambda: len(holder.said()) == 2, what="the bytes are compared again")
                assert holder.said()[1] == ALL and holder.running


# ---- why there is none -------------------------------------------------------------------------------------------


def assert_tcp(why: str, server: Container, network: Network, level: str = "WARNING", **given: object) -> None:
    """Check that the client reads all blocks over TCP, and logs one line with the reason."""
    found, logged = use(endpoint(server), "get", COUNT, network=network, **given)
    assert found == {**ALL, "path": "tcp"}
    (line,) = logged
    start = rf"{level} {re.escape(server.name)}:7070: blocks travel over TCP, not in shared memory: "
    assert re.fullmatch(f"{start}{why}", line), line


def test_a_client_without_the_volume_logs_that_once(network: Network, server: Container) -> None:
    why = f"its Unix socket {SOCKET} is not on this host, or not mounted in this container"
    assert_tcp(why, server, network, "INFO")


def test_a_client_of_an_unnamed_user_logs_that_once(network: Network, server: Container, volume: Volume) -> None:
    """Here --unix-users names another user, so every user can open the socket. The server checks the user that the
    kernel reports and refuses the others."""
    why = (
        f"{SOCKET}: the server closed the connection of user {STRANGER}: its --unix-users does not name that user, or "
        "its log says why"
    )
    given = {"volumes": [f"{volume.name}:/run/kvstore"], "user": f"{STRANGER}:{STRANGER}"}
    assert_tcp(why, server, network, **given)
    assert f"user {STRANGER} connected to the Unix socket and was refused: only users {OWN}, {OTHER}, 0 may" in (
        server.logs()
    )


def test_a_client_refused_as_another_user_logs_that_once(network: Network) -> None:
    with Volume() as volume:
        given = {"volumes": [f"{volume.name}:/run/kvstore"]}
        with Container(*FLAGS[:-1], network=network, **given) as server:
            server.wait_ready()
            with KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE) as client:
                put(client, make_keys(COUNT))
            why = (
                f"{SOCKET}: Permission denied for user {OTHER}: --unix-users of the server names users other than its "
                "own, and these users must be able to enter the folder"
            )
            assert_tcp(why, server, network, user=f"{OTHER}:{OTHER}", **given)
            volume.folder.chmod(0o700)
            assert_tcp(why, server, network, user=f"{OTHER}:{OTHER}", **given)


def test_a_world_writable_folder_is_not_trusted(network: Network, tmp_path: Path) -> None:
    """The `emptyDir` of a pod is world-writable. Any process may listen there, so other users do not trust it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    for place, why in (
        ("/run/kvstore", "and every user may write to /run/kvstore, so it may be any process"),
        ("/srv/kvstore", "which may be any user"),
    ):
        flags = [flag.replace("/run/kvstore", place) for flag in FLAGS]
        given = {"volumes": [f"{folder}:{place}"]}
        with Container(*flags, network=network, **given) as server:
            server.wait_ready()
            with KVStoreClient(f"tcp://{server.address}:7070", NAMESPACE) as client:
                put(client, make_keys(COUNT))
            line = (
                f"{place}/kv.sock: user {OWN} listens there, {why}: run the server as user {OTHER} or root, or have "
                "its socket in a folder /run/NAME of its own, or set shared_memory=True"
            )
            assert_tcp(re.escape(line), server, network, user=f"{OTHER}:{OTHER}", **given)
            found, logged = use(endpoint(server), "get", COUNT, network=network, user=f"{OWN}:{OWN}", **given)
            assert found == {**ALL, "path": "shared memory"} and not logged
