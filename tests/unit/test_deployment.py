"""The files of docker/, compared with what the server accepts and promises. Nothing is started here."""

from __future__ import annotations

import configparser
import fnmatch
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import __version__
from kvstore.exits import BAD_USAGE
from kvstore.node import supervisor as server
from kvstore.node.config import CONFIG_VARIABLE
from kvstore.node.health import VERDICT_S
from kvstore.node.settings import tomllib
from tests.support.deployment import (
    DOCKER,
    PROBES,
    Node,
    alerts,
    compose,
    compose_nodes,
    dashboard,
    dockerfile,
    kubernetes,
    manifest,
    pod,
    published,
    quantity_bytes,
    stage,
    stateful_set,
)
from tests.support.harness import OVERHEAD_BYTES, ROOT

USER_ID = 10001
UNIT = ROOT / "packaging" / "kvstore-server.service"


def nodes() -> list[Node]:
    return [*compose_nodes(), pod(0, "10.0.0.1", "a")]


def http_port(node: Node) -> int:
    """Return the port at which a node serves HTTP to every host."""
    address = node.settings().http
    assert address is not None and address.host in ("0.0.0.0", "::")
    return address.port


by_name = pytest.mark.parametrize("node", nodes(), ids=lambda node: node.name)


# ---- the image -------------------------------------------------------------------------------------------------------


def dockerignored(path: str) -> bool:
    """Whether .dockerignore keeps a path from the build. The last pattern that matches the path or a folder above it
    decides."""
    ignored = False
    above = [str(parent) for parent in Path(path).parents][:-1]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [path, *above] if "**/" not in line else [Path(name).name for name in (path, *above)]
        if any(fnmatch.fnmatchcase(name, pattern) and (pattern != "*" or "/" not in name) for name in names):
            ignored = not line.startswith("!")
    return ignored


def copied() -> list[str]:
    """Return the paths that the Dockerfile copies from the repository."""
    copies = [rest.split() for stage in dockerfile() for name, rest in stage if name == "COPY" and "--from" not in rest]
    return [source for words in copies for source in words[:-1]]


def test_the_image_is_built_only_from_pinned_official_images() -> None:
    stages = dockerfile()
    names = [stage[0].rest.split(" AS ")[1] for stage in stages]
    for first, *rest in stages:
        image = first.rest.split(" AS ")[0]
        assert re.fullmatch(r"(python|debian):[\w.-]+", image), image
        assert not image.endswith("latest")
        assert not [name for name, _ in rest if name == "ADD"]
        sources = re.findall(r"--from=(\S+)", " ".join(text for name, text in rest if name == "COPY"))
        assert set(sources) <= set(names)
    assert names[-1] == "server"  # what is built without --target


@pytest.mark.parametrize("name", ["server", "etcd"])
def test_an_image_runs_without_root_and_writes_to_one_volume(name: str) -> None:
    instructions = stage(name)
    last = {instruction.name: instruction.rest for instruction in instructions}
    user = [number for number, (name, _) in enumerate(instructions) if name == "USER"]
    assert last["USER"] == f"{USER_ID}:{USER_ID}"
    assert not [name for name, _ in instructions[user[-1] :] if name == "RUN"]
    assert f"install -d -o {USER_ID} -g {USER_ID} -m 700 {last['VOLUME']}" in " ".join(rest for _, rest in instructions)


def test_the_server_is_process_one_and_has_stop_signal_and_health_check() -> None:
    last = {instruction.name: instruction.rest for instruction in stage("server")}
    assert last["ENTRYPOINT"] == '["kvstore-server"]'
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert "/readyz" in last["HEALTHCHECK"]
    assert not re.search(r"\bgcc\b|apt-get", " ".join(rest for _, rest in stage("server")))


def test_copied_paths_exist_and_are_part_of_the_build() -> None:
    assert copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not dockerignored(source), source
    for unwanted in (
        "tests",
        ".git",
        "docs",
        "kvstore/_cext.so",
        "cext/_cext.c",
        "cext/_index.c",
        "kvstore/__pycache__/cli.pyc",
    ):
        assert dockerignored(unwanted), unwanted


def test_the_image_copies_all_sources_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {package.replace(".", "/") for package in project["tool"]["setuptools"]["packages"]}
    needed = {"pyproject.toml", "setup.py", project["project"]["readme"], *project["project"]["license-files"], "cext"}
    sources = copied()
    for path in needed | packages:
        assert any(path == source or path.startswith(f"{source}/") for source in sources), path


def test_images_carry_the_version_of_the_package() -> None:
    (container,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    images = {container["image"], *(service["image"] for service in compose()["services"].values())}
    assert {image for image in images if image.startswith("kvstore:")} == {f"kvstore:{__version__}"}
    labels = dict(word.split("=", 1) for name, rest in stage("server") if name == "LABEL" for word in shlex.split(rest))
    assert labels["org.opencontainers.image.version"] == __version__
    assert not [image for image in images if ":" not in image or image.endswith(":latest")]


# ---- settings --------------------------------------------------------------------------------------------------------


@by_name
def test_the_server_accepts_the_files_settings(node: Node) -> None:
    settings = node.settings()
    assert settings.cluster and settings.node_id == node.name and settings.advertise and settings.zone


@by_name
def test_ports_are_those_of_shards_and_metrics(node: Node) -> None:
    settings = node.settings()
    shards = set(range(settings.port, settings.port + settings.shards))
    assert shards <= node.ports
    assert http_port(node) not in shards


@by_name
def test_probes_ask_the_port_the_server_listens_on(node: Node) -> None:
    assert node.settings().host in ("0.0.0.0", "::")
    for probe in node.probes:
        port = node.environment["KVSTORE_SERVER_HTTP"].rpartition(":")[2]
        text = " ".join(probe).replace("${KVSTORE_SERVER_HTTP##*:}", port)
        assert re.search(rf"http://[\d.]+:{http_port(node)}/(healthz|readyz)$", text), text


@by_name
def test_a_node_has_time_to_drain_and_write_dirty_blocks(node: Node) -> None:
    needed = node.settings().drain_seconds + server.DRAIN_S + server.DISK_STOP_S + 15
    assert node.stop_s >= needed


@by_name
def test_memory_limits_leave_room_beyond_the_blocks(node: Node) -> None:
    settings = node.settings()
    supervisor = 256 << 20
    assert node.memory_limit_bytes >= settings.memory + settings.shards * OVERHEAD_BYTES + supervisor


@by_name
def test_the_disk_tier_is_on_the_only_writable_path(node: Node) -> None:
    volume = next(rest for name, rest in stage("server") if name == "VOLUME")
    assert node.volume == volume
    assert (node.settings().disk or "").startswith(f"{volume}/")


# ---- compose ---------------------------------------------------------------------------------------------------------


def services() -> Any:
    return compose()["services"]


def test_compose_publishes_ports_once_and_on_loopback_only() -> None:
    ports = [port for service in services().values() for port in published(service)]
    assert {address for address, _, _ in ports} == {"127.0.0.1"}
    assert all(outside == inside for _, outside, inside in ports)  # nodes announce their inner ports to clients
    assert len({outside for _, outside, _ in ports}) == len(ports)


def test_compose_waits_only_for_services_with_health_checks() -> None:
    for service in services().values():
        needed = service.get("depends_on", {})
        for name in needed:
            assert name in services()
            if isinstance(needed, dict) and needed[name]["condition"] == "service_healthy":
                assert services()[name]["healthcheck"]["test"][0] == "CMD"


def test_compose_mounts_only_declared_volumes_and_files_of_the_repository() -> None:
    declared = set(compose()["volumes"])
    used = [volume.split(":")[0] for service in services().values() for volume in service.get("volumes", [])]
    assert {name for name in used if not name.startswith(".")} == declared
    assert not [name for name in used if name.startswith(".") and not (DOCKER / name).is_dir()]
    blocks = [name for name in used if name.startswith("blocks")]
    assert len(set(blocks)) == len(blocks) == len(compose_nodes())  # each disk tier belongs to one server


def test_compose_nodes_are_members_of_one_cluster_in_different_zones() -> None:
    settings = [node.settings() for node in compose_nodes()]
    assert len({one.cluster for one in settings}) == 1
    for name in ("node_id", "advertise", "zone"):
        assert len({getattr(one, name) for one in settings}) == len(settings) == 3
    assert all(one.advertise in services() for one in settings)
    cluster = settings[0].cluster or ""
    host, port = re.fullmatch(r"etcd://(\w+):(\d+)/\w+", cluster).groups()  # type: ignore[union-attr]
    assert f"--listen-client-urls=http://0.0.0.0:{port}" in services()[host]["command"]


def test_compose_services_have_no_more_rights_than_they_need() -> None:
    for name, service in services().items():
        if service["image"].startswith("kvstore"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and "privileged" not in service, name


def test_build_targets_are_dockerfile_stages() -> None:
    names = {stage[0].rest.split(" AS ")[1] for stage in dockerfile()}
    for service in services().values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert ROOT / service["build"]["dockerfile"] == DOCKER / "Dockerfile"
            assert service["build"]["target"] in names


# ---- what watches ----------------------------------------------------------------------------------------------------


def test_prometheus_scrapes_every_nodes_metrics() -> None:
    (job,) = manifest("prometheus/prometheus.yml")["scrape_configs"]
    (targets,) = job["static_configs"]
    assert targets["targets"] == [f"{node.name}:{http_port(node)}" for node in compose_nodes()]
    # Files that the configuration names by a path in the container are mounted there.
    (rules,) = manifest("prometheus/prometheus.yml")["rule_files"]
    assert "./prometheus:/etc/prometheus:ro" in services()["prometheus"]["volumes"]
    assert (DOCKER / "prometheus" / Path(rules).name).exists()


def test_grafana_finds_its_data_source_and_dashboard() -> None:
    (source,) = manifest("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = manifest("grafana/provisioning/dashboards/kvstore.yaml")["providers"]
    assert source["url"] == "http://prometheus:9090"
    volumes = services()["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/kvstore.json"
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    used = [panel["datasource"]["uid"] for panel in panels]
    used += [target["datasource"]["uid"] for panel in panels for target in panel["targets"]]
    used += [variable["datasource"]["uid"] for variable in dashboard()["templating"]["list"]]
    assert set(used) == {source["uid"]}


def test_dashboard_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)


def test_every_alert_has_a_severity_and_a_description() -> None:  # test_troubleshooting.py: the advice for each
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["kvstore.yaml", "etcd.yaml"])
def test_selectors_match_the_pods(file: str) -> None:
    kinds = kubernetes(file)
    spec = kinds["StatefulSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == kinds["Service"]["spec"]["selector"]
    assert spec["serviceName"] == kinds["Service"]["metadata"]["name"]
    for constraint in spec["template"]["spec"].get("topologySpreadConstraints", []):
        assert constraint["labelSelector"]["matchLabels"] == labels
    if "PodDisruptionBudget" in kinds:
        assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("file", ["kvstore.yaml", "etcd.yaml"])
def test_pods_have_no_more_rights_than_they_need(file: str) -> None:
    spec = kubernetes(file)["StatefulSet"]["spec"]["template"]["spec"]
    security = spec["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == security["fsGroup"] == USER_ID
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("file", ["kvstore.yaml", "etcd.yaml"])
def test_a_pod_mounts_its_claim_where_the_image_expects_it(file: str) -> None:
    spec = kubernetes(file)["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    claimed = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
    assert [mount["name"] for mount in container["volumeMounts"]] == claimed
    image = stage("server" if file == "kvstore.yaml" else "etcd")
    expected = [rest for name, rest in image if name == "VOLUME"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == expected


def test_the_headless_service_reaches_every_pods_first_shard_and_metrics() -> None:
    spec = kubernetes("kvstore.yaml")["Service"]["spec"]
    node = pod(0, "10.0.0.1")
    assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"]
    assert {port["name"]: port["port"] for port in spec["ports"]} == {
        "kvstore": node.settings().port,
        "http": http_port(node),
    }
    annotations = stateful_set()["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(http_port(node))


def test_pods_find_etcd_by_its_name_in_the_manifest() -> None:
    service = kubernetes("etcd.yaml")["Service"]
    (port,) = service["spec"]["ports"]
    cluster = pod(0, "10.0.0.1").settings().cluster
    assert cluster == f"etcd://{service['metadata']['name']}:{port['port']}/kvstore"


def test_pods_differ_in_name_and_address_and_need_no_zone() -> None:
    first, second = pod(0, "10.0.0.1").settings(), pod(1, "10.0.0.2", "b").settings()
    assert (first.node_id, first.advertise, first.zone) == ("kvstore-0", "10.0.0.1", "")
    assert (second.node_id, second.advertise, second.zone) == ("kvstore-1", "10.0.0.2", "b")


def test_without_etcd_a_pod_needs_only_flags_removed() -> None:
    """The manual says so about dns://."""
    node = pod(0, "10.0.0.1", "a")
    of_etcd = ("--cluster=", "--advertise=", "--drain-seconds=")
    left = replace(node, flags=[flag for flag in node.flags if not flag.startswith(of_etcd)])
    assert len(left.flags) == len(node.flags) - len(of_etcd)
    assert left.settings().cluster is None


def test_a_probes_timeout_covers_its_own_request() -> None:
    (container,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    for name in PROBES:
        assert container[name]["timeoutSeconds"] >= VERDICT_S + 2
        assert container[name]["periodSeconds"] <= 30
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * server.SHARD_START_S


def test_a_pod_without_etcd_is_unready_but_keeps_running() -> None:
    (container,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in PROBES}
    assert paths == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}


def test_the_next_pod_is_updated_after_this_one_is_filled() -> None:
    spec = stateful_set()["spec"]
    assert spec["minReadySeconds"] >= pod(0, "10.0.0.1").settings().grace_seconds
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}


def test_the_claim_holds_the_disk_tier_and_file_system_overhead() -> None:
    (claim,) = stateful_set()["spec"]["volumeClaimTemplates"]
    size = quantity_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert size >= pod(0, "10.0.0.1").settings().disk_size * 1.05


def test_network_policies_allow_the_served_ports() -> None:
    text = (DOCKER / "kubernetes" / "networkpolicy.yaml").read_text(encoding="utf-8")
    node = pod(0, "10.0.0.1")
    settings = node.settings()
    assert f"port: {settings.port}\n" in text and f"endPort: {settings.port + settings.shards - 1}\n" in text
    assert f"port: {http_port(node)}\n" in text


def test_kustomize_names_the_manifests() -> None:
    assert all(
        (DOCKER / "kubernetes" / name).exists() for name in manifest("kubernetes/kustomization.yaml")["resources"]
    )


# ---- systemd ---------------------------------------------------------------------------------------------------------


def unit() -> configparser.SectionProxy:
    """Return the section [Service]. For a key with several values, the last one counts."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


def test_the_systemd_unit_stops_the_server_as_it_expects() -> None:
    service = unit()
    assert service["Type"] == "notify" and float(service["WatchdogSec"]) >= 30
    assert int(service["TimeoutStartSec"]) >= 2 * server.SHARD_START_S
    assert service["ExecStart"].endswith("/kvstore-server")
    assert service["KillMode"] == "mixed"  # the supervisor itself signals its shards
    assert int(service["TimeoutStopSec"]) >= 120 + server.DRAIN_S + server.DISK_STOP_S + 15
    assert service["RestartPreventExitStatus"] == str(BAD_USAGE)
    variables = dict(variable.split("=") for variable in service["Environment"].split())
    file = variables[CONFIG_VARIABLE]
    assert file == "/etc/kvstore/server.toml"
    assert file in (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    # The server puts its Unix socket into this folder, because other processes cannot see its /tmp.
    assert service["PrivateTmp"] == "yes"
    assert f"{variables['XDG_RUNTIME_DIR']}/{service['RuntimeDirectory']}" == "/run/kvstore"


def test_systemd_accepts_the_unit_and_rates_it_as_hardened(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: scripts/programs.sh installs it")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rated.returncode == 0, rated.stdout + rated.stderr  # at most 1.5; without hardening options it is 10
    there = tmp_path / UNIT.name  # otherwise only the missing program would be reported
    there.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/kvstore/bin/kvstore-server", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(there)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0 and UNIT.name not in checked.stderr, checked.stderr
