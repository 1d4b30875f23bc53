"""Checks, on a separate thread, whether an operator has changed a file. The thread is separate because the file may be
large, or its file system may hang, and nothing else may wait for that."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

FILE_POLL_S: Final = 1.0


class FileWatch:
    """Calls `look(False)` every `FILE_POLL_S` seconds, and `look(True)` at once after `ask`.
    `what`: the file's name in the log."""

    def __init__(self, what: str, look: Callable[[bool], None]) -> None:
        self._what = what
        self._look = look
        self._asked = -1  # a descriptor that is readable after `ask`
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the checks, unless they have started. Only one thread at a time may call this. The process must not
        fork afterwards."""
        if self._thread is None:
            self._asked = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="kvstore-files", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Check the file now. Safe to call in a signal handler."""
        if self._thread is not None:
            os.eventfd_write(self._asked, 1)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._asked, select.POLLIN)
        while True:
            asked = bool(poll.poll(FILE_POLL_S * 1000))
            if asked:
                os.eventfd_read(self._asked)
            try:
                self._look(asked)
            except Exception:  # an error must not end the checks
                log.exception("%s could not be read", self._what)
