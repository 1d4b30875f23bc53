"""`kvstore top` over two real nodes: what it prints once, as JSON, and live in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.harness import Server, blocks_of, environment, make_keys, make_namespace

BLOCK = 4096
TURN_S = 15.0


class Store(NamedTuple):
    nodes: list[Server]
    client: KVStoreClient

    @property
    def endpoints(self) -> list[str]:
        return [word for node in self.nodes for word in ("--endpoint", node.endpoint)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two nodes with blocks, the second one with two shards. A thread reads the blocks all the time."""
    folder = tmp_path_factory.mktemp("top")
    ended = threading.Event()
    with ExitStack() as stack:
        nodes = [
            Server(folder / f"log-{shards}", "--shards", shards, "--memory", "32MiB", "--segment", "4MiB")
            for shards in ("1", "2")
        ]
        for node in nodes:
            stack.callback(node.kill)
        endpoints = [node.endpoint for node in nodes]
        client = stack.enter_context(KVStoreClient(endpoints, make_namespace(BLOCK, "top"), fail_open=True))
        keys = make_keys(400)
        client.set(keys[:200], blocks_of(keys[:200], BLOCK), deferred=False)

        def read() -> None:
            while not ended.wait(0.01):
                client.get(keys)

        thread = threading.Thread(target=read)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield Store(nodes, client)


def top(store: Store, *arguments: str, status: int = 0, columns: int = 150) -> subprocess.CompletedProcess[str]:
    done = forked.run(
        "kvstore_cli", "top", *store.endpoints, "--interval", "0.3", *arguments, env=environment(COLUMNS=str(columns))
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def answer(store: Store, *arguments: str, status: int = 0) -> Any:
    return json.loads(top(store, "--once", "--json", *arguments, status=status).stdout)


def test_one_sample_as_json_has_every_node_and_their_sum(store: Store) -> None:
    found = answer(store, "--sort", "blocks")
    assert [row["shards"] for row in found["rows"]] in ([2, 1], [1, 2])
    blocks = [row["blocks"] for row in found["rows"]]
    assert blocks == sorted(blocks, reverse=True) and sum(blocks) == found["all"]["blocks"] == 200
    assert found["all"]["hit_rate"] == pytest.approx(0.5, abs=0.05)
    assert found["all"]["bytes_out_per_s"] > 200 * BLOCK and found["all"]["bytes_in_per_s"] > 0
    assert found["all"]["memory_limit_bytes"] == 64 << 20 and found["silent"] == []
    names = [row["name"] for row in answer(store, "--by", "shard", "--reverse")["rows"]]
    assert len(names) == 3 and names == sorted(names, reverse=True)


def test_one_sample_as_text_marks_the_sort_column(store: Store) -> None:
    shown = top(store, "--once", "--sort", "out").stdout
    assert "out▼" in shown and "2/2" in shown and re.search(r"MB/s|GB/s", shown)
    assert re.search(r"^all ", shown, re.MULTILINE)
    narrow = top(store, "--once", "--sort", "out", columns=60).stdout
    assert "a wider terminal also shows: " in narrow and all(len(line) <= 60 for line in narrow.splitlines()[:5])


def test_an_unknown_column_is_bad_usage(store: Store) -> None:
    done = top(store, "--sort", "colour", status=2)
    assert "'colour'" in done.stderr and "evicted" in done.stderr


def test_it_refreshes_in_a_terminal_and_keys_change_the_order(store: Store) -> None:
    us, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvstore_cli", "top", *store.endpoints, "--interval", "0.3"]
    variables = environment(COLUMNS="150", LINES="30", TERM="xterm")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    shown = b""

    def wait_for(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + TURN_S
        while not re.search(text.encode(), shown):
            ready, _, _ = select.select([us], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"it does not show {text!r}: {shown[-2000:]!r}"
            shown += os.read(us, 1 << 16)
        shown = b""

    try:
        wait_for("name▼")
        wait_for(r"MB/s|GB/s")
        os.write(us, b">")
        wait_for("up▼")
        os.write(us, b"r")
        wait_for("up▲")
        os.write(us, b"q")
        assert process.wait(TURN_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(us)


def test_a_dead_node_is_named_with_status_1(store: Store) -> None:
    store.nodes[0].kill()
    found = answer(store, status=1)
    assert found["all"]["shards_up"] == 2 and found["error"]["kind"] == "unreachable"
    assert any(message["severity"] == "bad" and "does not answer" in message["text"] for message in found["messages"])
    failed = top(store, "--once", status=1)
    assert "0/1" in failed.stdout and "of 3 shards did not answer" in failed.stderr
