"""System calls of the disk tier that take ten seconds: PINGs, and GETs from memory, are still answered at once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.wire import SlowRequest
from kvstore_client import KVStoreClient
from tests.attack.scale import FULL, LONGEST_S
from tests.support.disk import disk_flags, disk_info, fill, wait_until_on, wait_until_written
from tests.support.harness import (
    GET,
    PART,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    set_frames,
    wait_until,
)
from tests.support.pinger import Pinger

DELAY_S = 10.0 if FULL else 3.0
BLOCK = 64 << 10
SlowServer = Callable[[float], Server]

pytestmark = pytest.mark.exclusive  # it measures time


@pytest.fixture(scope="module")
def slow_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "slow_calls.so"
    source = Path(__file__).with_name("slow_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def trigger(tmp_path: Path) -> Path:
    """A file that names the slow calls."""
    return tmp_path / "trigger"


@pytest.fixture
def slow_server(start_server: StartServer, slow_calls: Path, trigger: Path, tmp_path: Path) -> SlowServer:
    """Start a server with a slow disk: each named call takes this many seconds."""

    def start(seconds: float) -> Server:
        folder = tmp_path / "disk"
        return start_server(
            *disk_flags(folder, "256MiB"),
            memory="32MiB",
            segment="4MiB",
            LD_PRELOAD=str(slow_calls),
            SLOW_CALLS_FOLDER=str(folder),
            SLOW_CALLS_TRIGGER=str(trigger),
            SLOW_CALLS_MS=str(int(seconds * 1000)),
        )

    return start


@pytest.mark.parametrize("call", ["fallocate", "open", "unlink"])
def test_requests_are_not_delayed_by_a_slow(
    call: str, slow_server: SlowServer, new_namespace: MakeNamespace, trigger: Path
) -> None:
    server = slow_server(DELAY_S)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=30) as client:
        wait_until_on(client)
        first, second = make_keys(50), make_keys(60, first=1000)
        client.set(first, blocks_of(first, BLOCK))
        wait_until_written(client)
        blocks = blocks_of(second, BLOCK)
        trigger.write_text(call)
        with server.unharmed(), Pinger(server) as pinger:
            client.set(second, blocks)  # more segments are needed, in new files
            end = time.monotonic() + DELAY_S / 2
            while time.monotonic() < end:
                assert client.get(second).blocks == blocks
                time.sleep(0.02)  # other tests measure time at the same moment
        assert pinger.latency.longest_s <= LONGEST_S, pinger.latency
        trigger.unlink()
        wait_until(lambda: wait_until_written(client, 60))
        assert client.get(first + second).blocks == blocks_of(first + second, BLOCK)


def test_a_waiting_read_ends_in_time_though_its_client_waits_for_disk(
    slow_server: SlowServer, new_namespace: MakeNamespace, trigger: Path
) -> None:
    """The client has also sent a SET, so the server reads nothing more from that client until the disk has caught
    up."""
    server = slow_server(6.0)
    namespace = new_namespace(BLOCK)
    [key, promised, *many] = make_keys(402)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=30) as client,
        KVStoreClient(server.endpoint, namespace, timeout_s=1, fail_open=True) as flood,
        RawClient(server) as raw,
        client.promise([promised]),
    ):
        wait_until_on(client)
        trigger.write_text("fallocate")
        raw.hello(namespace.canonical())
        assert raw.ask(*set_frames(1, [key], blocks_of([key], BLOCK)))[0] == SET_REPLY
        raw.send(pack(GET, 2, 20_000, 1, 16, 0, True, False, False, False, 2000), promised)
        began = time.monotonic()
        flood.set(many, blocks_of(many, BLOCK))  # as many blocks as possible before the disk counts as behind
        raw.sock.settimeout(10.0)
        header, frames = raw.reply()
        assert header[:2] == [PART, 2] and not frames
        assert time.monotonic() - began < 4.0, "it waited for the disk"
        assert disk_info(client).behind
        trigger.unlink()


def test_requests_that_wait_for_the_disk_are_in_the_slow_log(
    slow_server: SlowServer, new_namespace: MakeNamespace, trigger: Path
) -> None:
    server = slow_server(1.0)
    namespace = new_namespace(BLOCK)
    [key, *many] = make_keys(1200)
    head, named, *payload = set_frames(1, [key], blocks_of([key], BLOCK))
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=30) as client,
        KVStoreClient(server.endpoint, namespace, timeout_s=30) as flood,
        RawClient(server) as raw,
    ):

        def slow(verb: str) -> SlowRequest | None:
            (log,) = client.slow_requests().values()
            return next((row for row in log.requests if row.client == "raw" and row.verb == verb), None)

        wait_until_on(client)
        raw.hello(namespace.canonical())
        raw.send(head, named, more=True)
        trigger.write_text("fallocate")
        with ThreadPoolExecutor(1) as threads:
            flooding = threads.submit(flood.set, many[:400], blocks_of(many[:400], BLOCK))
            wait_until(lambda: disk_info(client).behind)
            raw.send(*payload)  # the server reads it only when the disk has caught up
            assert raw.reply()[0][0] == SET_REPLY
            trigger.unlink()
            flooding.result(60)
        row = wait_until(lambda: slow("set"))
        assert (row.stage, row.keys, row.bytes) == ("disk", 1, BLOCK) and 0.1 < row.seconds <= row.total_s

        fill(client, many[400:], BLOCK)  # so many blocks that the first ones are only on disk
        wait_until_written(client)
        trigger.write_text("pread")
        raw.send(pack(GET, 2, 60_000, 1, 16), key)
        assert raw.reply()[0][:2] == [PART, 2]
        trigger.unlink()
        row = wait_until(lambda: slow("get"))
        assert (row.stage, row.keys, row.bytes) == ("disk", 1, BLOCK) and 0.9 < row.seconds <= row.total_s
