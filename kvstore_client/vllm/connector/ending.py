"""Lets an engine send the blocks that it has computed to the store before it ends.

vLLM sends SIGTERM or SIGINT to the process of the engine's core, and kills the process some time later. `vllm serve`
kills it after ``--shutdown-timeout`` seconds, by default 0; the class `LLM` kills it after 5 s. This module does three
things to get the time to send the blocks:

* `allow_time` makes `vllm serve` wait if it would not wait otherwise. Requests are still aborted at once, because the
  core keeps the timeout of 0 with which it was started.
* `Ending` receives the signal when the core does. The engine leaves the directory of engines at once, not only after
  its last block is sent. The core continues to make steps while blocks wait. During these steps, a second signal has no
  effect. During the core's teardown, a second signal would kill the process. (A second signal is common: Ctrl-C and
  systemd send signals to all processes, and vLLM then sends another one.)
* `check_time` warns if neither of these helps.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")

# The time that an engine needs at its end to finish a step and free its memory, in addition to the time for sending.
TEARDOWN_S = 5


def needed_s(timeout_s: float) -> int:
    """Return the time that an engine may need to end, in seconds. It sends blocks for `timeout_s`, and its last call
    may take another `timeout_s`."""
    return math.ceil(2 * timeout_s) + TEARDOWN_S


def allow_time(config: VllmConfig, timeout_s: float) -> None:
    """Make the front end wait for its engine at shutdown. Call this in the front end, after it has started the engine.

    This has no effect if the engine has several API servers or several connectors, because vLLM then does not read
    `config`; see `check_time`.
    """
    if config.shutdown_timeout == 0:
        config.shutdown_timeout = needed_s(timeout_s)


def check_time(config: VllmConfig, transfer: KVTransferConfig, engine: VllmConfig | None, timeout_s: float) -> None:
    """Warn if `vllm serve` would kill this engine before its blocks are sent. `transfer`: this connector's own
    configuration. `engine`: the configuration of the whole engine, if it is known."""
    given, needed = config.shutdown_timeout, needed_s(timeout_s)
    several = getattr(config.parallel_config, "_api_process_count", 1) > 1
    whole = engine.kv_transfer_config if engine is not None else None
    is_child = whole is not None and whole.kv_connector != transfer.kv_connector
    if given < timeout_s and (given > 0 or several or is_child):
        logger.warning(
            "kvstore: with --shutdown-timeout %d, `vllm serve` may kill this engine before the blocks that it has "
            "computed are sent, which takes up to timeout_s (%.0f s). Start it with --shutdown-timeout %d or more",
            given,
            timeout_s,
            needed,
        )


class Ending:
    """Knows whether the engine is shutting down, and whether it should continue to make steps because blocks are still
    to be sent.

    Only the engine core's main thread, which handles signals, may use it.
    """

    def __init__(self, timeout_s: float, told: Callable[[], None]) -> None:
        """`timeout_s`: how long to continue, in seconds. `told`: a function that is called in a signal handler when the
        engine gets the signal to end."""
        self.begun = False
        self._timeout_s = timeout_s
        self._told = told
        self._idle_since: float | None = None

    def watch_signals(self) -> None:
        """Receive SIGTERM and SIGINT before vLLM's own handlers do. This does nothing in a process that vLLM did not
        start, because with `LLM` the engine may run in the user's program, which handles its own signals."""
        if multiprocessing.parent_process() is None or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if callable(before) and before is not signal.default_int_handler:
                signal.signal(number, functools.partial(self._handle, before))

    def _handle(self, before: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        self.begun = True
        self._told()
        before(number, frame)

    def waits(self, blocks: int) -> bool:
        """Return whether the engine, which has no requests, should continue to make steps. `blocks`: the number of
        blocks that wait to be sent."""
        if not self.begun:
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return blocks > 0 and time.monotonic() - self._idle_since < self._timeout_s
