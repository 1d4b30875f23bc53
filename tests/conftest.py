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
_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder for sockets of vLLM, which engines that are killed leave behind


# How many examples property tests try: `dev` is for quick runs, `ci` is the whole budget. A test that wants more or
# fewer takes a multiple, see tests/support/properties.py.
# On a busy machine examples take as long as they like.
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
    if _VLLM_SOCKETS not in os.environ:  # else another process has made it, and starts this one
        folder = tempfile.mkdtemp(prefix="kvstore-tests-")
        os.environ[_VLLM_SOCKETS] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays, so nobody looks for garbage in it before the end: each worker would for 5 of 14 s."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries complain of what they find left then


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers: `start_server("--shards", "3", memory="64MiB", segment="4MiB")`."""
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
    """For servers that are started with `**clock.environment`: their time, which a test sets forward."""
    return Clock(tmp_path / "clock")


@pytest.fixture(scope="module")
def tcp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a module's tests of what asks a store for no blocks: it has no Unix socket. None may harm it."""
    with _started(tmp_path_factory, "off") as server, server.unharmed():
        yield server


@pytest.fixture(scope="module", params=["off", "kv.sock"], ids=["tcp", "shared-memory"])
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a module, without and with a Unix socket, where clients read its memory. Tests use `server`."""
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
    """A server of one shard, shared by a module's tests: none of them may harm it."""
    with shared_server.unharmed():
        yield shared_server


@pytest.fixture
def new_namespace(request: pytest.FixtureRequest) -> MakeNamespace:
    """`new_namespace(block_bytes)`: a namespace that no other test uses."""

    def make(block_bytes: int = 4096, **fields: object) -> Namespace:
        return make_namespace(block_bytes, f"{request.node.name}-{next(_numbers)}", **fields)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For the disk tier of a server."""
    return tmp_path / "disk"


@pytest.fixture
def namespace(request: pytest.FixtureRequest, new_namespace: MakeNamespace) -> Namespace:
    """A namespace that no other test uses, of the module's `BLOCK_BYTES`, else as for tests of the disk."""
    return new_namespace(getattr(request.module, "BLOCK_BYTES", BLOCK))
