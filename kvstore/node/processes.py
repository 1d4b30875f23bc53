"""What a process takes of its machine, from /proc. Reading it costs the process nothing. Any thread."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_MAX_FDS: Final = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class ProcessUse:
    """One process, now."""

    cpu_s: float  # processor time since its start, of all its threads
    open_fds: int
    max_fds: int  # the limit of `open_fds`; 0: none


def process_use(pid: int) -> ProcessUse | None:
    """-> what a process takes; None when it is gone, or is another user's."""
    folder = Path("/proc") / str(pid)
    try:
        # The second field is the program's name in parentheses, which may contain anything.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        open_fds = len(os.listdir(folder / "fd"))
        limit = _MAX_FDS.search((folder / "limits").read_text())
    except OSError:
        return None
    return ProcessUse((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, open_fds, int(limit[1]) if limit else 0)
