"""The Debian package, installed by apt in a separate Debian system, and its service under a running systemd.

`make check-service` runs this file. It takes minutes, most of them to build the package and the system; with
KVSTORE_SERVICE_FOLDER, both are kept in that folder and reused. Each test continues where the one before ended, from
the installation to the purge: run the file as a whole.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.debian import Machine, build_package, build_system, changed_package, unavailable
from tests.support.harness import wait_until

pytestmark = [
    pytest.mark.skipif("KVSTORE_SERVICE" not in os.environ, reason="make check-service runs it"),
    pytest.mark.timeout(2400),
]

SETTINGS = {
    "shards": "2",
    "http": '"127.0.0.1:9100"',
    "unix_users": '"engine"',
    "memory": '"64MiB"',
    "segment": '"4MiB"',
    "disk": '"/var/lib/kvstore/blocks"',
    "disk_size": '"256MiB"',
    "audit": '"/var/log/kvstore/audit.log"',
}
SIZE = 100_000
KEY = "00112233445566778899aabbccddeeff"
NAMESPACE = f'{{"model":"m","dtype":"bfloat16","block_tokens":16,"block_bytes":{SIZE}}}'
UNIT = "kvstore-server.service"
DROP_IN = "etc/systemd/system/kvstore-server.service.d/test.conf"
LINK = "etc/systemd/system/multi-user.target.wants/kvstore-server.service"


class Host:
    """The test machine, and an operator's actions on it."""

    def __init__(self, machine: Machine, package: Path, later: Path) -> None:
        self.machine = machine
        self.root = machine.root
        self.run = machine.run
        for name, each in (("this.deb", package), ("later.deb", later)):
            (self.root / "srv" / name).write_bytes(each.read_bytes())
        self.settings = self.root / "etc/kvstore/server.toml"
        self.block = secrets.token_bytes(SIZE)
        (self.root / "srv/block").write_bytes(self.block)

    def install(self, name: str) -> subprocess.CompletedProcess[str]:
        return self.run("apt-get", "-qq", "-o", "Dpkg::Options::=--force-confold", "install", "-y", f"/srv/{name}")

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", f"--property={name}", "--value", UNIT).stdout.strip()

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def journal(self, *options: str) -> str:
        return self.run("journalctl", "--unit", UNIT, "--no-pager", "--output=cat", *options).stdout

    def kvstore(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("kvstore", *arguments, check=check, KVSTORE_NAMESPACE=NAMESPACE)

    def has_block(self) -> bool:
        read = self.root / "srv/read"
        read.unlink(missing_ok=True)
        found = self.kvstore("get", KEY, "--output", "/srv/read", check=False).returncode == 0
        return found and read.read_bytes() == self.block

    def started_again(self, pid: int) -> bool:
        return self.show("ActiveState") == "active" and self.pid() not in (0, pid)

    @contextmanager
    def drop_in(self, text: str) -> Iterator[None]:
        """Run the service with this drop-in file while the body runs."""
        file = self.root / DROP_IN
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"[Service]\n{text}\n")
        try:
            self.run("systemctl", "daemon-reload")
            self.run("systemctl", "restart", UNIT)
            yield
        finally:
            file.unlink()
            self.run("systemctl", "daemon-reload")
            self.run("systemctl", "restart", UNIT)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A machine with systemd, and the package to install."""
    if reason := unavailable():
        pytest.fail(reason)  # a run that requests these tests must not mistake skips for success
    scratch = tmp_path_factory.mktemp("debian")
    kept = Path(os.environ.get("KVSTORE_SERVICE_FOLDER", str(scratch)))
    package = build_package(kept / "package")
    build_system(kept / "system", package)
    machine = Machine(scratch, kept / "system")
    try:
        machine.boot()
        for user in ("engine", "stranger"):
            machine.run("useradd", user)
        yield Host(machine, package, changed_package(package, scratch))
    finally:
        machine.shut_down()


@pytest.fixture
def service(host: Host) -> Host:
    """The machine with the server set up and running, and the block in the server."""
    host.run("systemctl", "enable", "--now", UNIT)
    if not host.has_block():
        host.kvstore("set", KEY, "/srv/block")
        host.kvstore("sync")
    return host


# ---- installation ------------------------------------------------------------------------------------------------


def test_installing_adds_a_user_and_waits_for_settings(host: Host) -> None:
    said = host.install("this.deb").stdout
    assert "set /etc/kvstore/server.toml up, then: systemctl enable --now kvstore-server" in said
    assert not host.run("dpkg", "--verify", "llm-kvstore").stdout
    account = host.run("getent", "passwd", "kvstore").stdout.strip().split(":")
    assert int(account[2]) < 1000 and account[5:] == ["/var/lib/kvstore", "/usr/sbin/nologin"]
    assert host.show("ActiveState") == "inactive" and host.show("UnitFileState") == "disabled"
    assert host.kvstore("--help").returncode == host.run("kvstore-server", "--help").returncode == 0


def test_settings_are_checked_as_the_services_user_before_the_first_start(host: Host) -> None:
    text = host.settings.read_text()
    for name, value in SETTINGS.items():
        text, found = re.subn(f"^# {name} = .*", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1, name
    host.settings.write_text(text)
    command = ("kvstore-server", "--config", "/etc/kvstore/server.toml", "--check-config")
    assert "the settings are valid" in host.run(*command, user="kvstore").stdout


def test_it_starts_and_serves_blocks_inside_and_outside_the_machine(host: Host) -> None:
    host.run("systemctl", "enable", "--now", UNIT)
    assert host.show("ActiveState") == "active"  # at once, because of Type=notify
    assert host.show("StatusText") == "serving at 127.0.0.1:7070 with 2 shard(s) of 64MiB together"
    host.kvstore("set", KEY, "/srv/block")
    assert host.has_block()
    read = host.root / "srv/read-outside"
    host.machine.run_outside("kvstore_cli", "get", KEY, "--output", str(read), KVSTORE_NAMESPACE=NAMESPACE)
    assert read.read_bytes() == host.block


def test_its_log_reaches_the_journal_with_priorities(service: Host) -> None:
    journal = service.journal()
    assert "supervisor kvstore-server" in journal and "kvstore-server ready tcp://127.0.0.1:7070" in journal
    assert "of user 0 connected to the Unix socket and was refused" in service.journal("--priority=warning")
    assert "supervisor" not in service.journal("--priority=warning")


# ---- what it may do ----------------------------------------------------------------------------------------------


def test_the_server_has_only_the_rights_of_its_unit(service: Host) -> None:
    pid = service.pid()
    lines = service.run("cat", f"/proc/{pid}/status").stdout.splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"] == [service.run("id", "-u", "kvstore").stdout.strip()] * 4
    assert all(int(status[f"Cap{kind}"][0], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
    for place in ("/usr/x", "/etc/kvstore/x", "/opt/kvstore/x"):  # not even root can write there in the server's mounts
        refused = service.run("nsenter", f"--target={pid}", "--mount", "touch", place, check=False)
        assert "Read-only file system" in refused.stderr
    rated = service.run("systemd-analyze", "security", "--no-pager", UNIT).stdout
    [figure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", rated)
    assert float(figure) <= 1.5, rated


def test_engines_of_allowed_users_use_shared_memory_and_others_tcp(service: Host) -> None:
    script = (
        "import json, sys; from kvstore_client import KVStoreClient, Namespace\n"
        "namespace, key = Namespace(**json.loads(sys.argv[1])), bytes.fromhex(sys.argv[2])\n"
        "with KVStoreClient('127.0.0.1:7070', namespace) as client:\n"
        "    print(client.contains([key]).all(), client.stats.path)"
    )
    command = ("/opt/kvstore/bin/python", "-c", script, NAMESPACE, KEY)
    assert service.run(*command, user="engine").stdout == "True shared memory\n"
    assert service.run(*command, user="stranger").stdout == "True tcp\n"


# ---- signals, crashes, restarts ----------------------------------------------------------------------------------


def test_a_reload_reads_the_principals_again(service: Host) -> None:
    folder, file = service.root / "etc/kvstore", "/etc/kvstore/auth.toml"
    add = ("kvstore", "auth", "add", "--file", file, "--tenant", "*", "--verbs", "read,write,monitor", "--name")
    service.run(*add, "first")
    service.run("chown", "kvstore:", file)
    good = (folder / "auth.toml").read_text()
    with service.drop_in(f"Environment=KVSTORE_SERVER_AUTH={file}"):
        pid = service.pid()
        (folder / "auth.toml").write_text("[[principals]]\nnot = 'one'\n")
        wrong = "the previous policy stays in force"
        wait_until(lambda: service.journal().count(wrong) >= 2, what="both shards look at the file by themselves")
        seen = service.journal().count(wrong)
        service.run("systemctl", "reload", UNIT)
        wait_until(lambda: service.journal().count(wrong) == seen + 2, what="both shards have read it again")
        (folder / "auth.toml").write_text(good)
        token = service.run(*add, "second").stdout.strip()
        service.run("systemctl", "reload", UNIT)
        wait_until(lambda: service.run("kvstore", "ping", check=False, KVSTORE_TOKEN=token).returncode == 0)
        assert service.pid() == pid and "a policy with 2 principals is in force" in service.journal()


def test_a_killed_server_is_restarted_and_finds_its_blocks(service: Host) -> None:
    pid, restarts = service.pid(), int(service.show("NRestarts"))
    service.run("sh", "-c", f"kill -KILL {pid}")
    wait_until(lambda: service.started_again(pid), 60.0)
    assert int(service.show("NRestarts")) == restarts + 1
    wait_until(service.has_block, what="the index is read")


def test_the_watchdog_kills_a_hanging_supervisor(service: Host) -> None:
    with service.drop_in("WatchdogSec=4"):
        pid = service.pid()
        service.run("sh", "-c", f"kill -STOP {pid}")
        wait_until(lambda: service.started_again(pid), 60.0)
        assert "Watchdog timeout" in service.journal()


def test_bad_settings_are_reported_and_not_retried(service: Host) -> None:
    text = service.settings.read_text()
    service.settings.write_text(text + '\nshard = "one"\n')
    try:
        assert service.run("systemctl", "restart", UNIT, check=False).returncode != 0
        assert (service.show("ActiveState"), service.show("ExecMainStatus")) == ("failed", "2")
        assert "shard" in service.journal().split("Starting")[-1]
    finally:
        service.settings.write_text(text)
        service.run("systemctl", "start", UNIT)


def test_it_stops_cleanly_and_starts_at_boot(service: Host) -> None:
    pid = service.pid()
    service.run("systemctl", "stop", UNIT)
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")
    assert "SIGKILL" not in service.journal().split("SIGTERM: stopping")[-1]
    service.run("systemctl", "start", UNIT)
    service.machine.shut_down()  # while it is serving
    service.machine.boot()
    wait_until(lambda: service.started_again(pid), 60.0)
    wait_until(service.has_block, what="the index is read")


# ---- upgrade, removal, purge -------------------------------------------------------------------------------------


def test_reinstalling_keeps_the_settings_and_restarts_the_server(service: Host) -> None:
    edited, pid = service.settings.read_text(), service.pid()
    service.run("dpkg", "-i", "/srv/this.deb")
    assert service.settings.read_text() == edited
    assert service.started_again(pid)
    wait_until(service.has_block)


def test_an_upgrade_with_wrong_settings_succeeds_and_reports_them(service: Host) -> None:
    edited = service.settings.read_text()
    service.settings.write_text(edited + '\nshard = "one"\n')
    done = service.run("dpkg", "-i", "/srv/this.deb")
    assert "the server did not start again" in done.stderr
    status = ("dpkg-query", "--show", "--showformat=${Status}", "llm-kvstore")
    assert service.run(*status).stdout == "install ok installed"
    service.settings.write_text(edited)
    service.run("systemctl", "start", UNIT)


def test_an_upgrade_keeps_the_settings_and_adds_its_own_file(service: Host) -> None:
    edited, pid = service.settings.read_text(), service.pid()
    service.install("later.deb")
    assert service.settings.read_text() == edited
    assert "A line of the later version." in service.settings.with_name("server.toml.dpkg-dist").read_text()
    assert service.started_again(pid)
    wait_until(service.has_block)


def test_removal_stops_the_server_and_keeps_settings_and_blocks(service: Host) -> None:
    edited = service.settings.read_text()
    service.run("apt-get", "-qq", "remove", "-y", "llm-kvstore")
    assert service.show("LoadState") == "not-found" and service.pid() == 0
    assert not (service.root / "opt/kvstore").exists() and not (service.root / LINK).is_symlink()
    assert service.settings.read_text() == edited
    service.install("later.deb")
    service.run("systemctl", "enable", "--now", UNIT)
    wait_until(service.has_block)


def test_purging_removes_settings_blocks_and_logs_but_keeps_the_user(service: Host) -> None:
    (service.settings.parent / "own").touch()
    service.run("apt-get", "-qq", "purge", "-y", "llm-kvstore")
    for place in ("opt/kvstore", "etc/kvstore/server.toml", "var/lib/kvstore", "var/log/kvstore"):
        assert not (service.root / place).exists(), place
    assert {each.name for each in service.settings.parent.iterdir()} <= {"auth.toml", "own"}  # the operator's own files
    assert service.settings.with_name("own").exists()
    assert service.run("getent", "passwd", "kvstore").returncode == 0
    assert service.run("systemctl", "--failed", "--quiet").stdout == ""


def test_it_installs_and_purges_without_systemd(host: Host) -> None:
    """While an image is built, there is no systemd. The package is installed, its service enabled, and the package
    purged; nothing is left."""
    steps = "dpkg -i /srv/this.deb && systemctl enable kvstore-server && test -h /{0} && dpkg --purge llm-kvstore"
    hidden = f"mount -t tmpfs tmpfs /run && {steps.format(LINK)}"
    host.run("unshare", "--mount", "sh", "-c", hidden)
    assert not (host.root / LINK).is_symlink() and not (host.root / "opt/kvstore").exists()
