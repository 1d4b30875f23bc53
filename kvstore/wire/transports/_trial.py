"""Tries a library in a separate process, so that a crash of its native code does not end this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

TRIAL_S: Final = 30.0  # how long the separate process may take; it needs about a second


def trial(module: str) -> str:
    """Run a module, as ``python -m`` does. Return why it failed, or an empty string."""
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
