"""docker/compose.yaml as it is, started by podman-compose with the images that `make check-image` has built.

with Compose(folder) as compose:
    compose.manual("up --build --detach --wait")
    compose.container("kvstore-1").run("id")

A second file, merged as by `docker compose -f compose.yaml -f FILE`, gives the nodes less memory and disk. It leaves
out Grafana, because the tests cannot download its image. It also lowers the limits of open files and processes to those
that this machine gives to containers.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.support import deployment
from tests.support.harness import ROOT, environment, wait_until
from tests.support.podman import COMMAND_S, Container

FILE: Final = "docker/compose.yaml"
COMMAND: Final = f"docker compose -f {FILE} "  # the beginning of the manual's commands
LEFT_OUT: Final = "grafana"
SMALLER: Final = {"KVSTORE_SERVER_MEMORY": "256MiB", "KVSTORE_SERVER_DISK_SIZE": "512MiB"}
LOOK_S: Final = 1.0  # the pause between two polls for slow events, because each poll takes processor time


def wait_for(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """Like `wait_until`, with a pause between two polls."""
    return wait_until(lambda: condition() or time.sleep(LOOK_S), deadline_s, what)


def allowed(limit: int, wanted: int) -> int:
    """Return the limit that a container can get, on a machine where even root may not raise limits."""
    _, most = resource.getrlimit(limit)
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)


def manual_commands() -> list[str]:
    """Return the commands of docs/deployment.md that use compose.yaml, without their common beginning and without
    comments."""
    lines = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(COMMAND).partition(" #")[0].strip() for line in lines if line.startswith(COMMAND)]


class Compose:
    """The services of the file. `with` or `close` removes everything that belongs to them, including volumes."""

    def __init__(self, folder: Path) -> None:
        self.file = deployment.compose()
        self.nodes = [node.name for node in deployment.compose_nodes()]
        self.services = [name for name in self.file["services"] if name != LEFT_OUT]
        self._changes = folder / "changes.json"  # JSON is YAML
        self._changes.write_text(json.dumps(self._changed()))

    def _changed(self) -> Any:
        services: dict[str, Any] = {LEFT_OUT: {"profiles": [LEFT_OUT]}}
        for name in self.nodes:
            files = self.file["services"][name]["ulimits"]["nofile"]
            # Podman gives a container with any limit of its own more processes than this machine may allow.
            limits = {"nofile": allowed(resource.RLIMIT_NOFILE, files), "nproc": allowed(resource.RLIMIT_NPROC, 65536)}
            services[name] = {"environment": SMALLER, "ulimits": limits}
        return {"services": services}

    def __enter__(self) -> Compose:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.run("down", "--volumes", "--timeout", "0", check=False)

    def run(self, *arguments: str, check: bool = True, timeout_s: float = COMMAND_S) -> str:
        """Run `docker compose -f docker/compose.yaml ARGUMENTS`, as podman-compose does. Returns the output."""
        command = [sys.executable, "-m", "podman_compose", "-f", FILE, "-f", str(self._changes), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            # Other formats than Docker's have no HEALTHCHECK. A build in chroot needs no network of its own.
            env=environment(BUILDAH_FORMAT="docker", BUILDAH_ISOLATION="chroot"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout[-6000:]}"
        return done.stdout

    def manual(self, beginning: str, **options: Any) -> str:
        """Run the only command of the manual that begins with this text."""
        (found,) = (command for command in manual_commands() if command.startswith(beginning))
        return self.run(*found.split(), **options)

    def container(self, service: str) -> Container:
        return Container.named(f"{self.file['name']}_{service}_1")

    # ---- the cluster ---------------------------------------------------------------------------------------------

    def status(self, of: str) -> Any:
        """Run the manual's `cluster status` command in a node's container, and return its output."""
        (command,) = (command for command in manual_commands() if command.startswith("exec "))
        _, _, *words = command.split()
        return json.loads(self.container(of).run(*words, "--json", check=False).stdout or "{}")

    def states(self, of: str) -> dict[str, str]:
        """Return node -> its state, as this node sees the cluster; empty while it does not answer."""
        return {node["node"]: node["state"] for node in self.status(of).get("nodes", [])}

    def wait_for_members(self, *nodes: str, of: str, serving: bool = False, deadline_s: float = COMMAND_S) -> None:
        """Wait until exactly these nodes are members and, if requested, have received their share of the blocks."""

        states: dict[str, str] = {}

        def are() -> bool:
            states.clear()
            states.update(self.states(of))
            return set(states) == set(nodes) and (not serving or set(states.values()) == {"serving"})

        try:
            wait_for(are, deadline_s, f"{', '.join(nodes)} are the members")
        except AssertionError as error:
            logs = "\n".join(f"log of {node}:\n{self.container(node).logs()[-3000:]}" for node in self.nodes)
            raise AssertionError(f"{error}; {of} sees {states}\n{logs}") from error


class Prometheus:
    """Prometheus' HTTP API, at the port that the file publishes."""

    def __init__(self, address: str = "127.0.0.1:9090") -> None:
        self._url = f"http://{address}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success" and not found.get("warnings"), found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.ask("query", query=expression)["result"]
        return result

    def targets(self) -> dict[str, str]:
        """Return target -> up, down or unknown."""
        return {each["labels"]["instance"]: each["health"] for each in self.ask("targets")["activeTargets"]}

    def rules(self) -> dict[str, Any]:
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}

    def alerts(self) -> dict[str, set[str]]:
        """Return `NAME INSTANCE` of each alert that is pending or firing -> its states."""
        found: dict[str, set[str]] = {}
        for alert in self.ask("alerts")["alerts"]:
            found.setdefault(f"{alert['labels']['alertname']} {alert['labels'].get('instance', '')}", set()).add(
                alert["state"]
            )
        return found
