"""`kvstore-server` as a command: its help, its settings, its log."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

import kvstore
from kvstore.node.config import ServerConfig
from kvstore.node.settings import describe
from tests.support import forked
from tests.support.harness import StartServer, environment, wait_until
from tests.support.settings import load


def run(*arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    done = forked.run("kvstore", *arguments, env=environment(COLUMNS="100", **variables))
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_every_setting_with_its_default(flag: str) -> None:
    text = " ".join(run(flag).stdout.split())
    for each in describe(ServerConfig):
        if not each.setting.file_only:
            assert re.search(rf"{each.flag} .*?\[default: {re.escape(each.default_text)}\]", text), each.name
    assert "--print-config" in text and "--check-config" in text and "KVSTORE_SERVER_CONFIG" in text


def test_settings_can_be_checked_without_a_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    fine = ("--memory", "512Mi", "--port", "0", "--disk", str(disk), "--disk-size", "64MiB")
    assert run("--check-config", *fine).stdout.startswith("the settings are valid; a start makes the folder ")
    assert not disk.exists()
    file = tmp_path / "server.toml"
    file.write_text("port = 70000\n")
    wrong = run("--check-config", status=2, KVSTORE_SERVER_CONFIG=str(file))
    assert wrong.stdout == ""
    assert f"error: {file}: port = 70000: expected a whole number from 0 to 65535\n" in wrong.stderr


def test_a_check_reports_everything_that_the_machine_lacks(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "thesis.txt").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {
            "port": port,
            "http": "192.0.2.1:0",
            "auth": tmp_path / "auth.toml",
            "unix-users": "nobody9",
            "unix-socket": tmp_path / "none" / "kv.sock",
            "memory": "512TiB",
            "disk": others,
        }
        given = [f"--{name}={value}" for name, value in flags.items()]
        wrong = run("--check-config", "--insecure", *given, status=2)
    lines = wrong.stderr.splitlines()
    assert wrong.stdout == "" and len(lines) == 7
    for line, said in zip(
        lines,
        (
            f"error: --port {port}: port {port}, for shard 0: it is in use; `ss -ltnp` says",
            "error: --http 192.0.2.1:0: cannot listen there: Cannot assign requested address",
            f"error: --auth {tmp_path}/auth.toml: ",
            "error: --unix-users nobody9: there is no user 'nobody9' on this host",
            f"error: --unix-socket {tmp_path}/none/kv.sock: {tmp_path}/none is not a folder: make it, or choose",
            "error: --memory 512TiB: with 256.0 MiB for each of 1 shard(s) the server takes up to",
            f"error: --disk {others}: {others} is not a disk tier of kvstore: it has no readable file FORMAT, but",
        ),
        strict=True,
    ):
        assert line.startswith(said), line
    assert [each.name for each in others.iterdir()] == ["thesis.txt"]


def test_a_check_finds_an_existing_disk_tier(start_server: StartServer, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    server = start_server("--disk", str(disk), "--disk-size", "64MiB")
    beside = ("--check-config", "--port", "0", "--memory", "64MiB", "--segment", "4MiB", "--disk", str(disk))
    assert run(*beside, "--disk-size", "64MiB").stdout == "the settings are valid\n"
    new = tmp_path / "no" / "disk"
    said = run(*beside, "--disk", str(new), "--disk-size", "64MiB").stdout
    assert said == f"the settings are valid; a start makes the folder {new} of --disk, below {tmp_path}\n"
    assert not new.parent.exists()
    wrong = run(*beside, "--disk-size", "900TiB", status=2)
    assert "error: --disk-size 900TiB: the file system of" in wrong.stderr
    wrong = run(*beside, "--shards", "2", status=2)
    assert "holds the blocks of 1 shards, and this server has 2" in wrong.stderr
    wrong = run("--check-config", "--port", str(server.port), status=2)
    assert f"port {server.port}, for shard 0: it is in use" in wrong.stderr


def test_printed_settings_work_as_a_settings_file(tmp_path: Path) -> None:
    file, again = tmp_path / "server.toml", tmp_path / "again.toml"
    file.write_text(run("--print-config", "--shards", "3", KVSTORE_SERVER_MEMORY="2Gi").stdout)
    assert "\nshards = 3  # source: --shards\n" in file.read_text()
    assert '\nmemory = "2GiB"  # source: KVSTORE_SERVER_MEMORY\n' in file.read_text()
    again.write_text(run("--print-config", "--config", str(file)).stdout)
    assert load(again, {}, {}) == load(file, {}, {})
    assert f"\nshards = 3  # source: {file}\n" in again.read_text()


def test_a_signal_delivered_to_another_thread_stops_the_server(start_server: StartServer) -> None:
    server = start_server("--http", "127.0.0.1:0")
    pid = server.process.pid
    [other, *_] = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, other, signal.SIGTERM) == 0, os.strerror(ctypes.get_errno())
    assert server.process.wait(20) == 0


def test_start_and_stop_are_logged_in_one_line_each(start_server: StartServer) -> None:
    server = start_server("--shards", "2", "--http", "127.0.0.1:0")
    (started,) = (line for line in server.log_text().splitlines() if " starts: " in line)
    assert f"kvstore-server {kvstore.__version__} starts: listening on 127.0.0.1:{server.port}, 127.0.0.1:" in started
    expected = f"settings: port={server.port} shards=2 http=127.0.0.1:0 unix_socket=off memory=64MiB segment=4MiB"
    assert started.endswith(expected)
    assert server.stop() == 0
    *_, stopping, stopped = server.log_text().splitlines()
    assert "SIGTERM: stopping" in stopping
    assert re.search(r"supervisor stopped after \d+\.\d s, exit status 0$", stopped)


def test_every_line_of_a_json_log_is_an_object(start_server: StartServer, tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    # With this variable the processes are not forks, so each has a command line of its own.
    server = start_server("--log-format", "json", "--log-level", "debug", *disk, PYTHONHASHSEED="0")
    shard = server.shards()[0]
    keeper = wait_until(lambda: next(iter(shard.children()), None), what="the shard has its keeper")
    settings = ["debug", "shard=0 keeper", "json"]
    wait_until(lambda: keeper.cmdline()[-3:] == settings, what="the keeper runs its program, as its shard logs")
    pid = shard.pid
    shard.send_signal(signal.SIGKILL)
    wait_until(lambda: "is serving again" in server.log_text(), what="another shard serves")
    psutil.wait_procs([keeper], 5)
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log_text().splitlines()]
    for line in lines:
        assert set(line) <= {"time", "level", "where", "message", "fields", "exception"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("debug", "info", "warning", "error")
    assert {"supervisor", "shard=0"} <= {line["where"] for line in lines}
    start, stop = lines[0], lines[-1]
    assert start["fields"]["version"] == kvstore.__version__ and start["fields"]["settings"]["memory"] == "64MiB"
    assert stop["fields"]["status"] == 0 and stop["fields"]["uptime_s"] > 0
    (died,) = (line for line in lines if " died: " in line["message"])
    assert (died["level"], died["fields"]["pid"], died["fields"]["status"]) == ("error", pid, -9)


def test_a_failed_start_is_logged_too(start_server: StartServer) -> None:
    server = start_server()
    taken = run("--port", str(server.port), "--log-format", "json", status=1)
    line = json.loads(taken.stderr.splitlines()[-1])
    assert line["level"] == "error" and "the port is in use" in line["message"]
