"""A library tried by a process of its own: where its native code crashes, this process does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

TRIAL_S: Final = 30.0  # for the process; it takes about a second


def trial(module: str) -> str:
    """Run a module, as ``python -m`` does. -> why it did not end well; empty: it did."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module]
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
