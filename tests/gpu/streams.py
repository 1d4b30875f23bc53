"""Helpers that keep a model's stream busy, on a device or on the CPU.

On the CPU, the model computes in its own thread. Only copies out of the cache run at the same time, in a thread of the
layout; `busy` keeps that thread busy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from kvstore_client.engine.paged.layout import BlockLayout

CYCLES_PER_S = 2_000_000_000  # at least the clock rate of any device


def model_stream(device: str) -> AbstractContextManager[object]:
    """Make the model's stream the current one within the body."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def busy(layout: BlockLayout, seconds: float) -> None:
    """Delay all work that is queued from now on by this many seconds."""
    if layout._streams is not None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    else:
        layout._host_copies.start(lambda: time.sleep(seconds))


def copies_by_a_thread(patch: pytest.MonkeyPatch) -> None:
    """Make the CPU's thread copy small amounts out of the cache, too, and not only large ones."""
    patch.setattr("kvstore_client.engine.paged.layout.AT_ONCE_BYTES", 0)


def after_a_rehearsal(attempt: Callable[[int], bool]) -> None:
    """Run the attempt twice; the second time it must return True. At the first attempt, a device may load the code of
    kernels, which waits until the device is idle."""
    attempt(0)
    assert attempt(1), "the copy was not under way"
