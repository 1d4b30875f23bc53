"""How an engine ends, so that the blocks it has computed reach the store first.

vLLM has SIGTERM and SIGINT sent to the process of the engine's core, and then kills it: `vllm serve` after
``--shutdown-timeout`` seconds, which are 0 by default; the class `LLM` after 5 s. Three things are done about that:

* `allow_time` has `vllm serve` wait where it would not. Requests are aborted at once all the same, because the core
  keeps the 0 that it was started with.
* `Ending` hears of the signal when the core does. The engine leaves the directory at once, not when its last block is
  sent. And the core goes on to step while blocks wait: until it has done so a second signal changes nothing, while in
  its teardown it would kill the process. (Ctrl-C and systemd send signals to all processes, and vLLM sends another.)
* `check_time` warns where neither helps.
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

# What an engine takes to end beside sending: to finish a step, to free its memory.
TEARDOWN_S = 5


def needed_s(timeout_s: float) -> int:
    """How long an engine may take to end: it sends for `timeout_s`, and its last call may take as long again."""
    return math.ceil(2 * timeout_s) + TEARDOWN_S


def allow_time(config: VllmConfig, timeout_s: float) -> None:
    """Have the front end wait for its engine at the end. Called in the front end, after it has started the engine.

    Where the engine has several API servers, or this connector is one of several, `config` is not what vLLM will look
    at, so nothing changes; see `check_time`.
    """
    if config.shutdown_timeout == 0:
        config.shutdown_timeout = needed_s(timeout_s)


def check_time(config: VllmConfig, transfer: KVTransferConfig, engine: VllmConfig | None, timeout_s: float) -> None:
    """Warn if `vllm serve` would kill this engine before its blocks are sent. transfer: this connector's own
    configuration. engine: the configuration of all, where it is known."""
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
    """Whether the engine was told to end, and whether it should go on to step for what is still to be sent.

    Thread: the engine core's main thread, where signals are handled.
    """

    def __init__(self, timeout_s: float, told: Callable[[], None]) -> None:
        """timeout_s: how long to go on. told: called in a signal handler, when the engine is told to end."""
        self.begun = False
        self._timeout_s = timeout_s
        self._told = told
        self._idle_since: float | None = None

    def watch_signals(self) -> None:
        """Hear of SIGTERM and SIGINT before vLLM's own handlers do. Does nothing in a process that is not vLLM's, whose
        signals are not ours: where `LLM` runs the engine in the program itself."""
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
        """Whether the engine, which has no requests, should go on to step: so many blocks wait to be sent."""
        if not self.begun:
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return blocks > 0 and time.monotonic() - self._idle_since < self._timeout_s
