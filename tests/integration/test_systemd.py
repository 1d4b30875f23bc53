"""The messages of a server to systemd: a real server, and a socket in place of systemd's."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import Server, StartServer

WATCHDOG_S = 0.4
HEARD_S = 10.0


class Systemd:
    """systemd's side of the protocol."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._sock.settimeout(HEARD_S)

    def close(self) -> None:
        self._sock.close()

    def next(self) -> dict[str, str]:
        """Return the next message."""
        return dict(line.split("=", 1) for line in self._sock.recv(4096).decode().splitlines())

    def heard(self, field: str) -> dict[str, str]:
        """Return the next message that has this field."""
        while field not in (message := self.next()):
            pass
        return message

    def silent(self, seconds: float) -> bool:
        """Drop the messages received so far, and wait. Returns whether no other message came."""
        self._sock.settimeout(0)
        try:
            while True:
                self._sock.recv(4096)
        except BlockingIOError:
            pass
        self._sock.settimeout(seconds)
        try:
            self._sock.recv(4096)
        except TimeoutError:
            return True
        finally:
            self._sock.settimeout(HEARD_S)
        return False


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(tmp_path / "notify")
    yield found
    found.close()


@pytest.fixture
def server(systemd: Systemd, start_server: StartServer, tmp_path: Path) -> Server:
    watchdog = str(int(WATCHDOG_S * 1e6))
    return start_server("--shards", "2", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC=watchdog)


def test_systemd_is_notified_of_start_readiness_and_stop(systemd: Systemd, server: Server) -> None:
    assert systemd.next() == {"STATUS": "starting 2 shard(s)"}
    ready = systemd.heard("READY")
    assert ready == {"READY": "1", "STATUS": f"serving at 127.0.0.1:{server.port} with 2 shard(s) of 64MiB together"}
    for shard in server.shards():
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(shard.environ()), "a shard is not the service"
    assert server.stop() == 0
    assert systemd.heard("STOPPING") == {"STOPPING": "1", "STATUS": "stopping"}


def test_the_watchdog_is_notified_by_a_working_supervisor_only(systemd: Systemd, server: Server) -> None:
    systemd.heard("READY")
    for _ in range(3):
        assert systemd.heard("WATCHDOG") == {"WATCHDOG": "1"}
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        assert systemd.silent(2 * WATCHDOG_S)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert systemd.heard("WATCHDOG") == {"WATCHDOG": "1"}


def test_a_server_without_its_systemd_socket_serves_and_logs_that(start_server: StartServer) -> None:
    server = start_server(NOTIFY_SOCKET="/nosuch/notify")
    assert server.stop() == 0
    assert "cannot notify systemd of 'READY=1" in server.log_text()
