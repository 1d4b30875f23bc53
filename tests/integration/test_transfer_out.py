"""Transfers out of an engine: whatever the store does, every block is reported exactly once, and no caller waits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.engine import transfer_out as transfer_module
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.transfer_out import BlockOut, SendAs, SendOutcome, TransferOut
from tests.support.harness import MakeNamespace, Server, StartServer, block_of, blocks_of, make_keys, wait_until
from tests.support.slow_link import SlowLink

TIMEOUT_S = 1.0
SLACK_S = 1.0  # what a busy machine may add to a deadline
AT_ONCE_S = 0.2
BLOCK_BYTES = 64 << 10

Rows: TypeAlias = "npt.NDArray[np.uint8]"
StartOut: TypeAlias = Callable[..., "Out"]

STORED, PRESENT, DROPPED, FAILED = SendOutcome.STORED, SendOutcome.PRESENT, SendOutcome.DROPPED, SendOutcome.FAILED


class Out(TransferOut):
    """Records the calls of ``done``. The token of a block is its key in ``rows``; the row is overwritten when the block
    is reported."""

    def __init__(self, guard: StoreGuard, counters: Counters, limit: int) -> None:
        self.guard = guard
        self.outcomes: dict[Hashable, SendOutcome] = {}
        self.named: Counter[Hashable] = Counter()
        self.rows: dict[Hashable, Rows] = {}
        self._told = threading.Lock()
        super().__init__(guard, limit=limit, counters=counters, done=self._note)

    def _note(self, results: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        with self._told:
            for token, outcome in results:
                self.named[token] += 1
                self.outcomes[token] = outcome
                self.rows[token][:] = 0xEE

    def send(
        self,
        keys: Sequence[bytes],
        block_bytes: int = BLOCK_BYTES,
        how: Sequence[SendAs] | None = None,
        parent: bytes | None = None,
    ) -> None:
        """Put the blocks of a chain that continues after `parent`. The token of each block is its key."""
        for key in keys:
            self.rows[key] = np.frombuffer(block_of(key, block_bytes), dtype=np.uint8).copy()
        how = how or [SendAs()] * len(keys)
        self.put(map(BlockOut, keys, [self.rows[key] for key in keys], keys, [parent, *keys[:-1]], how))

    def of(self, keys: Sequence[bytes]) -> list[SendOutcome | None]:
        return [self.outcomes.get(key) for key in keys]

    def tally(self) -> dict[SendOutcome, int]:
        return dict(Counter(self.outcomes.values()))

    def all_named_once(self) -> bool:
        """Whether every block was reported exactly once. Call this when nothing is in progress."""
        return not self.waiting and self.named == Counter(dict.fromkeys(self.rows, 1))


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def start_out(counters: Counters) -> Iterator[StartOut]:
    """``start_out(server, namespace, limit=...)`` starts a transfer. After the test, the fixture checks that every
    block was reported exactly once."""
    started: list[Out] = []

    def start(server: Server | SlowLink, namespace: Namespace, limit: int = 1000, timeout_s: float = TIMEOUT_S) -> Out:
        guard = StoreGuard(server.endpoint, namespace, timeout_s=timeout_s, counters=counters)
        started.append(Out(guard, counters, limit))
        return started[-1]

    yield start
    for out in started:
        out.close(0.0)
        wait_until(out.all_named_once, what="every block is named once")
        out.guard.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit each round trip to this many blocks."""
    monkeypatch.setattr(transfer_module, "SEND_CHUNK_BYTES", 4 * BLOCK_BYTES)
    return 4


def stored_right(client: KVStoreClient, keys: Sequence[bytes]) -> list[bool]:
    """Return which keys are stored, and check the bytes of their blocks."""
    blocks = client.get(keys).blocks
    for key, block in zip(keys, blocks, strict=True):
        assert block is None or bytes(block) == block_of(key, client.namespace.block_bytes)
    return [block is not None for block in blocks]


def test_blocks_arrive_whole_in_the_store(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters, small_chunks: int
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    out = start_out(server, namespace)
    keys = make_keys(5 * small_chunks + 1)
    out.send(keys[:7])
    out.send(keys[7:])
    assert out.drain(10) and out.waiting == 0
    assert out.tally() == {STORED: len(keys)}
    with KVStoreClient(server.endpoint, namespace) as client:
        assert all(stored_right(client, keys))
    counted = counters.take()
    assert counted.pop("transfer_out_seconds") > 0
    assert counted == {"transfer_out_blocks": len(keys), "transfer_out_bytes": len(keys) * BLOCK_BYTES}


class Calls:
    """Records the sizes of a transfer's batches."""

    def __init__(self, out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        send = out._send

        def counted(batch: list[Any]) -> int:
            self.batches.append(len(batch))
            return send(batch)

        monkeypatch.setattr(out, "_send", counted)


def test_blocks_put_in_succession_are_sent_together(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "SEND_GATHER_S", 30.0)
    out = start_out(server, new_namespace(BLOCK_BYTES))
    calls = Calls(out, monkeypatch)
    keys = make_keys(20)
    for key in keys:
        out.send([key])
    assert not calls.batches and out.waiting == 20
    assert out.drain(10), "who waits for the end makes it send"
    assert calls.batches == [20] and out.tally() == {STORED: 20}


def test_no_caller_waits_for_a_block_to_be_sent(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut
) -> None:
    out = start_out(server, new_namespace(BLOCK_BYTES))
    for key in make_keys(3):
        out.send([key])
        wait_until(lambda: not out.waiting, what="it is sent though no other block comes")
    assert out.tally() == {STORED: 3}


def test_a_batch_is_sent_when_full_or_handed_over(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "SEND_GATHER_S", 30.0)
    monkeypatch.setattr(transfer_module, "GATHER_BYTES", 4 * BLOCK_BYTES)
    out = start_out(server, new_namespace(BLOCK_BYTES))
    keys, handed_over, waiting = make_keys(4), make_keys(1, first=100), make_keys(1, first=200)
    for key in keys:
        out.send([key])
    wait_until(lambda: out.of(keys) == [STORED] * 4, what="a full batch is sent")
    out.send(waiting)
    out.send(handed_over, how=[SendAs(handed_over=True)])
    wait_until(lambda: out.of(handed_over) == [STORED], what="another engine waits for it")
    assert out.of(waiting) == [None]


def test_waiting_for_other_blocks_never_drops_a_block(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "SEND_GATHER_S", 30.0)
    out = start_out(server, new_namespace(BLOCK_BYTES), limit=4)
    keys = make_keys(2)
    out.send(keys)
    wait_until(lambda: out.of(keys) == [STORED] * 2, what="half of the room is taken")


def test_blocks_keep_the_attributes_they_were_put_with(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(10)
    out = start_out(server, namespace)
    out.send(keys, how=[SendAs()] * 3 + [SendAs(0, 1.0)] * 3 + [SendAs(2)] * 4)
    with KVStoreClient(server.endpoint, namespace) as client:
        wait_until(lambda: out.of(keys) == [SendOutcome.STORED] * 10)
        wait_until(lambda: client.contains(keys).tolist() == [True] * 3 + [False] * 3 + [True] * 4)


def test_blocks_that_the_store_has_are_not_sent(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(6)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(keys[::2], blocks_of(keys[::2], BLOCK_BYTES), deferred=False)
    out = start_out(server, namespace)
    out.send(keys)
    assert out.drain(10)
    assert out.of(keys) == [PRESENT, STORED] * 3
    counted = counters.take()
    assert counted["present_blocks"] == 3 and counted["transfer_out_bytes"] == 3 * BLOCK_BYTES


def test_a_key_queued_twice_is_reported_twice(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut
) -> None:
    out = start_out(server, new_namespace(BLOCK_BYTES))
    [key] = make_keys(1)
    for token in ("one", "two"):
        out.rows[token] = np.frombuffer(block_of(key, BLOCK_BYTES), dtype=np.uint8).copy()
    out.put([BlockOut(key, out.rows["one"], "one"), BlockOut(key, out.rows["two"], "two")])
    assert out.drain(10) and out.outcomes.keys() == {"one", "two"}


@pytest.mark.exclusive
def test_a_frozen_store_delays_no_caller_and_costs_the_oldest_blocks(
    start_server: StartServer,
    new_namespace: MakeNamespace,
    start_out: StartOut,
    counters: Counters,
    small_chunks: int,
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    out = start_out(server, namespace, limit=10, timeout_s=30)
    first, keys = make_keys(small_chunks), make_keys(50, first=1000)
    with server.stopped():
        out.send(first)
        wait_until(lambda: not out._queue, what="the first batch is on its way")
        slowest = 0.0
        for key in keys:
            started = time.monotonic()
            out.send([key])
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < AT_ONCE_S
        assert out.of(keys) == [DROPPED] * 40 + [None] * 10
        assert out.waiting == small_chunks + 10
        assert not out.drain(0.1)
    assert out.drain(10)
    assert out.of(first) == [STORED] * small_chunks and out.of(keys[40:]) == [STORED] * 10
    assert counters.take()["dropped_blocks"] == 40
    with KVStoreClient(server.endpoint, namespace) as client:
        assert stored_right(client, keys) == [False] * 40 + [True] * 10


def test_a_prompt_larger_than_the_queue_keeps_its_first_blocks(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, small_chunks: int
) -> None:
    server = start_server()
    out = start_out(server, new_namespace(BLOCK_BYTES), limit=3, timeout_s=30)
    keys = make_keys(8)
    with server.stopped():
        out.send(make_keys(1, first=100))
        wait_until(lambda: not out._queue, what="the first batch is on its way")
        out.send(keys)
        assert out.of(keys) == [None] * 3 + [DROPPED] * 5


def test_prompts_beyond_the_queue_are_stored_as_whole_beginnings(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters, small_chunks: int
) -> None:
    """If a block was dropped, the later blocks of its prompt are not sent, because lookups could not find them."""
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    out = start_out(server, namespace, limit=10, timeout_s=30)
    prompts = [make_keys(6, first=1000 * number) for number in range(1, 6)]
    with server.stopped():
        out.send(make_keys(small_chunks))
        wait_until(lambda: not out._queue, what="the first batch is on its way")
        for half in (slice(0, 3), slice(3, 6)):
            for keys in prompts:
                out.send(keys[half], parent=keys[2] if half.start else None)
    assert out.drain(10)
    with KVStoreClient(server.endpoint, namespace) as client:
        stored = [client.contains(keys).tolist() for keys in prompts]
        assert sum(client.match_prefix(keys) for keys in prompts) == sum(map(sum, stored)) >= 10
    assert counters.take()["dropped_blocks"] == 30 - sum(map(sum, stored))


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02])
def test_a_frozen_store_fails_blocks_in_time_and_gets_no_wrong_bytes(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters, after_s: float
) -> None:
    """Rows are reused when their block is reported, so nothing may be read from them afterwards."""
    server, namespace = start_server(memory="256MiB"), new_namespace(1 << 20)
    out = start_out(server, namespace)
    keys, more = make_keys(64), make_keys(3, first=500)
    out.send(keys, 1 << 20)
    threading.Event().wait(after_s)  # so that the store freezes before, in or between the requests
    with server.stopped():
        wait_until(lambda: set(out.outcomes) == set(keys), 6 * TIMEOUT_S)
    assert set(out.tally()) <= {STORED, FAILED}
    assert counters.take().get("unsaved_blocks", 0) == out.tally().get(FAILED, 0)
    wait_until(lambda: out.guard.call(lambda client: bool(client.ping()), False))
    out.send(more, 1 << 20)
    assert out.drain(10) and out.of(more) == [STORED] * 3
    with KVStoreClient(server.endpoint, namespace) as client:
        present = stored_right(client, keys)
        assert all(there for there, key in zip(present, keys, strict=True) if out.outcomes[key] is STORED)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_store_killed_during_a_send_fails_what_it_did_not_receive(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, after_s: float, small_chunks: int
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    out = start_out(server, namespace)
    keys = make_keys(200)
    out.send(keys)
    threading.Event().wait(after_s)
    server.kill()
    wait_until(lambda: set(out.outcomes) == set(keys), 5 * TIMEOUT_S)
    assert set(out.tally()) <= {STORED, FAILED}
    server.restart()
    more = make_keys(3, first=1000)
    wait_until(lambda: out.guard.call(lambda client: bool(client.ping()), False))
    out.send(more)
    assert out.drain(10) and out.of(more) == [STORED] * 3


def test_handed_over_blocks_go_first_and_are_not_dropped(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, small_chunks: int
) -> None:
    server = start_server()
    out = start_out(server, new_namespace(BLOCK_BYTES), limit=10, timeout_s=30)
    first, others = make_keys(small_chunks), make_keys(30, first=1000)
    handed_over, late = make_keys(20, first=2000), make_keys(1, first=3000)
    with server.stopped():
        out.send(first)
        wait_until(lambda: not out._queue, what="the first batch is on its way")
        out.send(others)
        assert out.of(others) == [None] * 10 + [DROPPED] * 20
        out.send(handed_over, how=[SendAs(handed_over=True)] * 20)
        assert out.of(others) == [DROPPED] * 30 and out.of(handed_over) == [None] * 20
        out.send(late)
    assert out.drain(10)
    assert out.of(handed_over) == [STORED] * 20
    assert out.of(late) == [DROPPED], "there is no room beside them"


def test_handed_over_blocks_do_not_wait_for_others_on_a_slow_link(
    tcp_server: Server, new_namespace: MakeNamespace, start_out: StartOut
) -> None:
    with SlowLink(tcp_server.port) as link:
        link.bytes_per_s = 8 << 20
        out = start_out(link, new_namespace(BLOCK_BYTES), timeout_s=30.0)
        ordinary, handed_over = make_keys(512), make_keys(8, first=1000)  # 4 s on this link
        out.send(ordinary)
        wait_until(lambda: STORED in out.tally(), what="the first ones are there")
        out.send(handed_over, how=[SendAs(handed_over=True)] * len(handed_over))
        wait_until(lambda: out.of(handed_over) == [STORED] * len(handed_over), what="the others are there")
        assert out.of(ordinary).count(None) > len(ordinary) // 2, "most of those that came before still wait"
        link.bytes_per_s = None
        assert out.drain(30)


def test_closing_sends_the_waiting_blocks(server: Server, new_namespace: MakeNamespace, start_out: StartOut) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    out = start_out(server, namespace)
    keys = make_keys(30)
    out.send(keys)
    out.close(10)
    assert out.tally() == {STORED: 30}
    late = make_keys(2, first=100)
    out.send(late)
    assert out.of(late) == [DROPPED] * 2
    assert not out._thread.is_alive()


@pytest.mark.exclusive
def test_closing_waits_for_a_frozen_store_up_to_its_limit(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, small_chunks: int
) -> None:
    server = start_server()
    out = start_out(server, new_namespace(BLOCK_BYTES))
    keys = make_keys(20)
    with server.stopped():
        out.send(keys)
        wait_until(lambda: out._sending, what="the first batch is on its way")
        started = time.monotonic()
        out.close(0.3)
        assert time.monotonic() - started < 0.3 + TIMEOUT_S + SLACK_S
        assert out.of(keys[small_chunks:]) == [DROPPED] * (20 - small_chunks)
        wait_until(lambda: out.of(keys[:small_chunks]) == [FAILED] * small_chunks, 3 * TIMEOUT_S)


def test_blocks_put_during_close_are_reported_too(
    server: Server, new_namespace: MakeNamespace, start_out: StartOut, small_chunks: int
) -> None:
    """Several threads put blocks: some before, some during and some after the close."""
    out = start_out(server, new_namespace(BLOCK_BYTES), limit=8)

    def put(number: int) -> None:
        for key in make_keys(50, first=100 * number):
            out.send([key])

    threads = [threading.Thread(target=put, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    out.close(0.01)
    for thread in threads:
        thread.join()
    wait_until(out.all_named_once)
    assert len(out.outcomes) == 150


def test_a_store_without_room_fails_the_blocks_it_cannot_take(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters
) -> None:
    server = start_server(memory="4MiB", segment="4MiB")
    namespace = new_namespace(3 << 20)
    out = start_out(server, namespace)
    keys = make_keys(4)
    out.send(keys, 3 << 20)
    assert out.drain(10)
    assert out.tally() == {STORED: 1, FAILED: 3}
    assert counters.take()["unsaved_blocks"] == 3


def test_a_store_that_refuses_the_namespace_fails_every_block(
    start_server: StartServer, new_namespace: MakeNamespace, start_out: StartOut, counters: Counters
) -> None:
    out = start_out(start_server(memory="8MiB", segment="1MiB"), new_namespace(2 << 20))
    keys = make_keys(3)
    out.send(keys, 2 << 20)
    assert out.drain(10) and out.tally() == {FAILED: 3}
    assert counters.take()["unsaved_blocks"] == 3


def test_a_queue_of_size_zero_is_an_error(server: Server, new_namespace: MakeNamespace, start_out: StartOut) -> None:
    guard = start_out(server, new_namespace()).guard
    with pytest.raises(ValueError, match="at least 1"):
        TransferOut(guard, limit=0, counters=Counters(), done=lambda results: None)
