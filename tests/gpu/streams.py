"""A model that keeps its stream busy, on a device and on the CPU.

On the CPU the model's thread computes by itself, and what may be under way beside it are copies out of the cache, by a
thread of the layout: `busy` keeps that thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from kvstore_client.engine.paged.layout import BlockLayout

CYCLES_PER_S = 2_000_000_000  # at least as many as a device has


def model_stream(device: str) -> AbstractContextManager[object]:
    """The stream of the model, within the body."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def busy(layout: BlockLayout, seconds: float) -> None:
    """Whatever is to come after the work of the current stream has to wait for so long."""
    if layout._streams is not None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    else:
        layout._host_copies.start(lambda: time.sleep(seconds))


def copies_by_a_thread(patch: pytest.MonkeyPatch) -> None:
    """On the CPU, small copies out of the cache are made as large ones are."""
    patch.setattr("kvstore_client.engine.paged.layout.AT_ONCE_BYTES", 0)


def after_a_rehearsal(attempt: Callable[[int], bool]) -> None:
    """The second time, ``attempt(1)`` must be true. The first time, a device may load the code of its kernels, for
    which it waits until it is idle."""
    attempt(0)
    assert attempt(1), "the copy was not under way"
