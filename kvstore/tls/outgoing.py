"""A client's TLS connections. `join` makes a TLS connection over a TCP connection, and returns a socket that carries
the plain bytes.

Each process that calls `join` has one TLS process (`connecting`). The TLS process starts with the first call, and ends
when the calling process and its last connection have ended. A forked child starts its own TLS process. Thread-safe.
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

_READY: Final = b"\0"  # the first byte from `connecting`
_MOST_REASON_BYTES: Final = 4096
_PAIR_BYTES: Final = 512 << 10  # how many sent bytes of this process the kernel may hold
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN_RELAY: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from kvstore.tls.connecting import main; main()"


def dial(options: TLSOptions, address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a TLS connection to a host and port, made by `join`. Raises the errors of `join`, and `ValueError` for an
    invalid host."""
    deadline = time.monotonic() + timeout_s
    return join(socket.create_connection(address, timeout_s), address[0], options, deadline)


def join(
    sock: socket.socket,
    host: str,
    options: TLSOptions,
    deadline: float,
    trying: Callable[[socket.socket], None] = lambda _sock: None,
) -> socket.socket:
    """Return a socket that carries the plain bytes of a TLS connection over `sock`, which is connected to `host`.

    This call takes ownership of `sock`. When the call returns, the handshake has verified the server, and nothing else
    has been sent. `trying` is called with the new socket before this call waits for the handshake, so that another
    thread can shut the socket down. Raises `TLSError`, `TimeoutError` after `deadline`, or another `OSError`.
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
    """Send a request to this process's TLS process. Start that process if there is none, or if it has ended. Raises
    `OSError`."""
    global _control  # noqa: PLW0603 - one per process
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
            [sys.executable, "-I", "-S", "-c", _RUN_RELAY, _CODE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    threading.Thread(target=process.wait, name="kvstore-tls", daemon=True).start()  # so that no zombie is left
    return ours


def _end() -> None:
    """Let the TLS process end once its connections have ended."""
    global _control  # noqa: PLW0603
    if _control is not None:
        with contextlib.suppress(OSError):
            _control.close()
        _control = None


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _end()  # the connection is to the parent's TLS process


_lock = threading.Lock()
_control: socket.socket | None = None  # the connection to this process's TLS process

atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork_in_child)
