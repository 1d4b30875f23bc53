"""Fixtures for every test: servers that are always ended, and namespaces that no other test uses."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvstore_client import Namespace
from tests.support import programs, progress, scheduling
from tests.support.clock import Clock
from tests.support.disk import BLOCK
from tests.support.harness import MakeNamespace, Server, StartServer, make_namespace

_numbers = itertools.count()
_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder for vLLM's sockets, which killed engines do not remove


# The number of examples that property tests try: few in `dev`, for quick runs, and the full number in `ci`. A test that
# needs more or fewer uses a multiple; see tests/support/properties.py. Examples have no time limit, because the machine
# may be busy.
for _profile, _examples in (("dev", 20), ("ci", 100)):
    settings.register_profile(
        _profile, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(programs)
    config.pluginmanager.register(scheduling)
    config.pluginmanager.register(progress)
    config.addinivalue_line("markers", "soak: its length is KVSTORE_SOAK_S seconds")
    if _VLLM_SOCKETS not in os.environ:  # otherwise the process that starts this one has made it
        folder = tempfile.mkdtemp(prefix="kvstore-tests-")
        os.environ[_VLLM_SOCKETS] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Make the garbage collector skip all imported objects, which stay until the end. Otherwise each worker would spend
    5 of 14 s on them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries report errors at the end if objects are still frozen


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """`start_server("--shards", "3", memory="64MiB", segment="4MiB")` starts a server, which is killed after the
    test."""
    servers: list[Server] = []

    def start(*arguments: str, memory: str = "64MiB", segment: str = "4MiB", **extra_environment: str) -> Server:
        log = tmp_path / f"server-{len(servers)}.log"
        server = Server(log, "--memory", memory, "--segment", segment, *arguments, **extra_environment)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """A clock for servers that are started with `**clock.environment`; the test sets it forward."""
    return Clock(tmp_path / "clock")


@pytest.fixture(scope="module")
def tcp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a Unix socket, shared by a module's tests, none of which may damage it."""
    with _started(tmp_path_factory, "off") as server, server.unharmed():
        yield server


@pytest.fixture(scope="module", params=["off", "kv.sock"], ids=["tcp", "shared-memory"])
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for a module: once without and once with a Unix socket for shared memory. Tests use `server`."""
    with _started(tmp_path_factory, request.param) as server:
        yield server


@contextlib.contextmanager
def _started(folders: pytest.TempPathFactory, socket: str) -> Iterator[Server]:
    folder = folders.mktemp("server")
    where = "off" if socket == "off" else str(folder / socket)
    server = Server(folder / "server.log", "--memory", "256MiB", "--segment", "8MiB", "--unix-socket", where)
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A server of one shard, shared by a module's tests, none of which may damage it."""
    with shared_server.unharmed():
        yield shared_server


@pytest.fixture
def new_namespace(request: pytest.FixtureRequest) -> MakeNamespace:
    """`new_namespace(block_bytes)` makes a namespace that no other test uses."""

    def make(block_bytes: int = 4096, **fields: object) -> Namespace:
        return make_namespace(block_bytes, f"{request.node.name}-{next(_numbers)}", **fields)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for the disk tier of a server."""
    return tmp_path / "disk"


@pytest.fixture
def namespace(request: pytest.FixtureRequest, new_namespace: MakeNamespace) -> Namespace:
    """A namespace that no other test uses, with the module's `BLOCK_BYTES`, or the block size of the disk tests."""
    return new_namespace(getattr(request.module, "BLOCK_BYTES", BLOCK))
