"""A link with delay and losses: carries Ethernet frames between one end of a veth pair and a TAP device.

It is for kernels without netem, which have no other means. The relay is a separate process in the namespace of that end
of the pair, and stops when its standard input ends. It makes the TAP device, which replaces that end: on a bridge, or
as the device that has the address. Each frame waits for `--delay` seconds, in order; `--seed` decides which frames are
lost. Every frame must be a whole packet with its checksum, and within the link's MTU, so that losing it has the same
effect as on a wire. So the TAP device offers the kernel no offloads, and those of the veth pair's other end must be off
(`set_checksums`).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

TAP_DEVICE: Final = Path("/dev/net/tun")
ETH_P_ALL: Final = 3
SOL_PACKET: Final = 263
PACKET_IGNORE_OUTGOING: Final = 23
SO_RCVBUFFORCE: Final = 33
TUNSETIFF: Final = 0x400454CA
IFF_TAP, IFF_NO_PI = 2, 0x1000
FRAME_BYTES: Final = 1 << 16
BATCH: Final = 64  # the most frames read from one side before the other side is read
BUFFER_BYTES: Final = 32 << 20
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
READY_S: Final = 10.0

Process: TypeAlias = "subprocess.Popen[str]"


def open_tap(name: str) -> int:
    fd = os.open(TAP_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def set_checksums(device: str, on: bool) -> None:
    """Turn the checksum offload of a device in this thread's namespace on or off, and with it the segmentation
    offload."""
    command = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, on))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sQ16x", device.encode(), ctypes.addressof(command)))


def start(command: Sequence[str], port: str, tap: str, delay_s: float, loss: float, seed: int) -> Process:
    """Start a relay; `command` is the prefix of its command line. Return its process once it is ready. Raises `OSError`
    if it did not start."""
    options = ["--port", port, "--tap", tap, "--delay", str(delay_s), "--loss", str(loss), "--seed", str(seed)]
    relay = subprocess.Popen(
        [*command, sys.executable, __file__, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert relay.stdout is not None
    timer = threading.Timer(READY_S, relay.kill)
    timer.start()
    said = relay.stdout.readline()
    timer.cancel()
    if said != "ready\n":
        end(relay)
        raise OSError(f"the relay of {port} printed {said!r}; expected 'ready'")
    return relay


def end(relay: Process) -> None:
    """End a relay process. This removes its TAP device."""
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.close()
    try:
        relay.wait(READY_S)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()
    relay.stdout.close()


class Direction:
    """The frames on their way from one side to the other."""

    def __init__(self, source: int, sink: int, delay_s: float, loss: float, rng: random.Random) -> None:
        self.source, self._sink = source, sink
        self._delay_s, self._loss, self._random = delay_s, loss, rng.random
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read at most `BATCH` frames that have arrived, and drop some of them."""
        due = time.monotonic() + self._delay_s
        for _ in range(BATCH):
            try:
                frame = os.read(self.source, FRAME_BYTES)
            except BlockingIOError:
                return
            if self._random() >= self._loss:
                self._waiting.append((due, frame))

    def pass_on(self) -> float:
        """Write the frames that are due. Return the time at which the next one is due; infinity if there is none."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, frame = self._waiting.popleft()
            try:
                os.write(self._sink, frame)
            except OSError:  # the device is full or the link is down: the frame is lost
                continue
        return self._waiting[0][0] if self._waiting else float("inf")


def carry(directions: list[Direction]) -> None:
    """Carry frames in all directions until standard input ends."""
    poll = select.epoll()
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    by_source = {direction.source: direction for direction in directions}
    for source in by_source:
        poll.register(source, select.EPOLLIN)
    while True:
        due = min(direction.pass_on() for direction in directions)
        timeout = -1 if due == float("inf") else max(0.0, due - time.monotonic())
        for fd, _ in poll.poll(timeout):
            if fd == sys.stdin.fileno():
                return
            by_source[fd].take()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--port", "--tap"):
        parser.add_argument(name, required=True)
    for name in ("--delay", "--loss"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with open_port(given.port) as port:
        tap = open_tap(given.tap)
        print("ready", flush=True)
        carry(
            [
                Direction(port.fileno(), tap, given.delay, given.loss, rng),
                Direction(tap, port.fileno(), given.delay, given.loss, rng),
            ]
        )


if __name__ == "__main__":
    main()
