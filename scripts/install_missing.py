"""install_missing.py WHEELS SITE: installs the wheels whose distribution this interpreter lacks into the folder SITE.

Nothing is downloaded, and the interpreter's own packages stay as they are. Wheels that an earlier run installed are not
installed again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path


def lacking(wheels: list[Path]) -> list[Path]:
    """Return the wheels of distributions that this interpreter does not have in any version."""
    missing = []
    for wheel in wheels:
        try:
            importlib.metadata.version(wheel.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(wheel)
    return missing


def main(folder: Path, site: Path) -> int:
    wheels = sorted(folder.glob("*.whl"))
    missing = lacking(wheels)
    state = hashlib.sha256("\n".join(wheel.name for wheel in missing).encode()).hexdigest()
    stamp = site / ".wheels"
    if stamp.exists() and stamp.read_text() == state:
        return 0
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(site)]
        if status := subprocess.run([*command, *map(str, missing)], check=False).returncode:
            return status
    stamp.write_text(state)
    print(f"on-gpu: {len(missing)} of {len(wheels)} wheels installed into {site}; the interpreter has the others")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"install_missing.py: got {sys.argv[1:]}; expected WHEELS SITE, two folders")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
