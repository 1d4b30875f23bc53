"""The container images, built by `make image` and run by podman: their contents, and a server that runs in one.

`make check-image` runs these tests as root. It first builds the images; where the official base images are unavailable,
it builds from stand-ins. In this file one server runs alone; the other files of this folder test clusters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from kvstore import __version__
from kvstore_client import KVStoreClient
from tests.support.deployment import stage
from tests.support.harness import MakeNamespace, blocks_of, make_keys, put
from tests.support.podman import ETCD, SERVER, STAND_IN, Container, Network, inspect_image, run_once

SMALL = ("--memory=64MiB", "--segment=4MiB", "--insecure")
USER = "10001:10001"
ADDED_BYTES = 150 << 20  # by how much the server's image may exceed its base image
GRACE_S = 20


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Container]:
    with Container(*SMALL, network=network) as container:
        container.wait_ready()
        yield container


def base(target: str) -> str:
    """Return the image that a stage of the Dockerfile begins with."""
    return stage(target)[0].rest.split(" AS ")[0]


# ---- what is in them ---------------------------------------------------------------------------------------------


def test_the_images_declare_how_to_run_them() -> None:
    config = inspect_image(SERVER)["Config"]
    assert (config["User"], config["Entrypoint"], config["StopSignal"]) == (USER, ["kvstore-server"], "SIGTERM")
    assert set(config["ExposedPorts"]) == {"7070/tcp", "9100/tcp"} and list(config["Volumes"]) == ["/var/lib/kvstore"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    check = inspect_image(SERVER)["Healthcheck"]
    assert check["Test"][0] == "CMD" and "/readyz" in check["Test"][-1]
    assert (check["Interval"], check["Timeout"], check["Retries"]) == (15 * 10**9, 10 * 10**9, 4)
    assert inspect_image(ETCD)["Config"]["User"] == USER


def test_the_python_has_the_declared_version(capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for the official image may have another version of Python. The test then only reports it."""
    named = re.fullmatch(r"python:(3\.\d+)-.*", base("server"))
    assert named
    found = run_once(SERVER, "python", "--version").split()[1]
    made_of = inspect_image(SERVER)["Labels"].get(STAND_IN)
    if made_of is not None:
        with capsys.disabled():
            print(f"\ncheck-image: Python {found} of a stand-in ({made_of}); the Dockerfile names {base('server')}")
    assert made_of is not None or found.startswith(f"{named[1]}.")


def test_both_commands_run_and_print_the_version() -> None:
    assert run_once(SERVER, "kvstore-server", "--version").split() == ["kvstore-server", __version__]
    assert __version__ in run_once(SERVER, "kvstore", "--version")


def test_nothing_in_it_installs_or_compiles() -> None:
    tools = "pip pip3 cc c++ gcc g++ cpp clang ld as make rustc curl wget"
    script = f"for tool in {tools}; do command -v $tool; done; true"
    assert run_once(SERVER, "sh", "-c", script, user="0") == ""
    modules = "'pip', 'ensurepip', 'setuptools', 'wheel', 'Cython', 'pytest', 'hypothesis'"
    program = f"import importlib.util as u; print([name for name in ({modules},) if u.find_spec(name)])"
    for python in ("/opt/kvstore/bin/python", "/usr/local/bin/python"):
        assert run_once(SERVER, python, "-c", program).strip() == "[]", python
    wheels = run_once(SERVER, "find", "/", "-xdev", "-name", "*.whl", "-o", "-xdev", "-name", "pip-*-info", user="0")
    assert wheels == ""


def test_it_has_no_sources_or_tests_and_its_code_is_read_only() -> None:
    sources = "-path */site-packages/kvstore* ( -name *.pyx -o -name *.pxi -o -name *.c -o -name *.h )"
    assert run_once(SERVER, "find", "/opt/kvstore/lib", *sources.split(), user="0") == ""
    assert run_once(SERVER, "find", "/opt/kvstore", "-name", "tests", user="0") == ""
    assert run_once(SERVER, "find", "/source", "/wheels", check=False) == ""
    writable = "find / -xdev -writable -not -type l -not -path '/dev*' 2>/dev/null; true"
    places = set(run_once(SERVER, "sh", "-c", writable).splitlines())
    assert places <= {"/tmp", "/var/tmp", "/run/lock", "/var/lib/kvstore", "/run/kvstore"}


def test_it_adds_little_to_its_base_image(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {name: inspect_image(name)["Size"] for name in (SERVER, base("server"), ETCD, base("etcd"))}
    with capsys.disabled():
        print(f"\ncheck-image: {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in sizes.items())}")
    assert 0 < sizes[SERVER] - sizes[base("server")] < ADDED_BYTES


def test_no_process_compiles_modules_at_start() -> None:
    """The root file system is read-only, so a module that the image has not compiled would be compiled again at every
    start."""
    program = (
        "import os, sys, urllib.request, kvstore.node.supervisor, kvstore.shard.process, kvstore_cli.main\n"
        "compiled = [m.__cached__ for m in sys.modules.values() if getattr(m, '__cached__', None)]\n"
        "print(len(compiled), [path for path in compiled if not os.path.exists(path)])"
    )
    count, _, missing = run_once(SERVER, "python", "-I", "-W", "ignore", "-c", program).strip().partition(" ")
    assert int(count) > 200 and missing == "[]"


# ---- how a server lives in one -----------------------------------------------------------------------------------


def test_it_is_ready_and_its_health_check_succeeds(server: Container) -> None:
    assert server.wait_ready() == 7070
    assert server.healthy() and server.health() == "healthy"
    assert server.run("id", "-u").stdout.strip() == "10001"


def test_it_starts_without_a_warning(server: Container) -> None:
    """The server has no Unix socket: it cannot write to /tmp, the usual place, and no other container would see a
    socket there."""
    assert "WARNING" not in server.logs() and "ERROR" not in server.logs()
    assert " unix_socket=off " in server.logs()


def test_clients_work_from_outside_and_from_another_container(
    server: Container, network: Network, new_namespace: MakeNamespace
) -> None:
    keys = make_keys(8)
    with KVStoreClient(f"tcp://{server.address}:7070", new_namespace(4096)) as client:
        put(client, keys)
        assert [bytes(block) for block in client.get(keys).blocks] == blocks_of(keys, 4096)
    with Container("ping", "--endpoint", f"tcp://{server.name}:7070", network=network, entrypoint="kvstore") as other:
        assert other.wait() == 0, other.logs()
        assert "1 shard(s) answered" in other.logs()


def test_it_has_only_the_rights_its_settings_need(server: Container) -> None:
    lines = server.run("cat", "/proc/1/status").stdout.splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"] == ["10001"] * 4 and status["NoNewPrivs"] == ["1"] and status["Seccomp"] == ["2"]
    assert all(int(status[f"Cap{kind}"][0], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    for place in ("/x", "/tmp/x", "/opt/kvstore/x", "/run/x"):
        assert "Read-only file system" in server.run("touch", place, check=False).stderr, place


def test_sigterm_ends_it_within_the_grace_period(network: Network) -> None:
    with Container(*SMALL, network=network) as server:
        server.wait_ready()
        began = time.monotonic()
        assert server.stop(GRACE_S) == 0  # 137 if it was killed
        assert "exit status 0" in server.logs() and time.monotonic() - began < GRACE_S
