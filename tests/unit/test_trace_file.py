"""Trace files always consist of whole lines, are bounded, and never delay a request. Also, what `kvstore trace` makes
of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_client.engine import span_export
from kvstore_client.engine.span_export import SpanFile, SpanSender, to_file
from kvstore_client.engine.spans import Moment, Span
from kvstore_client.engine.trace_context import TraceContext
from kvstore_client.engine.trace_file import read_trace
from kvstore_client.vllm.connector.held_back import HeldBack
from kvstore_client.vllm.connector.request_spans import RequestSpans
from tests.support import forked
from tests.support.harness import environment, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
NOW = 1_790_000_000.25


def part(row: str, name: str, began: float, ended: float) -> Span:
    return Span(name, "internal", row, {}, began, ended)


def one(number: int) -> list[Span]:
    return [part("P", "queue", number, number + 0.5)]


def send(sender: SpanSender, request_id: str, spans: Sequence[Span], trace: str = TRACE) -> None:
    sender.send(TraceContext(trace, PARENT, 1), request_id, spans, NOW)


class Written:
    """A file to which each request is written separately."""

    def __init__(self, path: Path, **options: int) -> None:
        self._processor = span_export.BatchSpanProcessor(SpanFile(path, **options))
        self._sender = SpanSender("tests", "here:1", [self._processor])

    def add(self, number: int) -> None:
        send(self._sender, f"r{number}", one(number))
        self._processor.force_flush()

    def close(self) -> None:
        self._sender.close()


def numbers(path: Path) -> list[int]:
    """Return the numbers of the requests in a file, and check that every line is whole."""
    data = path.read_bytes()
    assert not data or data.endswith(b"}\n")
    return [int(each.request_id[1:]) for each in read_trace(path)]


def test_a_request_is_in_the_file_soon_as_otlp_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sender = SpanSender("tests", "here:1", [to_file(path)])
    for number in range(3):
        send(sender, f"r{number}", one(number))
        wait_until(lambda: numbers(path) == list(range(number + 1)), what="it is there")  # noqa: B023
    root = Span(
        "POST", "server", "proxy", {"a": 2, "b": 0.5}, 3, 4, error="503", events=[Moment("retry", 3.5, {"c": "d"})]
    )
    send(sender, "r3", [root, Span("decode", "client", "proxy", {}, 3, 4, parent=root.id)])
    sender.close()
    [resource] = json.loads(path.read_bytes().splitlines()[-1])["resourceSpans"]
    known = {each["key"]: each["value"] for each in resource["resource"]["attributes"]}
    assert known["service.name"] == {"stringValue": "tests"}
    assert known["service.instance.id"] == {"stringValue": "here:1"}
    [scope] = resource["scopeSpans"]
    first, second = scope["spans"]
    attributes = {each["key"]: each["value"] for each in first.pop("attributes")}
    assert attributes == {
        "kvstore.row": {"stringValue": "proxy"},
        "kvstore.request_id": {"stringValue": "r3"},
        "a": {"intValue": "2"},
        "b": {"doubleValue": 0.5},
    }
    assert first == {
        "traceId": TRACE,
        "spanId": root.id,
        "parentSpanId": PARENT,
        "flags": first["flags"],
        "name": "POST",
        "kind": 2,
        "startTimeUnixNano": str(round((NOW + 3) * 1e9)),
        "endTimeUnixNano": str(round((NOW + 4) * 1e9)),
        "events": [
            {
                "timeUnixNano": str(round((NOW + 3.5) * 1e9)),
                "name": "retry",
                "attributes": [{"key": "c", "value": {"stringValue": "d"}}],
            }
        ],
        "status": {"message": "503", "code": 2},
    }
    assert second["parentSpanId"] == root.id


def test_a_trace_reads_back_as_written(tmp_path: Path) -> None:
    sender = SpanSender("tests", "here:1", [to_file(tmp_path / "p")])
    span = Span("load", "internal", "P", {"tokens": 7, "s": 0.25, "ok": True, "why": "x"}, 1, 2.5)
    span.events.append(Moment("first token", 2, {"n": 1}))
    send(sender, "r1", [span])
    sender.close()
    whole, moment = read_trace(tmp_path / "p")
    assert (whole.trace_id, whole.request_id, whole.writer, whole.row) == (TRACE, "r1", "here:1", "P")
    assert (whole.name, whole.began_us, whole.ended_us) == ("load", round((NOW + 1) * 1e6), round((NOW + 2.5) * 1e6))
    assert whole.args == {"tokens": 7, "s": 0.25, "ok": True, "why": "x"}
    assert (moment.name, moment.began_us, moment.ended_us) == ("first token", round((NOW + 2) * 1e6), None)
    assert (moment.row, moment.request_id, moment.args) == ("P", "r1", {"n": 1})


def test_a_full_file_becomes_the_older_one_within_bounds(tmp_path: Path) -> None:
    path, older = tmp_path / "trace.json", tmp_path / "trace.json.1"
    file = Written(path, most_bytes=10_000)
    for number in range(100):
        file.add(number)
    file.close()
    assert path.stat().st_size <= 10_000 and older.stat().st_size <= 10_000
    kept = numbers(older) + numbers(path)
    assert kept == list(range(kept[0], 100)) and len(kept) > 10 and kept[0] > 0


@pytest.mark.parametrize("before", ["", '[\n{"ph":"M"}\n]\n'])
def test_a_restart_keeps_the_earlier_file(tmp_path: Path, before: str) -> None:
    path = tmp_path / "trace.json"
    if before:  # of an earlier version
        path.write_text(before)
    else:
        first = Written(path)
        first.add(0)
        first.close()
    kept = path.read_bytes()
    file = Written(path)
    file.add(1)
    file.close()
    assert numbers(path) == [1] and (tmp_path / "trace.json.1").read_bytes() == kept


def test_an_unusable_trace_file_is_refused_at_start(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("my notes")
    with pytest.raises(ValueError, match="has content other than a trace"):
        SpanFile(other)
    assert other.read_text() == "my notes"
    with pytest.raises(OSError, match="no/such"):
        SpanFile(tmp_path / "no/such")
    with pytest.raises(ValueError, match="not an ordinary file"):
        SpanFile("/dev/null")
    file = SpanFile(tmp_path / "mine")
    with pytest.raises(ValueError, match="another process writes"):
        SpanFile(tmp_path / "mine")
    file.shutdown()
    SpanFile(tmp_path / "mine").shutdown()


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Make files end at 4000 bytes, in the middle of a write, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_leaves_whole_lines_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    file = Written(path)
    for number in range(50):
        file.add(number)
    file.close()
    kept = numbers(path)
    assert kept == list(range(len(kept))) and 0 < len(kept) < 50
    assert len([each for each in caplog.records if "cannot be written" in each.message]) == 1


def test_a_hanging_disk_delays_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go_on = os.pipe()

    def hang(file: int, data: memoryview, at: int) -> int:
        os.read(hangs, 1)
        return len(data)

    monkeypatch.setattr(os, "pwrite", hang)
    sender = SpanSender("tests", "here:1", [to_file(tmp_path / "trace.json")])
    for number in range(10_000):
        send(sender, f"r{number}", one(number))
    assert any("Queue full" in each.message for each in caplog.records)
    os.close(go_on)
    sender.close()
    os.close(hangs)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("kvstore_cli", "trace", *arguments, env=environment())


def test_files_of_several_writers_become_one_timeline(tmp_path: Path) -> None:
    other = "1" * 32
    parts = {
        "proxy": [(TRACE, "mine", "proxy:1", part("proxy", "POST", 0, 9))],
        "p": [(TRACE, "cmpl-mine-0", "p:1", part("P", "prefill", 1, 2))],
        "d": [
            (TRACE, "cmpl-mine-0", "d:1", part("D", "decode", 2, 3)),
            (other, "cmpl-other", "d:1", part("D", "decode", -5, 3)),
        ],
        "d2": [(TRACE, "cmpl-mine-0-1", "d:2", part("D", "decode", 4, 8))],
    }
    for name, requests in parts.items():
        sender = SpanSender("tests", requests[0][2], [to_file(tmp_path / name)])
        for trace, request, _, span in requests:
            send(sender, request, [span], trace)
        sender.close()
    torn = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(torn + torn[:60])  # as if its writer had been killed
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


def test_wrong_arguments_are_reported(tmp_path: Path) -> None:
    file = Written(tmp_path / "p")
    file.add(1)
    file.close()
    out = str(tmp_path / "out")
    notes = tmp_path / "notes"
    notes.write_text('{"a": 1}]\n')
    old = tmp_path / "old"
    old.write_text('[\n{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"request r1"}}\n]\n')
    for arguments, status, says in [
        ([str(tmp_path / "p"), "-o", out, "--request", "r2"], 1, "no request r2"),
        ([str(tmp_path / "p"), "-o", out, "--request", "r1", "--trace", TRACE], 2, "expected only one of them"),
        ([str(tmp_path / "missing"), "-o", out], 1, "No such file"),
        ([str(notes), "-o", out], 1, "is not a file that --trace-file"),
        ([str(old), "-o", out], 1, "which earlier versions wrote: open it in https://ui.perfetto.dev"),
        ([str(tmp_path / "p"), "-o", "/no/such/out"], 1, "expected a file that can be written"),
    ]:
        done = run(*arguments)
        assert done.returncode == status and says in " ".join(done.stderr.split()), done.stderr


def test_overlapping_times_get_rows_of_their_own(tmp_path: Path) -> None:
    a = part("P", "a", 0, 4)
    a.events.append(Moment("moment", 3.5))
    others = [
        part("P", "inside a", 1, 2),
        part("P", "beyond a", 3, 5),
        part("P", "after a", 4, 6),
        part("D", "d", 0, 9),
    ]
    sender = SpanSender("tests", "here:1", [to_file(tmp_path / "p")])
    send(sender, "r", [a, *others])
    sender.close()
    out = tmp_path / "out.json"
    assert run(str(tmp_path / "p"), "-o", str(out)).returncode == 0
    events = json.loads(out.read_bytes())["traceEvents"]
    shown = {each["name"]: each["tid"] for each in events if each["ph"] != "M"}
    assert shown == {"a": 1, "inside a": 1, "after a": 1, "moment": 1, "beyond a": 2, "d": 3}
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert rows == {1: "P (here:1)", 2: "P (here:1)", 3: "D (here:1)"}
    [moment] = [each for each in events if each["ph"] == "i"]
    assert moment == {
        **{"ph": "i", "s": "t", "name": "moment", "pid": 1, "tid": 1, "cat": "kvstore"},
        "ts": round((NOW + 3.5) * 1e6),
        "args": {"trace_id": TRACE, "request_id": "r", "writer": "here:1"},
    }


# ---- the connector's spans ----------------------------------------------------------------------------------------


def request(name: str, **headers: str) -> Any:
    arrived = time.time() - 0.5
    return SimpleNamespace(
        request_id=name, trace_headers=headers, arrival_time=arrived, num_prompt_tokens=40, num_output_tokens=8
    )


def test_an_engine_writes_its_requests_parts(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    spans = RequestSpans(path, "http://gpu-1:8001")
    for name, flags in (("r1", "01"), ("unwanted", "00")):
        spans.added(request(name, traceparent=f"00-{TRACE}-{PARENT}-{flags}"), "", prefills=False)
        spans.held_back(name, HeldBack(0.1, 0.4, 0.2))
        spans.allocated(name, 32)
        spans.loaded(name, 2, 0)
        spans.finished(name, 0.0, sending=False)
    spans.close()
    parts = read_trace(path)
    assert [(each.row, each.name) for each in parts] == [
        ("D", "queue"),
        ("D", "load"),
        ("store, to D", "get"),
        ("D", "decode"),
    ]
    assert {(each.trace_id, each.request_id, each.writer) for each in parts} == {(TRACE, "r1", "gpu-1:8001")}
    queue, load, _, decode = parts
    assert queue.args == {"asked_s": 0.1, "computing_s": 0.2, "held_back_s": 0.3}
    assert load.args == {"tokens": 32, "blocks": 2, "failed_blocks": 0}
    assert decode.args == {"prompt_tokens": 40, "output_tokens": 8}
    assert queue.ended_us == load.began_us and queue.ended_us - queue.began_us >= 490_000
    assert abs(time.time() - (decode.ended_us or 0) / 1e6) < 30
    ids = [
        span["parentSpanId"]
        for line in path.read_bytes().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for span in resource["scopeSpans"][0]["spans"]
    ]
    assert ids == [PARENT] * 4


def test_an_engine_without_the_sdk_names_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore_client.engine.span_export", None)
    with pytest.raises(
        ValueError, match=r'trace_file needs the OpenTelemetry SDK .* pip install "llm-kvstore\[tracing\]"'
    ):
        RequestSpans(tmp_path / "d.json")
    assert not list(tmp_path.iterdir())
