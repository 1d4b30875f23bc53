"""Whether NIXL works on this machine, found out by a process of its own: it is native code, and on some machines it
crashes. `python -m kvstore.wire.transports._nixl_trial` is that process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Final

import numpy as np

TRIAL_S: Final = 30.0  # for the process; it takes about a second


def trial() -> str:
    """Have a process of its own read memory with NIXL: if it crashes, this one does not. -> why NIXL cannot be used;
    empty: it can."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=TRIAL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a process that tried it did not end: {error}"
    if not done.returncode:
        return ""
    if done.returncode < 0:
        what = f"crashed ({signal.Signals(-done.returncode).name})"
    else:
        what = "failed: " + next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return f"a process that tried it {what}"


def _try_out() -> None:
    """Read some memory of one agent with another. Raises what goes wrong."""
    from kvstore.wire.transports.nixl import Nixl  # which imports this module

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    owner, reader = Nixl(), Nixl()
    blocks = np.arange(4 * 4096, dtype=np.uint64).view(np.uint8).reshape(-1, 4096)
    handle = owner.offer(blocks.reshape(-1).data, lambda: -1)
    memory = reader.remote(must_stay=False)
    memory.attach(1, blocks.nbytes, handle.data)
    numbers, offsets = np.ones(len(blocks), np.uint64), np.arange(len(blocks), dtype=np.uint64) * 4096
    found, out, ended = memory.blocks(numbers, offsets, 4096), np.zeros_like(blocks), threading.Event()

    def help_reader() -> None:
        while not ended.wait(0.001):
            owner.progress()

    helper = threading.Thread(target=help_reader)
    helper.start()
    try:
        found.read(out, np.arange(len(blocks), dtype=np.int64))
    finally:
        ended.set()
        helper.join()
    if not (out == blocks).all():
        raise RuntimeError("other bytes were read than were there")


if __name__ == "__main__":
    _try_out()
