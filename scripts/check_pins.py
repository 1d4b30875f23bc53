"""Checks that this environment, made from the pins alone, has what pyproject.toml asks for.

Runs inside a new environment. A dependency added to pyproject.toml but not to requirements/test.txt ends
here, with its name, and not in an ImportError of some test.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
problems = []
for line in project["dependencies"] + project["optional-dependencies"]["test"]:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        problems.append(f"pyproject.toml asks for {line}, requirements/test.txt does not pin it")
    else:
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"pyproject.toml asks for {line}, requirements/test.txt pins {installed}")
sys.exit("\n".join(problems) or 0)
