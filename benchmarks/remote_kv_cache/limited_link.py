"""Links of limited rate, optionally with a delay, to a server in a separate network namespace, with a token bucket each
way.

Delays come from a relay (frame_relay.py), which uses large packets to use little CPU time. Needs root.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.remote_kv_cache import frame_relay

_numbers: Final = itertools.count()
_BURST_S: Final = 0.004  # a burst has at most the traffic of this many seconds at full rate
_LEAST_BURST: Final = 64 << 10  # bytes; a burst must hold at least one packet
_QUEUE_MS: Final = 300
_MTU: Final = 60_000  # bytes, for links with a delay


def unavailable(delays: bool = False) -> str:
    """Return why no link, or no link with a delay, can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if delays and not frame_relay.TAP_DEVICE.exists():
        return f"{frame_relay.TAP_DEVICE} is missing; delays need it"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"no {' and no '.join(missing)}: install iproute2" if missing else ""


class LimitedLink:
    """A host that is reached over links of `bytes_per_s` each way, each at one of its `addresses`. `command`: the
    prefix that runs a program on that host. `round_trip_s`: the delay that the links add to a round trip.

    Used in a `with` statement, which removes the host; its programs must have ended before.
    """

    def __init__(self, bytes_per_s: float, links: int = 1, round_trip_s: float = 0.0) -> None:
        numbers = [next(_numbers) for _ in range(links)]
        self._namespace = f"kvbench-{os.getpid()}-{numbers[0]}"
        self._devices = [f"kvb{os.getpid() % 100_000}-{number}" for number in numbers]
        self._near = [f"10.78.{number % 256}.1" for number in numbers]
        self.addresses = [f"10.78.{number % 256}.2" for number in numbers]
        self.bytes_per_s = bytes_per_s
        self.round_trip_s = round_trip_s
        self._relays: list[frame_relay.Process] = []
        self.command = ["ip", "netns", "exec", self._namespace]

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    def __enter__(self) -> LimitedLink:
        inside = ("-n", self._namespace)
        _run("ip", "netns", "add", self._namespace)
        try:
            for number, (near, far) in enumerate(zip(self._near, self.addresses, strict=True)):
                device, end = self._devices[number], f"eth{number}"
                port = f"port{number}" if self.round_trip_s else end
                _run("ip", "link", "add", device, "type", "veth", "peer", "name", port, "netns", self._namespace)
                if self.round_trip_s:
                    self._delay(device, port, end)
                for where, name, address in (((), device, near), (inside, end, far)):
                    _run("ip", *where, "addr", "add", f"{address}/24", "dev", name)
                    _run("ip", *where, "link", "set", name, "up")
            _run("ip", *inside, "link", "set", "lo", "up")
            self.set_rate(self.bytes_per_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _delay(self, device: str, port: str, end: str) -> None:
        """Put a relay between a port of the link and the device on the host that has the link's address."""
        inside = ("-n", self._namespace)
        _run("ip", *inside, "link", "set", port, "arp", "off", "mtu", str(_MTU), "up")  # another device has the address
        _run("ip", "link", "set", device, "mtu", str(_MTU))
        frame_relay.set_checksums(device, False)
        self._relays.append(frame_relay.start(self.command, port, end, self.round_trip_s / 2, loss=0.0, seed=0))
        _run("ip", *inside, "link", "set", end, "mtu", str(_MTU))

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate of all links, each way."""
        burst = str(max(_LEAST_BURST, int(bytes_per_s * _BURST_S)))
        bucket = ("tbf", "rate", f"{int(bytes_per_s * 8)}bit", "burst", burst, "latency", f"{_QUEUE_MS}ms")
        for number, device in enumerate(self._devices):
            _run("tc", "qdisc", "replace", "dev", device, "root", *bucket)
            _run("tc", "-n", self._namespace, "qdisc", "replace", "dev", f"eth{number}", "root", *bucket)

    def crossed(self) -> tuple[int, int]:
        """Return the bytes that have crossed all links to the host and from the host, with headers."""
        counters = [Path("/sys/class/net", device, "statistics") for device in self._devices]
        sent, received = (sum(int((each / name).read_text()) for each in counters) for name in ("tx_bytes", "rx_bytes"))
        return sent, received

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            frame_relay.end(relay)
        _run("ip", "netns", "del", self._namespace)  # this removes the links, too


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
