"""Checks that this environment, made from the pins alone, has all that pyproject.toml requires.

It runs inside a new environment. It names each dependency that was added to pyproject.toml but not to
requirements/test.txt. Without this check, a missing pin would show only as an ImportError in a test.
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
        problems.append(f"pyproject.toml requires {line}, but requirements/test.txt does not pin it")
    else:
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"pyproject.toml requires {line}, but requirements/test.txt pins {installed}")
sys.exit("\n".join(problems) or 0)
