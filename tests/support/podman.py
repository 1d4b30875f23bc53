"""Containers of the images that `make check-image` has built, run by podman with runc.

with Network() as network, Container("--memory", "64MiB", network=network) as server:
    server.wait_ready()
    assert server.stop(10) == 0

Containers have the restrictions of docker/: a read-only root file system, no capabilities, and no way to gain one.
Networks are bridges in the network namespace of the tests, so the tests themselves can reach a container at its
`address`. Containers of one network find each other by name. Images, containers and settings are separate from the
machine's own (scripts/image_storage.sh).

No systemd runs the health checks here. `healthy` runs the image's check, and podman stores the result. Podman's own
warnings about the missing systemd are hidden.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvstore import __version__
from tests.support.harness import wait_until

SERVER: Final = f"localhost/kvstore:{__version__}"
ETCD: Final = "localhost/kvstore-etcd:3.5"
STAND_IN: Final = "io.kvstore.stand-in"  # the label of images that were built from stand-ins
COMMAND_S: Final = 120.0
READY: Final = re.compile(r"^kvstore-server ready tcp://\S+:(\d+) shards=(\d+) memory=\d+$", re.MULTILINE)

_numbers = itertools.count()


def podman(*arguments: str, check: bool = True, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    """Run `podman ARGUMENTS`. A status other than 0 fails the test, unless `check` is off."""
    done = subprocess.run(
        ["podman", "--log-level=fatal", *arguments],
        cwd="/run",  # a folder of this run alone: after an OOM kill, the container's monitor leaves a file here
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, f"podman {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done


def unavailable() -> str:
    """Return why no container of these images can be made here, or an empty text if one can."""
    if "CONTAINERS_STORAGE_CONF" not in os.environ:
        return "the images are in a storage of their own: run `make check-image`"
    missing = [name for name in (SERVER, ETCD) if podman("image", "exists", name, check=False).returncode]
    return f"not built: {', '.join(missing)}: run `make check-image`" if missing else ""


def inspect_image(name: str) -> Any:
    [found] = json.loads(podman("image", "inspect", name).stdout)
    return found


def run_once(image: str, *command: str, user: str = "", check: bool = True) -> str:
    """Run a command in a new container, instead of the image's entrypoint. Returns its output."""
    options = ["--rm", "--network=none", "--no-healthcheck", *([f"--user={user}"] if user else [])]
    return podman("run", *options, f"--entrypoint={command[0]}", image, *command[1:], check=check).stdout


class Network:
    """A bridge. Its containers find each other by name. `with` or `close` removes it."""

    def __init__(self) -> None:
        self.name = f"kvstore-test-{next(_numbers)}"
        podman("network", "create", self.name)
        self._hosts = itertools.count(100)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        podman("network", "rm", "--force", self.name)

    def new_address(self) -> str:
        """Return an address for a container that must know its own (`--ip`). Podman itself assigns addresses from
        number 2 on."""
        (found,) = json.loads(podman("network", "inspect", self.name).stdout)
        return str(ipaddress.ip_network(found["subnets"][0]["subnet"])[next(self._hosts)])


class Volume:
    """A named volume, by its `name`. `with` or `close` removes it."""

    def __init__(self) -> None:
        self.name = f"kvstore-test-{next(_numbers)}"
        podman("volume", "create", self.name)

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """The folder of the volume's files on this machine."""
        [found] = json.loads(podman("volume", "inspect", self.name).stdout)
        return Path(found["Mountpoint"])

    def close(self) -> None:
        podman("volume", "rm", "--force", self.name)


class Container:
    """A container, which runs as soon as it is made. `with` or `remove` removes it and its anonymous volumes."""

    def __init__(
        self,
        *command: str,
        image: str = SERVER,
        name: str = "",
        network: Network | None = None,
        environment: Mapping[str, str] | None = None,
        volumes: Sequence[str] = (),
        memory: str = "",
        user: str = "",
        entrypoint: str = "",
        hardened: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        """`command`: the arguments for the image's entrypoint, or for `entrypoint`. `volumes`: SOURCE:TARGET[:ro].
        `hardened`: with the restrictions of docker/. `options`: more options of `podman run`."""
        self.name = name or f"kvstore-test-{next(_numbers)}"
        given = [
            f"--name={self.name}",
            f"--network={network.name if network else 'none'}",
            "--health-interval=disable",
            *(f"--env={key}={value}" for key, value in (environment or {}).items()),
            *(f"--volume={each}" for each in volumes),
            *([f"--memory={memory}"] if memory else []),
            *([f"--user={user}"] if user else []),
            *([f"--entrypoint={entrypoint}"] if entrypoint else []),
            # Podman's read-only containers have a writable /tmp by default; those of other engines do not.
            *(["--read-only", "--read-only-tmpfs=false"] if hardened else []),
            *(["--cap-drop=ALL", "--security-opt=no-new-privileges"] if hardened else []),
            *options,
        ]
        try:
            podman("run", "--detach", *given, image, *command)
        except BaseException:
            self.remove()
            raise

    @classmethod
    def named(cls, name: str) -> Container:
        """Return a container that another program has made, or will make."""
        container = cls.__new__(cls)
        container.name = name
        return container

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            print(f"log of {self.name}:\n{self.logs()[-4000:]}")
        self.remove()

    # ---- what it says of itself ----------------------------------------------------------------------------------

    def inspect(self) -> Any:
        [found] = json.loads(podman("container", "inspect", self.name).stdout)
        return found

    def logs(self) -> str:
        """Return the container's standard output and standard error so far."""
        done = podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    @property
    def running(self) -> bool:
        return bool(self.inspect()["State"]["Running"])

    @property
    def address(self) -> str:
        """The container's address in its network."""
        (network,) = self.inspect()["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    @property
    def pid(self) -> int:
        """Return the id of the container's first process, as the tests see it."""
        return int(self.inspect()["State"]["Pid"])

    def wait_ready(self) -> int:
        """Wait for the server's ready line. Returns its first port."""

        def ready() -> int:
            found = READY.search(self.logs())
            assert found or self.running, f"{self.name} has ended:\n{self.logs()}"
            return int(found[1]) if found else 0

        return int(wait_until(ready, what=f"{self.name} is ready"))

    def healthy(self) -> bool:
        """Whether the health check succeeds now."""
        return podman("healthcheck", "run", self.name, check=False).returncode == 0

    def health(self) -> str:
        """Return podman's state from the checks so far: starting, healthy or unhealthy."""
        return str(self.inspect()["State"]["Health"]["Status"])

    # ---- what is done to it --------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return podman("exec", self.name, *command, check=check, timeout_s=timeout_s)

    def signal(self, name: str) -> None:
        podman("kill", f"--signal={name}", self.name)

    def stop(self, grace_s: int) -> int:
        """Stop the container as an engine does: with the image's stop signal, and with SIGKILL after the grace period.
        Returns the exit status."""
        podman("stop", f"--time={grace_s}", self.name, timeout_s=grace_s + COMMAND_S)
        return self.wait()

    def wait(self) -> int:
        """Wait until the container has ended. Returns its exit status: 128 plus the signal's number, if a signal ended
        it."""
        return int(podman("wait", self.name).stdout)

    def start(self) -> None:
        """Start the container again, with the same settings and volumes."""
        podman("start", self.name)

    def remove(self) -> None:
        podman("rm", "--force", "--volumes", "--time=0", self.name, check=False)
