"""Ctrl-C at any moment of a call: the client stays usable, and later calls return the right bytes."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from kvstore_client import KVStoreClient, KVStoreError
from tests.attack.scale import FULL
from tests.support.harness import ROOT, Server, block_of, make_keys, make_namespace, wait_until

NAMESPACE = make_namespace(65_536, "interrupts")
COUNT = 64
KEYS = make_keys(COUNT)
BLOCKS = np.array([np.frombuffer(block_of(key, NAMESPACE.block_bytes), dtype=np.uint8) for key in KEYS])
TESTS = f"{ROOT}/tests/"
INTERRUPTED = 1000 if FULL else 40  # calls to interrupt; the test runs as many rounds as this takes


class Interrupt(BaseException):
    """Replaces KeyboardInterrupt, which pytest handles itself."""


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
    """Provides an `Interrupter`, and removes the callbacks of the garbage collector meanwhile: an exception raised in a
    callback would be lost, and pytest would keep it with all its frames."""
    before, gc.callbacks[:] = gc.callbacks[:], []
    interrupter = Interrupter()
    yield interrupter
    interrupter.close()
    gc.callbacks[:] = before


# An interrupt between two instructions may drop a socket before it is closed: then the interpreter closes it.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupted_client_continues_and_reads_the_right_bytes(server: Server, interrupter: Interrupter) -> None:
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
        began = time.monotonic()
        for call in calls:
            call()
        call_s = (time.monotonic() - began) / len(calls)
        while interrupted < INTERRUPTED:
            try:
                interrupter.arm(rng.uniform(0, call_s))
                rng.choice(calls)()
                interrupter.disarm()  # here too, because an interrupt in `finally` would not be counted
            except Interrupt:
                interrupted += 1
                # The next call may find its connection lost; later calls must find nothing wrong.
                with contextlib.suppress(KVStoreError):
                    client.ping()
            finally:
                interrupter.disarm()  # so that a failure is reported undisturbed
            assert client.set(KEYS, BLOCKS, deferred=False).error == 0
            out[:] = 0
            assert client.get_into(KEYS, out).all() and np.array_equal(out, BLOCKS)
        gc.collect()
        client.ping()
        wait_until(lambda: client.info().shards[0].lent_blocks == 0, what="nothing is lent any more")


class Interruption:
    """Raises `Interrupt` in this thread at the n-th place where the interpreter checks for signals."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.place = ""  # where the exception was raised

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()  # the trace function of a coverage tool, if any
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename.startswith(TESTS):
            return None
        places = looks(frame.f_code)

        def instruction(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event == "opcode" and frame.f_lasti in places:
                self._left -= 1
                if not self._left:
                    sys.settrace(None)
                    self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise Interrupt
            return instruction

        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return instruction


@functools.cache
def looks(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions before which the interpreter checks for signals: after calls, at the start,
    and where a loop repeats."""
    found = list(dis.get_instructions(code))
    after = {this.offset for before, this in itertools.pairwise(found) if before.opname.startswith(("CALL", "RESUME"))}
    return frozenset(after | {each.argval for each in found if "JUMP_BACKWARD" in each.opname})


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("kind", ["borrow", "get_into", "stream_get"])
def test_an_interrupt_anywhere_in_a_read_leaves_nothing_lent(server: Server, kind: str) -> None:
    keys, blocks = KEYS[:8], BLOCKS[:8]
    out = np.zeros_like(blocks)

    def read(client: KVStoreClient) -> None:
        if kind == "borrow":
            with client.borrow(keys):
                pass
        elif kind == "get_into":
            client.get_into(keys, out)
        else:
            list(client.stream_get(keys))

    gc.disable()  # nothing may rely on the collector
    with (
        contextlib.ExitStack() as ended,
        KVStoreClient(server.endpoint, make_namespace(65_536, "everywhere"), timeout_s=10) as client,
    ):
        ended.callback(gc.enable)
        client.set(keys, blocks, deferred=False)
        for number in range(1, 5000):
            interruption = Interruption(number)
            with contextlib.suppress(Interrupt), interruption:
                read(client)
            with contextlib.suppress(KVStoreError):
                client.ping()
            told = f"interrupted at {interruption.place}"
            wait_until(lambda: client.info().shards[0].lent_blocks == 0, what=f"nothing is lent, {told}")
            assert client.get_into(keys, out).all(), told
            if not interruption.place:
                break
    assert number > 200
