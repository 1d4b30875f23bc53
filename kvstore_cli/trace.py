"""`kvstore trace`: merges the trace files of a proxy and its engines into one file for a trace viewer.

In the viewer, each request is a process, and its rows are the programs that worked on it. Times come from the clock of
each host. If the clocks differ, requests may seem to begin before they were sent. The format is Chrome's trace event
format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer

from kvstore_cli.options import JsonOption
from kvstore_cli.output import fail, show
from kvstore_client.engine.trace_file import Slice, read_trace

# The rows from top to bottom. A client is above the server that it sends requests to.
_ROWS: Final = ("proxy", "proxy to P", "proxy to D", "P", "store, from P", "store, to D", "D")
_Key: TypeAlias = tuple[int, int, int, str]  # a row's process, index in `_ROWS`, lane, writer


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trace files of the proxy and of engines.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    request: Annotated[str, typer.Option(metavar="ID", help="Only the request with this x-request-id.")] = "",
    trace_id: Annotated[str, typer.Option("--trace", metavar="ID", help="Only this trace.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Merge trace files into one, to be opened in https://ui.perfetto.dev or chrome://tracing.

    If FILE.1, which is older, exists, it is read as well.
    """
    if request and trace_id:
        fail("usage", "--request and --trace were given; expected only one of them")
    slices = [each for file in files for each in _read(file)]
    wanted = {
        each.trace_id
        for each in slices
        if (not request or each.request_id == request) and (not trace_id or each.trace_id == trace_id)
    }
    if not wanted:
        what = f"request {request}" if request else f"trace {trace_id}" if trace_id else "request"
        fail("failed", f"no {what} in {', '.join(map(str, files))}; give the files of its proxy and engines")
    merged = _merged([each for each in slices if each.trace_id in wanted])
    document = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": merged})
    try:
        output.write_bytes(document)
    except OSError as error:
        fail("failed", f"{error}; expected a file that can be written")
    result = {"output": str(output), "requests": len(wanted), "events": len(merged)}
    show(result, as_json, lambda: print(f"{len(wanted)} request(s) in {output}: open it in https://ui.perfetto.dev"))


def _read(file: Path) -> list[Slice]:
    """Return the slices of FILE.1 (if it exists) and of FILE."""
    older = file.with_name(f"{file.name}.1")
    slices: list[Slice] = []
    for each in (older, file) if older.exists() else (file,):
        try:
            slices += read_trace(each)
        except OSError as error:
            fail("failed", f"{error}; expected files that --trace-file or trace_file has written")
        except ValueError as error:
            fail("failed", str(error))
    if unknown := {each.row for each in slices}.difference(_ROWS):
        fail("failed", f"{file} has rows that no proxy or engine writes: {', '.join(sorted(unknown))}")
    return slices


def _merged(slices: list[Slice]) -> list[dict[str, Any]]:
    """Return the merged events. Each trace is a process, and processes are in the order in which traces began. A
    process has a row for each row of each writer."""
    slices = sorted(slices, key=lambda each: (each.began_us, -(each.ended_us or each.began_us)))
    processes: dict[str, int] = {}
    titles: dict[str, str] = {}  # the proxy's title is preferred: engines use another id for a request
    for each in slices:
        processes.setdefault(each.trace_id, len(processes) + 1)
        if each.row == "proxy" or each.trace_id not in titles:
            titles[each.trace_id] = f"request {each.request_id}, trace {each.trace_id}"
    placed = list(_placed(slices, processes))
    numbers = {key: tid for tid, key in enumerate(sorted({key for _, key in placed}), start=1)}
    events = [_named("process_name", pid, 0, {"name": titles[trace_id]}) for trace_id, pid in processes.items()]
    for (pid, row, _, writer), tid in numbers.items():
        name = _ROWS[row] if _ROWS[row].startswith("proxy") else f"{_ROWS[row]} ({writer})"
        events.append(_named("thread_name", pid, tid, {"name": name}))
        events.append(_named("thread_sort_index", pid, tid, {"sort_index": tid}))
    return events + [_event(each, key[0], numbers[key]) for each, key in placed]


def _placed(slices: list[Slice], processes: Mapping[str, int]) -> Iterator[tuple[Slice, _Key]]:
    """Yield each slice with its row. Viewers show a row correctly only if one of any two overlapping slices contains
    the other. So a row gets as many lanes as needed. `slices`: in the order in which they began; of slices that began
    together, the longer ones come first."""
    open_until: dict[_Key, list[int]] = {}
    for each in slices:
        for lane in count():
            key = processes[each.trace_id], _ROWS.index(each.row), lane, each.writer
            ends = open_until.setdefault(key, [])
            while ends and ends[-1] <= each.began_us:
                ends.pop()
            if each.ended_us is None:
                break
            if not ends or each.ended_us <= ends[-1]:
                ends.append(each.ended_us)
                break
        yield each, key


def _event(part: Slice, pid: int, tid: int) -> dict[str, Any]:
    ids = {"trace_id": part.trace_id, "request_id": part.request_id, "writer": part.writer}
    args = {**part.args, **ids}
    event = {"name": part.name, "pid": pid, "tid": tid, "args": args, "cat": "kvstore", "ts": part.began_us}
    if part.ended_us is None:
        return {"ph": "i", "s": "t", **event}
    return {"ph": "X", "dur": max(0, part.ended_us - part.began_us), **event}


def _named(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
