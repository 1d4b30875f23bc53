"""A network for the tests alone: hosts, which are network namespaces on one switch, and faults between them.

```
 n1 [10.77.0.1 eth0]──veth──[n1 ┐
 n2 [10.77.0.2 eth0]──veth──[n2 ├ bridge ]  a namespace of its own: nothing of the machine's network is touched
 c1 [10.77.0.3 eth0]──veth──[c1 ┘
```

No host notices a fault by itself. The packets of a host that is `cut` off, or of two hosts that are `separate`d, vanish
without a reset. The port of an `impair`ed host is taken off the bridge, and a relay process (frame_relay.py, among the
benchmarks) carries its packets over, late and with losses. TCP at both ends is the kernel's.

`close` removes everything, whatever failed before. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest

from benchmarks.remote_kv_cache import frame_relay

NONLOCAL_BIND: Final = Path("/proc/sys/net/ipv6/ip_nonlocal_bind")
CLONE_NEWNET: Final = 0x40000000
NOWHERE: Final = "02:00:00:00:00:01"  # a hardware address that no host has

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def run_ip(*arguments: str) -> str:
    """Run `ip ARGUMENTS`. Returns its output. Raises `OSError` with its error message."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def unavailable() -> str:
    """Return why no network can be made here, or an empty text if one can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "no ip command: install iproute2"
    if not frame_relay.TAP_DEVICE.exists():
        return f"no {frame_relay.TAP_DEVICE}: slow and lossy links need it"
    probe = f"kvtest-{os.getpid()}-probe"
    try:
        run_ip("netns", "add", probe)
        try:
            run_ip("-n", probe, "link", "add", "name", "switch", "type", "bridge")
            run_ip("-n", probe, "link", "add", "name", "eth0", "type", "veth", "peer", "name", "port")
            run_ip("netns", "exec", probe, "true")
        finally:
            run_ip("netns", "del", probe)
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
    return ""


def need(reason: str) -> None:
    """Skip the test for this reason; an empty reason does nothing. In continuous integration as root, where nothing may
    be missing, fail instead."""
    if reason and os.environ.get("CI") == "true" and os.geteuid() == 0:
        pytest.fail(f"CI=true, and {reason}")
    if reason:
        pytest.skip(reason)


class Network:
    """Hosts on a switch. Any thread may call the methods, but only one thread at a time."""

    def __init__(self) -> None:
        self.prefix = f"kvtest-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self.prefix}-switch"
        self._namespaces: list[str] = []
        self._addresses: dict[str, str] = {}
        self._relays: dict[str, frame_relay.Process] = {}

    def __enter__(self) -> Network:
        try:
            self._add_namespace(self._switch)
            self._at_switch("link", "add", "name", "bridge", "type", "bridge", "stp_state", "0")
            self._at_switch("link", "set", "dev", "bridge", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. The caller should end the processes in the namespaces first."""
        for relay in self._relays.values():
            frame_relay.end(relay)
        self._relays.clear()
        failures = []
        for name in reversed(self._namespaces):
            try:
                run_ip("netns", "del", name)
            except OSError as error:
                failures.append(str(error))
        self._namespaces.clear()
        assert not failures, failures

    # ---- hosts -----------------------------------------------------------------------------------------------

    def add(self, host: str) -> str:
        """Connect a new host. Returns its address."""
        number = len(self._addresses) + 1
        address = f"10.77.{number >> 8}.{number & 255}"
        namespace = self.namespace(host)
        self._add_namespace(namespace)
        peer = ("peer", "name", host, "netns", self._switch)
        run_ip("-n", namespace, "link", "add", "name", "eth0", "type", "veth", *peer)
        self._at_switch("link", "set", "dev", host, "master", "bridge", "up")
        run_ip("-n", namespace, "addr", "add", f"{address}/16", "dev", "eth0")
        run_ip("-n", namespace, "link", "set", "dev", "lo", "up")
        run_ip("-n", namespace, "link", "set", "dev", "eth0", "up")
        self._addresses[host] = address
        return address

    def own(self, host: str, network: str) -> None:
        """Give a host every address of an IPv6 network. Its processes can listen on and connect from any of them."""
        run_ip("-n", self.namespace(host), "route", "add", "local", network, "dev", "lo")
        with self.inside(host):
            NONLOCAL_BIND.write_text("1")  # a setting of this thread's namespace

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace for `ip netns`."""
        return f"{self.prefix}-{host}"

    def command(self, host: str) -> list[str]:
        """Return a prefix that runs a command on this host. The process keeps its id."""
        return ["ip", "netns", "exec", self.namespace(host)]

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Move this thread to the host while the body runs. The sockets, threads and processes that it starts meanwhile
        are there, too."""
        with open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") as here:
            with open(f"/run/netns/{self.namespace(host)}") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    # ---- faults ----------------------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Make packets from and to the host vanish until `heal`."""
        self._at_switch("link", "set", "dev", host, "nomaster")

    def separate(self, host: str, other: str) -> None:
        """Make packets between two hosts vanish until `reunite`. Each host gets a wrong hardware address for the other
        one."""
        for one, peer in ((host, other), (other, host)):
            run_ip("-n", self.namespace(one), "neigh", "replace", self.address(peer), "lladdr", NOWHERE, *_PERMANENT)

    def reunite(self, host: str, other: str) -> None:
        """End `separate`."""
        for one, peer in ((host, other), (other, host)):
            run_ip("-n", self.namespace(one), "neigh", "del", self.address(peer), "dev", "eth0")

    def impair(self, host: str, delay_s: float, loss: float, seed: int = 0) -> None:
        """Until `heal`, make round trips to the host `delay_s` longer, and lose this share of the packets in each
        direction. Connections stay up."""
        tap = f"{host}-tap"
        at_switch = ("ip", "netns", "exec", self._switch)
        self._relays[host] = frame_relay.start(at_switch, host, tap, delay_s / 2, loss, seed)
        self._set_offload(host, False)
        self._at_switch("link", "set", "dev", tap, "master", "bridge", "up")
        self._at_switch("link", "set", "dev", host, "nomaster")

    def heal(self, host: str) -> None:
        """End `cut` and `impair`."""
        relay = self._relays.pop(host, None)
        if relay is not None:
            frame_relay.end(relay)
            self._set_offload(host, True)
        self._at_switch("link", "set", "dev", host, "master", "bridge")

    # ---- internals -------------------------------------------------------------------------------------------

    def _add_namespace(self, name: str) -> None:
        run_ip("netns", "add", name)
        self._namespaces.append(name)

    def _set_offload(self, host: str, on: bool) -> None:
        """Set whether the host leaves checksums, and so segmentation, to its network card."""
        with self.inside(host):
            frame_relay.set_checksums("eth0", on)

    def _at_switch(self, *arguments: str) -> None:
        run_ip("-n", self._switch, *arguments)


_PERMANENT: Sequence[str] = ("dev", "eth0", "nud", "permanent")


def _enter(namespace_fd: int) -> None:
    if _libc.setns(namespace_fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
