"""The Helm chart, compared with the manifests it is derived from. Helm itself does not run here: `render` implements
the parts of its templates that the chart uses, and refuses others. `make check-kubernetes` compares it with Helm."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvstore import __version__
from tests.support.deployment import kubernetes
from tests.support.harness import ROOT

CHART = ROOT / "packaging" / "helm" / "kvstore"
TEMPLATES = sorted((CHART / "templates").iterdir())
_ACTION = re.compile(r"\s*\{\{-\s*(.+?)\s*\}\}|\{\{\s*(.+?)\s*\}\}", re.DOTALL)


def values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def look_up(expression: str, context: Any, item: Any) -> Any:
    """Return the value of `.Values.a.b`, `.Release.Name` or `.`, which may be followed by `| toJson`."""
    path, *functions = (part.strip() for part in expression.split("|"))
    value = item
    if path != ".":
        value = context
        for name in path.removeprefix(".").split("."):
            value = value[name]  # a KeyError: the template uses a value that values.yaml lacks
    for function in functions:
        assert function == "toJson", expression
        value = json.dumps(value)
    return value


def render(text: str, context: Any) -> str:
    pieces = _ACTION.split(text)
    tokens = [(pieces[at], pieces[at + 1] or pieces[at + 2]) for at in range(0, len(pieces) - 1, 3)]
    tokens.append((pieces[-1], "end"))  # the end of the template itself
    return "".join(_block(iter(tokens), context, None))


def _block(tokens: Iterator[tuple[str, str]], context: Any, item: Any) -> Iterator[str]:
    """Yield the rendered texts of the tokens up to the `end` of their block."""
    for text, action in tokens:
        yield text
        word, _, rest = action.partition(" ")
        if word == "end":
            return
        if word in ("if", "range"):
            value = look_up(rest.removeprefix("not "), context, item)
            value = not value if rest.startswith("not ") else value
            inside = _inside(tokens)
            for each in value if word == "range" else [item] if value else []:
                yield from _block(iter(inside), context, each)
        else:
            assert action.startswith("."), f"{action}: this test does not know it"
            value = look_up(action, context, item)
            assert value is not None, action
            yield str(value)


def _inside(tokens: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the tokens of a block, including its `end`."""
    depth, inside = 1, []
    while depth:
        inside.append(next(tokens))
        word = inside[-1][1].partition(" ")[0]
        depth += (word in ("if", "range")) - (word == "end")
    return inside


def rendered(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the objects by kind, rendered from the default values with these changes."""
    context = {"Values": {**values(), **(changes or {})}, "Release": {"Name": "kvstore", "Namespace": "default"}}
    objects = {}
    for file in TEMPLATES:
        if file.suffix == ".yaml":
            found = yaml.safe_load(render(file.read_text(encoding="utf-8"), context))
            if found:
                objects[found["kind"]] = found
    return objects


def test_the_default_values_render_the_manifests() -> None:
    expected = copy.deepcopy(kubernetes("kvstore.yaml"))
    (container,) = expected["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    # The manifest names the port of each shard, and the chart does not. Names are only for readers: a port is open
    # without one.
    container["ports"] = [{"name": "kvstore", "containerPort": 7070}, container["ports"][-1]]
    text = (ROOT / "docker" / "kubernetes" / "networkpolicy.yaml").read_text(encoding="utf-8")
    expected["NetworkPolicy"] = next(yaml.safe_load_all(text))
    assert rendered() == expected


def test_every_value_has_an_effect_and_every_used_value_exists() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in TEMPLATES)
    used = {match.split(".")[0] for match in re.findall(r"\.Values\.([\w.]+)", text)}
    assert used == set(values())
    found = rendered(
        {
            "extraArgs": ["--log-format=json"],
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"operator": "Exists"}],
            "disk": {**values()["disk"], "storageClass": "fast"},
        }
    )["StatefulSet"]["spec"]
    pod = found["template"]["spec"]
    assert pod["containers"][0]["args"][-1] == "--log-format=json"
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"disk": "nvme"}, [{"operator": "Exists"}])
    assert found["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"


def test_without_disk_or_policy_their_objects_are_absent() -> None:
    found = rendered({"disk": {**values()["disk"], "enabled": False}, "networkPolicy": False})
    assert "NetworkPolicy" not in found
    spec = found["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert "volumeClaimTemplates" not in spec and not container["volumeMounts"]
    assert not [argument for argument in container["args"] if "disk" in argument]


def test_with_a_secret_clients_log_in() -> None:
    spec = rendered({"authSecret": "kvstore-auth"})["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--auth=/etc/kvstore/auth.toml" in container["args"] and "--insecure" not in container["args"]
    (volume,) = spec["volumes"]
    assert volume["secret"]["secretName"] == "kvstore-auth"
    assert {"name": volume["name"], "mountPath": "/etc/kvstore", "readOnly": True} in container["volumeMounts"]


def test_the_chart_has_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == values()["image"]["tag"] == __version__


def test_templates_that_this_test_cannot_render_are_refused() -> None:
    with pytest.raises(AssertionError, match="does not know it"):
        render("a: {{ include 'x' . }}", {"Values": {}})
    with pytest.raises(KeyError):
        render("a: {{ .Values.nosuch }}", {"Values": {}})
