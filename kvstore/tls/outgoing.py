"""A client's TLS connections: `join` makes one of a TCP connection, and returns a socket that carries its plain bytes.

Each process that calls it has one TLS process (`connecting`), which starts with the first call and outlives neither
this process nor its last connection. A child process after a fork starts its own. Thread-safe.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import kvstore
from kvstore.tls import TLSError, TLSOptions

_READY: Final = b"\0"  # of `connecting`
_MOST_REASON_BYTES: Final = 4096
_PAIR_BYTES: Final = 512 << 10  # that the kernel may hold of what this process sends
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from kvstore.tls.connecting import main; main()"


def dial(options: TLSOptions, address: tuple[str, int], timeout_s: float) -> socket.socket:
    """-> a TLS connection to host and port, as `join` makes it. Raises like it, and `ValueError` for a host that cannot
    be one."""
    deadline = time.monotonic() + timeout_s
    return join(socket.create_connection(address, timeout_s), address[0], options, deadline)


def join(
    sock: socket.socket,
    host: str,
    options: TLSOptions,
    deadline: float,
    trying: Callable[[socket.socket], None] = lambda _sock: None,
) -> socket.socket:
    """-> a socket that carries the plain bytes of a TLS connection over `sock`, which is connected to `host`, and which
    this call takes over. Nothing was sent but the handshake, which has verified the server.

    `trying` is told the socket before the call waits for the handshake: another thread may shut it down. Raises
    `TLSError`, `TimeoutError` after `deadline`, or another `OSError`.
    """
    near, far = socket.socketpair()
    try:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BYTES)
        trying(near)
        with sock, far:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            left_s = max(0.001, deadline - time.monotonic())
            name = options.server_name or host
            request = {"options": options._replace(server_name=name), "timeout_s": left_s}
            _request(json.dumps(request).encode(), [sock.fileno(), far.fileno()])
        near.settimeout(max(0.001, deadline - time.monotonic()))
        answer = near.recv(1)
        if answer == _READY:
            return near
        reason = b""
        while answer and len(reason) < _MOST_REASON_BYTES:
            answer = near.recv(_MOST_REASON_BYTES)
            reason += answer
        raise TLSError(reason.decode(errors="replace") or "the process for TLS connections has ended")
    except BaseException:
        near.close()
        raise


def _request(data: bytes, fds: list[int]) -> None:
    """Send a request to this process's TLS process. Starts it if there is none, or none any more. Raises `OSError`."""
    global _control  # noqa: PLW0603 - one a process
    with _lock:
        if _control is not None:
            try:
                socket.send_fds(_control, [data], fds)
            except OSError:  # it has ended
                _control.close()
                _control = None
            else:
                return
        control = _start()
        try:
            socket.send_fds(control, [data], fds)
        except BaseException:
            control.close()
            raise
        _control = control


def _start() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUN, _CODE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    threading.Thread(target=process.wait, name="kvstore-tls", daemon=True).start()  # so that no zombie is left
    return ours


def _end() -> None:
    """The process may end: it does so when its connections have."""
    global _control  # noqa: PLW0603
    if _control is not None:
        with contextlib.suppress(OSError):
            _control.close()
        _control = None


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _end()  # it is the parent's


_lock = threading.Lock()
_control: socket.socket | None = None  # to this process's TLS process

atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork_in_child)
