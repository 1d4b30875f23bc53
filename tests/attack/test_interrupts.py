"""Ctrl-C at any moment of a call: the client can be used on, and what it returns later are the right bytes."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore_client import KVStoreClient, KVStoreError
from tests.attack.scale import FULL
from tests.support.harness import Server, block_of, make_keys, make_namespace, wait_until

NAMESPACE = make_namespace(65_536, "interrupts")
COUNT = 64
KEYS = make_keys(COUNT)
BLOCKS = np.array([np.frombuffer(block_of(key, NAMESPACE.block_bytes), dtype=np.uint8) for key in KEYS])
ROUNDS = 3000 if FULL else 300
CALL_S = 0.01  # about what one call takes


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest keeps for itself."""


# Another process sends the signals: a thread of this one would send them only while it holds the interpreter's lock.
SENDER = """
import os, signal, sys, time
while line := sys.stdin.readline():
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGUSR1)
"""


class Interrupter:
    """Interrupts this thread once a round, some time after `arm`, unless `disarm` comes first."""

    def __init__(self) -> None:
        self._armed = False
        self._sender = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, text=True)
        self._before = signal.signal(signal.SIGUSR1, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise Interrupt

    def arm(self, after_s: float) -> None:
        assert self._sender.stdin is not None
        self._armed = True
        self._sender.stdin.write(f"{after_s}\n")
        self._sender.stdin.flush()

    def disarm(self) -> None:
        self._armed = False

    def close(self) -> None:
        assert self._sender.stdin is not None
        self.disarm()
        self._sender.stdin.close()
        self._sender.wait()
        signal.signal(signal.SIGUSR1, self._before)


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    interrupter = Interrupter()
    yield interrupter
    interrupter.close()


# An interrupt between two instructions may drop a socket before it is closed: the interpreter closes it then.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupted_client_goes_on_and_reads_what_was_set(server: Server, interrupter: Interrupter) -> None:
    rng = random.Random(1)
    out = np.zeros_like(BLOCKS)
    interrupted = 0
    with KVStoreClient(server.endpoint, NAMESPACE, timeout_s=10) as client:

        def stream() -> None:
            for position, block in client.stream_get(KEYS):
                assert bytes(block) == BLOCKS[position].tobytes()

        def borrow() -> None:
            with client.borrow(KEYS) as blocks:
                for block, row in zip(blocks, BLOCKS, strict=True):
                    assert block is None or bytes(block) == row.tobytes()

        calls = [
            lambda: client.set(KEYS, BLOCKS, deferred=False),
            lambda: client.set(KEYS, BLOCKS),
            lambda: client.get_into(KEYS, out),
            stream,
            borrow,
            lambda: client.contains(KEYS),
            lambda: client.delete(KEYS[:8]),
        ]
        for _ in range(ROUNDS):
            try:
                interrupter.arm(rng.uniform(0, CALL_S))
                rng.choice(calls)()
                interrupter.disarm()  # not only in `finally`, where an interrupt would not be counted
            except Interrupt:
                interrupted += 1
                # The call at once after it may find its connection lost; no call may find anything else.
                with contextlib.suppress(KVStoreError):
                    client.ping()
            finally:
                interrupter.disarm()  # a failure is reported in peace
            assert client.set(KEYS, BLOCKS, deferred=False).error == 0
            out[:] = 0
            assert client.get_into(KEYS, out).all() and np.array_equal(out, BLOCKS)
        gc.collect()
        client.ping()
        wait_until(lambda: client.info().shards[0].lent_blocks == 0, what="nothing is lent any more")
    assert interrupted > ROUNDS / 10
