"""What systemd is told by a unit of `Type=notify`: that the server is ready, what it does, and that it is alive.

The protocol (sd_notify) is a datagram of `KEY=VALUE` lines to the socket that `NOTIFY_SOCKET` names. Without the
variable, nothing is sent. The watchdog is honest: `alive` is called by each turn of the supervisor's loop and by
nothing else, so systemd ends a supervisor that hangs, which could restart no shard any more. It says nothing of the
shards: their supervisor restarts one that died, and `/readyz` tells of one that hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger("kvstore.server")

_SEND_S: Final = 1.0


class ServiceManager:
    """systemd, if it started this process. Used by the supervisor's main thread."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes the variables of the protocol out of `environment`, so that no child takes itself for the service."""
        address = environment.pop("NOTIFY_SOCKET", "")
        usec, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # @: an abstract name
        watched = bool(self._address) and usec.isdecimal() and pid in ("", str(os.getpid()))
        self._every_s = int(usec) / 2e6 if watched else 0.0  # 0: no watchdog
        self._next_ping = 0.0

    def tell(self, status: str, *lines: str) -> None:
        """Set the text that `systemctl status` shows; `lines`: READY=1, STOPPING=1."""
        self._send("\n".join([*lines, f"STATUS={status}"]))

    def alive(self) -> None:
        """The supervisor's loop turns: tell the watchdog, if it is time to."""
        now = time.monotonic()
        if self._every_s and now >= self._next_ping:
            self._next_ping = now + self._every_s
            self._send("WATCHDOG=1")

    def wait_s(self, at_most: float | None) -> float | None:
        """-> how long the loop may wait: `at_most`, and not beyond the next `alive`. None: for ever."""
        if not self._every_s:
            return at_most
        until_ping = max(0.0, self._next_ping - time.monotonic())
        return until_ping if at_most is None else min(at_most, until_ping)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_SEND_S)
                sock.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("systemd cannot be told %r: %s", text, error)
