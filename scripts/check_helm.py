"""Lints the Helm chart with Helm, and compares what Helm makes of it with what tests/unit/test_helm.py does.

Helm comes as the package helm-python-sdk, which brings its Go library (75 MB), into a folder that is removed.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile

import yaml

from tests.unit.test_helm import CHART, rendered, values

HELM = "helm-python-sdk==0.2.2"
REMARKS = {"icon is recommended"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, HELM], check=True
        )
        sys.path.insert(0, folder)
        helm = importlib.import_module("helm_python")
        found = helm.lint(str(CHART))
        assert not found["errors"] and {each["error"] for each in found["messages"]} <= REMARKS, found
        chart = helm.Chart.load(str(CHART))
        no_disk = {"disk": {**values()["disk"], "enabled": False}}
        for changes in ({}, {"replicas": 5}, {"networkPolicy": False}, {"authSecret": "kvstore-auth"}, no_disk):
            texts = chart.render(changes, name="kvstore", namespace="default")
            objects = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
            assert {each["kind"]: each for each in objects if each} == rendered(changes), changes
        print(f"helm: ok, {helm.helm_sdk_version()}")


if __name__ == "__main__":
    main()
