"""A pod of docker/kubernetes or of the Helm chart, run by podman as the kubelet would run it.

with Network() as network, Pod(template, "kvstore-0", network, folder, claims={"blocks": disk}) as pod:
    pod.wait_started()

`podman kube play` of podman 4.3 does not run these pods. It knows no StatefulSet, no fsGroup, no seccompProfile, no
`$(NAME)` in arguments and no address of the pod in a variable. It would also probe with a curl that the image lacks. So
this module starts each container of a pod with the settings of the template; a field that it does not translate is an
error. It sends probes over HTTP, from outside, like the kubelet. Volumes are folders that root owns, like a new file
system; they get the pod's group as from the kubelet.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.deployment import quantity_bytes
from tests.support.harness import wait_until
from tests.support.podman import Container, Network

# The variables that the kubelet gives to every container, even with enableServiceLinks off.
SERVICE_VARIABLES: Final = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP_PROTO": "tcp",
    "KUBERNETES_PORT_443_TCP_PORT": "443",
    "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
}
# Fields of a pod and a container that this file translates, and fields that have no meaning for podman.
POD_FIELDS: Final = {"securityContext", "containers", "terminationGracePeriodSeconds", "enableServiceLinks"}
POD_FIELDS_OF_OTHERS: Final = {"topologySpreadConstraints", "automountServiceAccountToken"}
CONTAINER_FIELDS: Final = {"name", "image", "env", "args", "ports", "resources", "securityContext", "volumeMounts"}
CONTAINER_FIELDS_OF_OTHERS: Final = {"imagePullPolicy"}
PROBES: Final = {"startupProbe", "readinessProbe", "livenessProbe"}
GRACE_S: Final = 30  # the default of a pod


class Probe:
    """One probe of a container, sent to an address. The defaults are those of Kubernetes."""

    def __init__(self, said: Mapping[str, Any], address: str, ports: Sequence[Mapping[str, Any]]) -> None:
        assert set(said) <= {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}, said
        assert set(said["httpGet"]) == {"path", "port"}, said
        self.path: str = said["httpGet"]["path"]
        self.period_s: int = said.get("periodSeconds", 10)
        self.timeout_s: int = said.get("timeoutSeconds", 1)
        self.failures: int = said.get("failureThreshold", 3)
        (self.port,) = (port["containerPort"] for port in ports if port["name"] == said["httpGet"]["port"])
        self._address = address

    def ask(self) -> tuple[bool, float]:
        """Send one request. Returns whether the kubelet would count the answer as a success, and the seconds that it
        took."""
        began = time.monotonic()
        connection = http.client.HTTPConnection(self._address, self.port, timeout=self.timeout_s)
        headers = {"User-Agent": "kube-probe/1.34", "Accept": "*/*", "Connection": "close"}
        try:
            connection.request("GET", self.path, headers=headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        took_s = time.monotonic() - began
        return 200 <= status < 400 and took_s <= self.timeout_s, took_s

    def wait(self) -> int:
        """Send probes at their period until one succeeds. Returns the number of failed ones. Fails when the kubelet
        would give up."""
        for failed in range(self.failures):
            if self.ask()[0]:
                return failed
            time.sleep(self.period_s)
        raise AssertionError(f"{self.path}: no success in {self.failures} times {self.period_s} s")


class Pod:
    """A started pod with one container. `with` or `remove` removes it; the files of its volumes keep their owners.

    `args`: name of a flag -> another value, where this machine has less than the template asks for. `aliases`: names of
    the services that lead to the pod. `claims`: volume -> its folder.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        name: str,
        network: Network,
        *,
        claims: Mapping[str, Path],
        args: Mapping[str, str] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        spec = template["spec"]
        (said,) = spec["containers"]
        assert set(spec) <= POD_FIELDS | POD_FIELDS_OF_OTHERS, set(spec) - POD_FIELDS - POD_FIELDS_OF_OTHERS
        assert set(said) <= CONTAINER_FIELDS | CONTAINER_FIELDS_OF_OTHERS | PROBES, set(said)
        assert spec["enableServiceLinks"] is False  # otherwise the kubelet adds variables for all services
        self.name = name
        self.said = said
        self.context = spec["securityContext"]
        self._group: int = self.context["fsGroup"]
        self.grace_s: int = spec.get("terminationGracePeriodSeconds", GRACE_S)
        self.address = network.new_address()
        variables = SERVICE_VARIABLES | self._variables(template)
        for folder in claims.values():
            given = self.context.get("fsGroupChangePolicy") == "OnRootMismatch" and has_group(folder, self._group)
            if not given:
                give_group(folder, self._group)
        self.container = Container(
            *[expand(replaced(word, args or {}), variables) for word in said["args"]],
            image=f"localhost/{said['image']}",
            name=name,
            network=network,
            environment=variables,
            volumes=[f"{claims[mount['name']]}:{mount['mountPath']}" for mount in said["volumeMounts"]],
            memory=str(quantity_bytes(said["resources"]["limits"]["memory"])),
            hardened=False,
            options=[
                *(f"--ip={self.address}", f"--hostname={name}"),
                # A pod's network outlives its containers. With a new hardware address, neighbours would use the old one
                # for 40 s.
                f"--mac-address={hardware_address(self.address)}",
                *(f"--network-alias={alias}" for alias in aliases),
                *self._restrictions(),
            ],
        )
        self.probes = {kind: Probe(said[kind], self.address, said["ports"]) for kind in said if kind in PROBES}

    def _variables(self, template: Mapping[str, Any]) -> dict[str, str]:
        labels = template["metadata"]["labels"]
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        values = {}
        for each in self.said.get("env", []):
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
            values[each["name"]] = labels.get(label[1], "") if label else fields[path]
        return values

    def _restrictions(self) -> list[str]:
        pod, own = self.context, self.said["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"]
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}  # which is also podman's default
        assert set(pod) <= {
            *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile")
        }
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        return [
            f"--user={pod['runAsUser']}:{pod['runAsGroup']}",
            f"--group-add={self._group}",
            *("--read-only", "--read-only-tmpfs=false"),
            *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        ]

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        self.container.__exit__(kind, error, at)

    def wait_started(self) -> None:
        """Wait as the kubelet does: first for the startup probe, then for the readiness probe."""
        try:
            self.probes["startupProbe"].wait()
            wait_until(lambda: self.probes["readinessProbe"].ask()[0] or time.sleep(1.0), what=f"{self.name} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.container.logs()[-4000:]}") from error

    def terminate(self) -> tuple[int, float]:
        """End the pod as the kubelet does. Returns its exit status, which is 137 if the grace period was too short, and
        the seconds that it took."""
        began = time.monotonic()
        status = self.container.stop(self.grace_s)
        return status, time.monotonic() - began


def hardware_address(address: str) -> str:
    return ":".join(f"{part:02x}" for part in (2, 0, *ipaddress.ip_address(address).packed))


def replaced(word: str, args: Mapping[str, str]) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}={args[name]}" if equals and name in args else word


def expand(word: str, variables: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does: names without a value stay as they are, and `$$` becomes `$`."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", value, word)


def new_file_system(folder: Path) -> Path:
    """Make a folder like the root of a new ext4: root owns everything."""
    folder.mkdir(mode=0o755)
    (folder / "lost+found").mkdir(mode=0o700)
    for each in (folder, folder / "lost+found"):
        os.chown(each, 0, 0)
    return folder


def has_group(folder: Path, group: int) -> bool:
    """Whether a volume's root has the owner and mode that `give_group` sets. With OnRootMismatch, only the root is
    checked."""
    root = folder.stat()
    return root.st_gid == group and root.st_mode & 0o2770 == 0o2770


def give_group(folder: Path, group: int) -> None:
    """Do what the kubelet does for fsGroup (pkg/volume/volume_linux.go): the group owns all files, may read and write
    them, and also owns files that are made later."""
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, -1, group, follow_symlinks=False)
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | (0o2770 if path.is_dir() else 0o660))
