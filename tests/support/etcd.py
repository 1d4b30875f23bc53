"""A real etcd for the tests of clusters: a process of its own on free ports, with its data in a folder.

with Etcd(tmp_path / "etcd") as etcd:
    start_server("--cluster", etcd.url("name"))
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.certificates import Issued
from tests.support.harness import STOP_S, wait_until
from tests.support.ports import free_ports

START_S = 20.0
_MEMORY = Path("/dev/shm")


class Etcd:
    """One etcd server. `prefix`: a command that runs it elsewhere, e.g. ``ip netns exec NS``; `host`: the address that
    it listens on there. `certificate`, `ca`: use TLS, and require clients to have certificates of this CA."""

    def __init__(
        self,
        folder: Path,
        *,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        certificate: Issued | None = None,
        ca: str = "",
    ) -> None:
        if shutil.which("etcd") is None:
            if os.environ.get("CI") == "true":
                raise AssertionError("no etcd: scripts/programs.sh should have installed it")
            pytest.skip("etcd is not installed: scripts/programs.sh installs it")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # The data are in memory, because a write to a busy disk takes seconds.
        made = tempfile.mkdtemp(prefix="kvstore-etcd-", dir=_MEMORY if _MEMORY.is_dir() else None)
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        self._data_folder = Path(made) / "data"
        self.host = host
        self.port, self._peer_port = free_ports(2)
        self._prefix = list(prefix)
        self._certificate = certificate
        self._ca = ca
        self.start()

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, name: str) -> str:
        """Return the URL of the cluster `name` in this etcd."""
        return f"etcd{'s' if self._certificate else ''}://{self.host}:{self.port}/{name}"

    @property
    def _scheme(self) -> str:
        return "https" if self._certificate else "http"

    def control(self, *arguments: str, user: str = "", says: str = "") -> str:
        """Run `etcdctl` as `user` (NAME:PASSWORD), with `says` as its input. Returns its output."""
        command = ["etcdctl", f"--endpoints={self._scheme}://{self.host}:{self.port}"]
        if self._certificate:
            command += [f"--cacert={self._ca}", f"--cert={self._certificate.cert}", f"--key={self._certificate.key}"]
        if user:
            command.append(f"--user={user}")
        variables = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(
            [*command, *arguments], env=variables, input=says, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def start(self) -> None:
        client, peer = f"{self._scheme}://{self.host}:{self.port}", f"http://{self.host}:{self._peer_port}"
        command = [
            *self._prefix,
            *("etcd", "--name", "etcd", "--data-dir", str(self._data_folder), "--log-level", "warn"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"etcd={peer}"),
            "--unsafe-no-fsync",  # a killed etcd loses nothing by it, and a busy disk does not make etcd slow
        ]
        if self._certificate:
            command += [f"--cert-file={self._certificate.cert}", f"--key-file={self._certificate.key}"]
            command += ["--client-cert-auth", f"--trusted-ca-file={self._ca}", "--bcrypt-cost=4"]
        with (self.folder / "etcd.log").open("ab") as log:
            # The process gets a session of its own, so that a signal also reaches a prefix such as `ip netns exec`.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._healthy, START_S, "etcd answers")

    def _healthy(self) -> bool:
        assert self.running, (self.folder / "etcd.log").read_text()[-2000:]
        health = f"{self._scheme}://{self.host}:{self.port}/health"
        if self._prefix:
            ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=1).read())"
            command = [*self._prefix, sys.executable, "-c", ask, health]
            return '"true"' in subprocess.run(command, capture_output=True, text=True, check=False).stdout
        try:
            context = None
            if self._certificate:
                context = ssl.create_default_context(cafile=self._ca)
                context.load_cert_chain(*self._certificate)
            with urllib.request.urlopen(health, timeout=1, context=context) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Send SIGTERM and wait."""
        if self.running:
            self.signal(signal.SIGTERM)
        self.process.wait(STOP_S)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self.running:
            self.signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def restart(self, *, empty: bool = False) -> None:
        """Start etcd again on the same ports, with the same data or, if `empty`, without data."""
        assert not self.running
        if empty:
            shutil.rmtree(self._data_folder)
        self.start()
