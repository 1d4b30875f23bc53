"""Files for trace viewers: whole JSON at any time, bounded, and never in the way of a request."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client.engine.trace_file import LANES, ROWS, Slice, TraceFile, trace_events
from tests.support import forked
from tests.support.harness import environment, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
NOW = 1_790_000_000.25


def one(number: int, trace: str = TRACE) -> list[dict[str, Any]]:
    return trace_events(trace, f"r{number}", "here:1", [Slice("P", "queue", NOW + number, NOW + number + 0.5)])


def numbers(path: Path) -> list[int]:
    """Of the requests in a file."""
    events = json.loads(path.read_bytes())
    return [int(each["args"]["request_id"][1:]) for each in events if each["ph"] == "X"]


def test_a_file_is_whole_after_each_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)

    def last() -> list[int]:
        try:
            return numbers(path)[-1:]
        except json.JSONDecodeError:  # it is being written
            return []

    for number in range(20):
        file.write(one(number))
        wait_until(lambda: last() == [number], 5, "it is there and whole")  # noqa: B023
    file.close()
    assert numbers(path) == list(range(20))
    [event] = [each for each in json.loads(path.read_bytes()) if each["ph"] == "X"][:1]
    assert (event["ts"], event["dur"]) == (round(NOW * 1e6), 500_000)


def test_a_full_file_becomes_the_older_one_and_both_are_bounded(tmp_path: Path) -> None:
    path, older = tmp_path / "trace.json", tmp_path / "trace.json.1"
    file = TraceFile(path, most_bytes=10_000)
    for number in range(200):
        file.write(one(number))
    file.close()
    assert path.stat().st_size <= 10_000 + 8 and older.stat().st_size <= 10_000 + 8
    kept = numbers(older) + numbers(path)
    assert kept == list(range(kept[0], 200)) and len(kept) > 10 and kept[0] > 0


def test_a_new_start_keeps_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for number in range(2):
        file = TraceFile(path)
        file.write(one(number))
        file.close()
    assert (numbers(path), numbers(tmp_path / "trace.json.1")) == ([1], [0])


def test_what_cannot_be_a_trace_file_is_refused_at_the_start(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("my notes")
    with pytest.raises(ValueError, match="holds something else"):
        TraceFile(other)
    assert other.read_text() == "my notes"
    with pytest.raises(OSError, match="no/such"):
        TraceFile(tmp_path / "no/such")
    with pytest.raises(ValueError, match="no ordinary file"):
        TraceFile("/dev/null")
    file = TraceFile(tmp_path / "mine")
    with pytest.raises(ValueError, match="another process writes"):
        TraceFile(tmp_path / "mine")
    file.close()
    TraceFile(tmp_path / "mine").close()


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files end at 4000 bytes, in the middle of a write: as on a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_leaves_a_whole_file_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    for number in range(50):
        file.write(one(number))
    file.close()
    kept = numbers(path)
    assert kept == list(range(len(kept))) and 0 < len(kept) < 50
    assert len([each for each in caplog.records if "cannot be written" in each.message]) == 1


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "trace.json")
    hangs, go_on = os.pipe()

    def hang(data: bytes) -> None:
        os.read(hangs, 1)

    file._append = hang  # type: ignore[method-assign]
    for number in range(3000):
        file.write(one(number))
    assert any("wait for the disk" in each.message for each in caplog.records)
    os.close(go_on)
    file.close()
    os.close(hangs)


def test_times_that_overlap_in_part_are_on_rows_of_their_own() -> None:
    slices = [
        Slice("P", "a", NOW, NOW + 4),
        Slice("P", "inside a", NOW + 1, NOW + 2),
        Slice("P", "beyond a", NOW + 3, NOW + 5),
        Slice("P", "after a", NOW + 4, NOW + 6),
        Slice("P", "moment", NOW + 3.5, None),
        Slice("D", "d", NOW, NOW + 9),
    ]
    events = {each["name"]: each for each in trace_events(TRACE, "r", "here", slices) if each["ph"] != "M"}
    lanes = {name: divmod(each["tid"] - 1, LANES) for name, each in events.items()}
    p = ROWS.index("P")
    assert lanes == {
        **dict.fromkeys(("a", "inside a", "after a", "moment"), (p, 0)),
        "beyond a": (p, 1),
        "d": (ROWS.index("D"), 0),
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("kvstore_cli", "trace", *arguments, env=environment())


def test_files_of_several_writers_become_one_timeline(tmp_path: Path) -> None:
    other = "1" * 32
    parts = {
        "proxy": [(TRACE, "mine", "proxy:1", Slice("proxy", "POST", NOW, NOW + 9))],
        "p": [(TRACE, "cmpl-mine-0", "p:1", Slice("P", "prefill", NOW + 1, NOW + 2))],
        "d": [
            (TRACE, "cmpl-mine-0", "d:1", Slice("D", "decode", NOW + 2, NOW + 3)),
            (other, "cmpl-other", "d:1", Slice("D", "decode", NOW - 5, NOW + 3)),
        ],
        "d2": [(TRACE, "cmpl-mine-0-1", "d:2", Slice("D", "decode", NOW + 4, NOW + 8))],
    }
    for name, requests in parts.items():
        file = TraceFile(tmp_path / name)
        for trace, request, writer, part in requests:
            file.write(trace_events(trace, request, writer, [part]))
        file.close()
    torn = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(torn[:-3] + b",\n" + torn[2:60])  # as if its writer was killed
    files = [str(tmp_path / name) for name in parts]
    out = tmp_path / "out.json"
    done = run(*files, "-o", str(out), "--request", "mine", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 1
    events = json.loads(out.read_bytes())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    shown = [(each["pid"], rows[each["tid"]], each["name"]) for each in events if each["ph"] == "X"]
    assert shown == [
        (1, "proxy", "POST"),
        (1, "P (p:1)", "prefill"),
        (1, "D (d:1)", "decode"),
        (1, "D (d:2)", "decode"),
    ]
    assert [rows[tid] for tid in sorted(rows)] == ["proxy", "P (p:1)", "D (d:1)", "D (d:2)"]
    [title] = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert title == f"request mine, trace {TRACE}"
    assert run(*files, "-o", str(out)).returncode == 0
    titles = [each for each in json.loads(out.read_bytes())["traceEvents"] if each["name"] == "process_name"]
    assert len(titles) == 2


def test_what_is_asked_for_wrongly_is_said(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "p")
    file.write(one(1))
    file.close()
    out = str(tmp_path / "out")
    notes = tmp_path / "notes"
    notes.write_text('{"a": 1}]\n')
    for arguments, status, says in [
        ([str(tmp_path / "p"), "-o", out, "--request", "r2"], 1, "no request r2"),
        ([str(tmp_path / "p"), "-o", out, "--request", "r1", "--trace", TRACE], 2, "expected one of them"),
        ([str(tmp_path / "missing"), "-o", out], 1, "No such file"),
        ([str(notes), "-o", out], 1, "is none that --trace-file"),
        ([str(tmp_path / "p"), "-o", "/no/such/out"], 1, "name a file that can be written"),
    ]:
        done = run(*arguments)
        assert done.returncode == status and says in " ".join(done.stderr.split()), done.stderr
