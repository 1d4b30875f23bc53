"""A minimal container engine, which can start what docker/ describes.

A container has its own address, environment and volumes, a read-only root file system, and a user that is not root and
has no capabilities. Instead of an image it uses the Python of the tests: the commands `kvstore-server` and `kvstore`
run this checkout, and `python` is that Python. In the container's user namespace, the user is 10001. Outside of it,
that is the user that runs the tests, so that the container can read the checkout.

with Network() as network, Container(network, "kvstore-1", tmp_path) as container:
    process = container.start(["kvstore-server", ...], {"KVSTORE_SERVER_PORT": "7070"})
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.harness import ROOT, STOP_S, wait_until
from tests.support.network import Network, unavailable

USER_ID = 10001
SETUP_S = 10.0
_COMMANDS = {"kvstore-server": "-m kvstore", "kvstore": "-m kvstore_cli", "python": ""}
_AS_USER = [
    *("unshare", "--user", f"--map-user={USER_ID}", f"--map-group={USER_ID}"),
    *("setpriv", "--no-new-privs", "--inh-caps=-all", "--"),
]


def no_containers() -> str:
    """Return why containers cannot be made here, or an empty text if they can."""
    reason = unavailable()
    if reason:
        return reason
    try:
        done = subprocess.run([*_AS_USER, "id", "-u"], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return f"containers need unshare and setpriv of util-linux: {error}"
    return "" if done.stdout.strip() == str(USER_ID) else f"user namespaces are not allowed here: {done.stderr.strip()}"


class Container:
    """A container: one host of a network, and its own view of the file system. `with` or `close` removes it."""

    def __init__(self, network: Network, name: str, folder: Path, volumes: Sequence[str] = ()) -> None:
        """`volumes`: the writable paths, below /var/lib. `folder`: the folder outside of the container with the volumes
        and the log."""
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.address = network.add(name)
        self.log = self.folder / "log"
        self._hosts = self.folder / "hosts"
        self._hosts.write_text("")
        self._commands = self._write_commands()
        self._processes: list[subprocess.Popen[bytes]] = []
        steps = [
            "set -e",
            f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts",
            "mount -t tmpfs tmpfs /var/lib",
        ]
        for number, volume in enumerate(volumes):
            source = self.folder / f"volume-{number}"
            source.mkdir()
            steps.append(f"mkdir -p {volume} && mount --bind {shlex.quote(str(source))} {volume}")
        steps += [f"mount -o remount,bind,ro {path}" for path in ("/var/lib", "/")]
        steps += ["echo ready", "exec sleep infinity"]
        ready = self.folder / "ready"
        with ready.open("wb") as output, self.log.open("ab") as log:
            self._holder = subprocess.Popen(
                [*network.command(name), "unshare", "--mount", "sh", "-c", "\n".join(steps)], stdout=output, stderr=log
            )
        try:
            wait_until(lambda: ready.read_text() or self._holder.poll() is not None, SETUP_S, "the container is made")
            assert ready.read_text() == "ready\n", self.log_text()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the container's processes (SIGKILL) and remove it."""
        for process in [*self._processes, self._holder]:
            if process.poll() is None:
                process.kill()
            process.wait(STOP_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def knows(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Make these names resolve to these addresses, as the network's name server would do."""
        lines = [f"{address} {name}" for name, found in addresses.items() for address in found]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command; its output goes to the log. The returned process is the command itself: signals reach it."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._inside(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(environment),
            )
        self._processes.append(process)
        return process

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and wait for its end."""
        return subprocess.run(
            self._inside(command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self._environment(environment),
            check=False,
        )

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self._holder.pid}", "--mount", "--net", "--wd=/", *_AS_USER, *command]

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        path = os.pathsep.join([str(self._commands), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
        return {"PATH": path, "PYTHONPATH": str(ROOT), **(extra or {})}

    def _write_commands(self) -> Path:
        folder = self.folder / "bin"
        folder.mkdir()
        for command, arguments in _COMMANDS.items():
            file = folder / command
            file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
            file.chmod(0o755)
        return folder
