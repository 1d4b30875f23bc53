"""Reads docker/ as a container engine or Kubernetes would: the containers, their settings and their probes.

The tests have no container engine, so they parse the files and start the server themselves.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml
from typer.main import get_command

from kvstore.node import config
from kvstore.node.cli import server_app
from tests.support.harness import ROOT
from tests.support.settings import load

DOCKER = ROOT / "docker"
ENVIRONMENT_PREFIX = config.ENVIRONMENT_PREFIX


# ---- the image -------------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One instruction of the Dockerfile, with its continued lines joined."""

    name: str
    rest: str


def dockerfile() -> list[list[Instruction]]:
    """Return the Dockerfile's stages, each a list of instructions that begins with its FROM. Arguments have their
    defaults."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    stages: list[list[Instruction]] = []
    defaults: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines)):
        name, _, rest = line.partition(" ")
        if name == "ARG" and not stages:
            defaults.update([rest.strip().split("=")])
            continue
        if name == "FROM":
            stages.append([])
            rest = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], rest)
        stages[-1].append(Instruction(name, rest.strip()))
    return stages


def stage(name: str) -> list[Instruction]:
    (found,) = (stage for stage in dockerfile() if stage[0].rest.endswith(f" AS {name}"))
    return found


def image_environment() -> dict[str, str]:
    """Return the server's settings (KVSTORE_SERVER_*) that the server's image sets."""
    words = [word for name, rest in stage("server") if name == "ENV" for word in shlex.split(rest)]
    variables = dict(word.split("=", 1) for word in words)
    return {name: value for name, value in variables.items() if name.startswith(ENVIRONMENT_PREFIX)}


def image_healthcheck() -> list[str]:
    (check,) = (rest for name, rest in stage("server") if name == "HEALTHCHECK")
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


# ---- containers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One container that runs `kvstore-server`: its settings, its probes and its limits."""

    name: str
    flags: Sequence[str]
    environment: Mapping[str, str]  # KVSTORE_SERVER_*, including those of the image
    probes: Sequence[Sequence[str]]
    stop_s: float  # the time from SIGTERM to SIGKILL
    memory_limit_bytes: int
    ports: frozenset[int]  # the ports that others can reach
    volume: str  # the path that the container may write to

    def settings(self) -> config.ServerConfig:
        """Return the settings as the server itself would read them. Raises the error with which the server would
        exit."""
        context = get_command(server_app).make_context("kvstore-server", list(self.flags))
        settings = config.ServerConfig.__struct_fields__
        given = {name: value for name, value in context.params.items() if name in settings}
        return load(None, self.environment, given)

    def with_settings(self, **values: str) -> Node:
        """Return the same node with these settings changed. The files must already give each of them, by a flag or a
        variable."""
        flags, variables = list(self.flags), dict(self.environment)
        for name, value in values.items():
            flag, variable = f"--{name.replace('_', '-')}=", ENVIRONMENT_PREFIX + name.upper()
            at = [number for number, given in enumerate(flags) if given.startswith(flag)]
            if at:
                flags[at[-1]] = flag + value
            else:
                assert variable in variables, f"{self.name} is not given {name}"
                variables[variable] = value
        return replace(self, flags=flags, environment=variables)


def manifest(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def compose() -> Any:
    return manifest("compose.yaml")


def compose_nodes() -> list[Node]:
    """The services that run the server's image."""
    return [_compose_node(name, service) for name, service in compose()["services"].items() if _is_server(service)]


def _is_server(service: Any) -> bool:
    return str(service["image"]).startswith("kvstore:")


def _compose_node(name: str, service: Any) -> Node:
    environment = {**image_environment(), **service["environment"]}
    assert all(isinstance(value, str) for value in environment.values()), "numbers unquoted are not what they seem"
    (volume,) = service["volumes"]
    return Node(
        name,
        service["command"],
        environment,
        [image_healthcheck()],
        float(service["stop_grace_period"].removesuffix("s")),
        quantity_bytes(service["mem_limit"]),
        frozenset(port for _, port, _ in published(service)),
        volume.split(":")[1],
    )


def published(service: Any) -> Iterator[tuple[str, int, int]]:
    """Return (address, port outside, port inside) of each port that a service publishes."""
    for mapping in service.get("ports", []):
        address, outside, inside = mapping.rsplit(":", 2)
        for pair in zip(_port_range(outside), _port_range(inside), strict=True):
            yield (address, *pair)


def _port_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def kubernetes(file: str) -> dict[str, Any]:
    """The documents of a manifest by kind."""
    documents = list(yaml.safe_load_all((DOCKER / "kubernetes" / file).read_text(encoding="utf-8")))
    kinds = {document["kind"]: document for document in documents}
    assert len(kinds) == len(documents)
    return kinds


def stateful_set() -> Any:
    return kubernetes("kvstore.yaml")["StatefulSet"]


def pod(ordinal: int, address: str, zone: str = "") -> Node:
    """Return a pod of the StatefulSet. `$(NAME)` is replaced as by the kubelet, with the values of its downward API."""
    document = stateful_set()
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name = f"{document['metadata']['name']}-{ordinal}"
    fields = {
        "metadata.name": name,
        "status.podIP": address,
        "metadata.labels['topology.kubernetes.io/zone']": zone,
    }
    variables = {
        variable["name"]: fields[variable["valueFrom"]["fieldRef"]["fieldPath"]] for variable in container["env"]
    }
    flags = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], flag) for flag in container["args"]]
    (mount,) = container["volumeMounts"]
    return Node(
        name,
        flags,
        image_environment(),
        [_asking(container, container[probe]["httpGet"], address) for probe in PROBES],
        spec["terminationGracePeriodSeconds"],
        quantity_bytes(container["resources"]["limits"]["memory"]),
        frozenset(port["containerPort"] for port in container["ports"]),
        mount["mountPath"],
    )


def _asking(container: Any, get: Any, address: str) -> list[str]:
    """Return a command that makes the kubelet's HTTP request: status 0 for an answer of 200."""
    (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == get["port"])
    url = f"http://{address}:{port}{get['path']}"
    return ["python", "-I", "-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)", url]


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def quantity_bytes(text: str) -> int:
    """Return the bytes of a quantity such as compose's `2g` or Kubernetes' `34Gi`: both units are powers of two."""
    found = re.fullmatch(r"(\d+)([kmg]|[KMGT]i)", text)
    assert found, text
    return int(found[1]) << {"k": 10, "m": 20, "g": 30, "t": 40}[found[2][0].lower()]


# ---- monitoring ------------------------------------------------------------------------------------------------------


def dashboard() -> Any:
    return json.loads((DOCKER / "grafana" / "dashboards" / "kvstore.json").read_text(encoding="utf-8"))


def alerts() -> list[Any]:
    (group,) = manifest("prometheus/alerts.yml")["groups"]
    rules: list[Any] = group["rules"]
    return rules


def expressions() -> list[str]:
    """Return every query of the dashboard and of the alert rules."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    return [*queries, *(rule["expr"] for rule in alerts())]
