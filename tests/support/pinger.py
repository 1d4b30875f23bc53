"""Measures how long a server takes to answer another client's PINGs, in a process of its own.

`Pinger` starts that process and returns its measurements, so the test's own work does not count.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.support.harness import PING, PONG, RawClient, Server, environment, pack

PAUSE_S = 0.002


@dataclass(frozen=True)
class Latency:
    """The times from a PING to its PONG."""

    pings: int
    median_s: float
    longest_s: float


class Pinger:
    """Sends PINGs to a server while the `with` block runs. After that, `latency` has the result."""

    latency: Latency

    def __init__(self, server: Server) -> None:
        self._address = server.host, server.port

    def __enter__(self) -> Pinger:
        command = [sys.executable, "-m", "tests.support.pinger", self._address[0], str(self._address[1])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            out, _err = self._process.communicate("", timeout=60)
        finally:
            self._process.kill()
            self._process.wait()
        self.latency = Latency(**json.loads(out))


class _Address:
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port


def main() -> None:
    took: list[float] = []
    with RawClient(_Address(sys.argv[1], int(sys.argv[2]))) as raw:  # type: ignore[arg-type] # it needs no more of a server
        raw.sock.settimeout(60)
        raw.hello()
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            began = time.monotonic()
            assert raw.ask(pack(PING, len(took) + 1, 1000))[0] == PONG
            took.append(time.monotonic() - began)
    print(json.dumps({"pings": len(took), "median_s": statistics.median(took), "longest_s": max(took)}))


if __name__ == "__main__":
    main()
