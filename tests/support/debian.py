"""A separate Debian system: a minimal system of this machine's release, with systemd, in a container.

Release and archives are those of this machine's apt. The system has only systemd, apt and the dependencies of the
package under test; its network has only the loopback device. Its base is kept in a folder, and each `Machine` is a
fresh copy.

Needs root, mmdebstrap and systemd-nspawn; systemd need not run on this machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.support.harness import ROOT, environment, wait_until

BUILD_S: Final = 1200.0
BOOT_S: Final = 60.0
COMMAND_S: Final = 120.0
VARIABLES: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
    "LANG": "C.UTF-8",
}
PROGRAMS: Final = ("mmdebstrap", "systemd-nspawn", "dpkg-deb", "apt-get", "apt-config", "unshare", "nsenter")

# The container gets a control group in its own view of the tree. So it also boots on machines with control groups of
# version 1 or without systemd. SIGTERM goes to systemd-nspawn, which then shuts the container down.
BOOT: Final = """
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir "/sys/fs/cgroup/$2"
echo $$ >"/sys/fs/cgroup/$2/cgroup.procs"
trap : TERM
systemd-nspawn --quiet --register=no --keep-unit --private-network --link-journal=no --console=pipe --boot \
    --machine="$2" --directory="$1" &
wait $! || wait $! || true
echo $$ >/sys/fs/cgroup/cgroup.procs
find "/sys/fs/cgroup/$2" -depth -type d -delete
"""


def unavailable() -> str:
    """Return why no such system can be made here, or an empty text if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "making a system takes root on Linux"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)} (scripts/programs.sh)" if missing else ""


# ---- what it is made of ------------------------------------------------------------------------------------------


def build_package(folder: Path) -> Path:
    """Return the package of this checkout. It is built into the folder if it is not there yet."""
    if not list(folder.glob("*.deb")):
        subprocess.run([str(ROOT / "scripts" / "deb.sh"), str(folder)], check=True, timeout=BUILD_S)
    [package] = folder.glob("*.deb")
    return package


def changed_package(package: Path, folder: Path) -> Path:
    """Return the package as a later version of it, whose settings file has another line."""
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "-R", str(package), str(tree)], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(control.read_text().replace("\nVersion: ", "\nVersion: 1:", 1))
    with (tree / "etc" / "kvstore" / "server.toml").open("a") as settings:
        settings.write("\n# A line of the later version.\n")
    later = folder / "later.deb"
    subprocess.run(["dpkg-deb", "-Znone", "--build", str(tree), str(later)], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree)
    return later


def build_system(folder: Path, package: Path) -> None:
    """Make the system in a folder, if it is not there yet."""
    if folder.exists():
        return
    begun = folder.with_suffix(".begun")
    shutil.rmtree(begun, ignore_errors=True)
    asked = ["dpkg-deb", "--field", str(package), "Depends"]
    depends = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    options = [f"--aptopt={line}" for line in _apt_config() if line.startswith(("Acquire::http", "Acquire::Check-"))]
    command = [
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--format=directory"),
        *(f"--include=systemd-sysv,{depends.strip().replace(' ', '')}", '--aptopt=APT::Install-Recommends "false"'),
        *options,
        *(platform.freedesktop_os_release()["VERSION_CODENAME"], str(begun), "-"),
    ]
    subprocess.run(command, input=_archives(), text=True, check=True, timeout=BUILD_S)
    begun.rename(folder)


def _archives() -> str:
    """Return the lines of sources.list for the archives of this machine's distribution that its apt uses."""
    asked = ["apt-get", "indextargets", "--format", "deb $(REPO_URI) $(RELEASE) $(COMPONENT)|$(ORIGIN)"]
    for _ in range(2):
        found = subprocess.run([*asked, "Created-By: Packages"], check=True, capture_output=True, text=True).stdout
        lines = [line.partition("|") for line in found.splitlines()]
        mine = sorted({entry for entry, _, origin in lines if origin in ("Debian", "Ubuntu")})
        if mine:
            return "\n".join(mine) + "\n"
        subprocess.run(["apt-get", "-qq", "update"], check=True)
    raise RuntimeError("apt has no archive of Debian here")


def _apt_config() -> list[str]:
    done = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True)
    return [line.rstrip(";") for line in done.stdout.splitlines()]


# ---- the machine -------------------------------------------------------------------------------------------------


class Machine:
    """One system, its processes, and commands inside it. Use it from one thread."""

    def __init__(self, folder: Path, system: Path) -> None:
        """Copy the system into a folder; `boot` starts it."""
        self.root = folder / "machine"
        self._console = folder / "console"
        self._name = f"kvstore-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        subprocess.run(["cp", "-a", "--reflink=auto", str(system), str(self.root)], check=True)

    def boot(self) -> None:
        """Start systemd, and wait until its start is complete."""
        command = [
            "unshare",
            "--mount",
            "--propagation=private",
            "bash",
            "-c",
            BOOT,
            "boot",
            str(self.root),
            self._name,
        ]
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        wait_until(self._booted, BOOT_S, f"systemd runs; {self._console} says why not")

    def _booted(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._console.read_text(errors="replace")
        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
            inits = [each.pid for each in below if each.name() == "systemd" and _is_first(each.pid)]
        except (psutil.NoSuchProcess, FileNotFoundError):  # a process that only prepared the container has ended
            return False
        if not inits:
            return False
        [self._init] = inits
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def shut_down(self) -> None:
        """Shut down as an operator does: systemd stops everything."""
        if self._process is None:
            return
        if self._init:
            self.run("systemctl", "--no-block", "poweroff", check=False)
        else:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise
        finally:
            self._process, self._init = None, 0

    def run(
        self, *command: str, user: str = "root", check: bool = True, timeout_s: float = COMMAND_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the system. Returns its output. A status other than 0 fails the test, unless `check` is
        off."""
        inside = ["nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        as_user = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return _run([*inside, *as_user, *command], {**VARIABLES, **variables}, check, timeout_s)

    def run_outside(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this checkout in the system's network, without its files, like a client on another host."""
        inside = ["nsenter", f"--target={self._init}", "--net", sys.executable, "-m"]
        return _run([*inside, *command], environment(**variables), True, COMMAND_S)


def _is_first(pid: int) -> bool:
    return Path(f"/proc/{pid}/status").read_text().partition("\nNSpid:")[2].splitlines()[0].split()[-1] == "1"


def _run(
    command: Sequence[str], variables: dict[str, str], check: bool, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
