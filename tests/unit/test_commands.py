"""The commands of a checkout that is not installed, and what they say if a package is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import __version__
from kvstore_cli.options import need_modules
from kvstore_cli.output import CommandFailed
from tests.support.harness import ROOT, environment

COMMANDS = ROOT / "scripts" / "bin"


@pytest.mark.parametrize("command", ["kvstore", "kvstore-server"])
def test_a_checkout_has_its_commands(command: str, tmp_path: Path) -> None:
    assert "PATH=$PWD/scripts/bin:" in (ROOT / "scripts" / "run.sh").read_text(encoding="utf-8")
    path = os.pathsep.join([str(COMMANDS), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [command, "--version"], cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{command} {__version__}\n"


def test_a_missing_package_is_installed_for_the_running_python() -> None:
    with pytest.raises(CommandFailed) as failed:
        need_modules("plan", "no_such_package")
    message = failed.value.message
    assert "kvstore plan needs no_such_package" in message
    assert f'{sys.executable} -m pip install "llm-kvstore[serving]"' in message
    assert 'make run ARGS="kvstore plan …"' in message
