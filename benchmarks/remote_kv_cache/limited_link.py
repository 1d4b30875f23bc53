"""A link of limited rate to a server: a network namespace of its own, behind a token bucket each way. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Final

_numbers: Final = itertools.count()
_BURST_S: Final = 0.004  # of traffic at full rate that passes at once
_LEAST_BURST: Final = 32 << 10  # bytes
_QUEUE_MS: Final = 300


def unavailable() -> str:
    """Why no link can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"no {' and no '.join(missing)}: install iproute2" if missing else ""


class LimitedLink:
    """A host that is reached over a link of `bytes_per_s` each way. `command`: what runs a program on that host.

    Used in a `with` statement, which removes it; programs there should have ended by then.
    """

    def __init__(self, bytes_per_s: float) -> None:
        number = next(_numbers)
        self._namespace = f"kvbench-{os.getpid()}-{number}"
        self._device = f"kvb{os.getpid() % 100_000}-{number}"
        network = f"10.78.{number % 256}"
        self._near, self.address = f"{network}.1", f"{network}.2"
        self.bytes_per_s = bytes_per_s
        self.command = ["ip", "netns", "exec", self._namespace]

    def __enter__(self) -> LimitedLink:
        inside = ("-n", self._namespace)
        _run("ip", "netns", "add", self._namespace)
        try:
            _run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
            for where, device, address in (((), self._device, self._near), (inside, "eth0", self.address)):
                _run("ip", *where, "addr", "add", f"{address}/24", "dev", device)
                _run("ip", *where, "link", "set", device, "up")
            _run("ip", *inside, "link", "set", "lo", "up")
            self.set_rate(self.bytes_per_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate, each way."""
        burst = str(max(_LEAST_BURST, int(bytes_per_s * _BURST_S)))
        bucket = ("tbf", "rate", f"{int(bytes_per_s * 8)}bit", "burst", burst, "latency", f"{_QUEUE_MS}ms")
        _run("tc", "qdisc", "replace", "dev", self._device, "root", *bucket)
        _run("tc", "-n", self._namespace, "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("ip", "netns", "del", self._namespace)  # and the link with it


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
