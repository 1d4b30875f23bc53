#!/usr/bin/env bash
# Lints the Helm chart with Helm, and compares what Helm makes of it with what tests/unit/test_helm.py does. Helm comes
# as the package helm-python-sdk, which brings its Go library (75 MB), into a folder that is removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
scripts/run.sh test python -m pip install -q --no-deps --target "$scratch" helm-python-sdk==0.2.2
PYTHONPATH=$scratch scripts/run.sh test python - <<'PYTHON'
import helm_python
import yaml

from tests.unit.test_helm import CHART, rendered, values

found = helm_python.lint(str(CHART))
messages = [each for each in found["messages"] if each["error"] != "icon is recommended"]
assert not messages and not found["errors"], found
chart = helm_python.Chart.load(str(CHART))
no_disk = {"disk": {**values()["disk"], "enabled": False}}
for changes in ({}, {"replicas": 5}, {"networkPolicy": False}, {"authSecret": "kvstore-auth"}, no_disk):
    texts = chart.render(changes, name="kvstore", namespace="default")
    objects = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    by_kind = {each["kind"]: each for each in objects if each}
    assert by_kind == rendered(changes), changes
print(f"helm: ok, {helm_python.helm_sdk_version()}")
PYTHON
