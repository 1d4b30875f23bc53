"""Files that operators change, looked at on a thread of their own: a file may be large, or on a file system that hangs,
and nothing else may wait for that."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class FileWatch:
    """Calls `look(asked)` every `LOOK_S`, and when it is asked to. `what` names the file, for the log."""

    def __init__(self, what: str, look: Callable[[bool], None]) -> None:
        self._what = what
        self._look = look
        self._asked = -1  # readable: it is asked to
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, unless it has begun. One thread at a time; not before a fork."""
        if self._thread is None:
            self._asked = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="kvstore-files", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Have it look now. Safe to call in a signal handler."""
        if self._thread is not None:
            os.eventfd_write(self._asked, 1)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._asked, select.POLLIN)
        while True:
            asked = bool(poll.poll(LOOK_S * 1000))
            if asked:
                os.eventfd_read(self._asked)
            try:
                self._look(asked)
            except Exception:  # it must not end the looking
                log.exception("%s could not be read", self._what)
