"""`kvstore trace`: the trace files of a proxy and its engines, put together into one file for a trace viewer.

A process of the viewer is a request, and its rows are who worked on it. Times are those of each host's clock: hosts
whose clocks differ show requests that begin before they were sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from kvstore_cli.options import JsonOption
from kvstore_cli.output import fail, show
from kvstore_client.engine.trace_file import row_name


class Event(msgspec.Struct, omit_defaults=True):
    """As `kvstore_client.engine.trace_file` writes them. ph: what it is; ts, dur: in microseconds."""

    ph: Literal["M", "X", "i"]
    name: str
    pid: int
    tid: int
    args: dict[str, Any]
    cat: str = ""
    ts: int = 0
    dur: int | None = None
    s: str = ""

    @property
    def trace_id(self) -> str:
        """Empty: this event is about names."""
        return str(self.args["trace_id"]) if self.ph != "M" else ""

    @property
    def row(self) -> tuple[str, int, str]:
        return self.trace_id, self.tid, str(self.args["writer"])


_EVENTS: Final = msgspec.json.Decoder(list[Event])


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Of the proxy and of engines.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    request: Annotated[str, typer.Option(metavar="ID", help="Only the request with this x-request-id.")] = "",
    trace_id: Annotated[str, typer.Option("--trace", metavar="ID", help="Only this trace.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Put trace files together: open the result in https://ui.perfetto.dev or chrome://tracing.

    A FILE that was begun again is read with its FILE.1.
    """
    if request and trace_id:
        fail("usage", "--request and --trace were given; expected one of them")
    events = [event for file in files for event in _read(file)]
    wanted = {
        each.trace_id
        for each in events
        if (not request or each.args["request_id"] == request) and (not trace_id or each.trace_id == trace_id)
    }
    if not wanted:
        what = f"request {request}" if request else f"trace {trace_id}" if trace_id else "request"
        fail("failed", f"no {what} in {', '.join(map(str, files))}; name the files of the proxy and engines it went to")
    merged = _merged([each for each in events if each.trace_id in wanted])
    document = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": merged})
    try:
        output.write_bytes(document)
    except OSError as error:
        fail("failed", f"{error}; name a file that can be written")
    result = {"output": str(output), "requests": len(wanted), "events": len(merged)}
    show(result, as_json, lambda: print(f"{len(wanted)} request(s) in {output}: open it in https://ui.perfetto.dev"))


def _read(file: Path) -> list[Event]:
    """-> what happened, of FILE.1, if there is one, and FILE."""
    older = file.with_name(f"{file.name}.1")
    events: list[Event] = []
    for each in (older, file) if older.exists() else (file,):
        try:
            found = _EVENTS.decode(_mended(each.read_bytes()))
            events += [event for event in found if event.ph != "M" and event.row and row_name(*event.row[1:])]
        except OSError as error:
            fail("failed", f"{error}; name files that --trace-file or trace_file has written")
        except (msgspec.DecodeError, KeyError, IndexError) as error:
            fail("failed", f"{each} is none that --trace-file or trace_file has written: {error!r}")
    return events


def _mended(data: bytes) -> bytes:
    """A file is torn if its writer was killed in the middle, or writes now: what is whole lines counts."""
    if data.endswith(b"]\n"):
        return data
    whole, _, _ = data.rpartition(b"},\n")
    return whole + b"}]" if whole else b"[]"


def _merged(events: list[Event]) -> list[Event]:
    """-> these events, numbered anew: a process for each trace, in the order in which they began; in it, a row for each
    row of each writer."""
    events = sorted(events, key=lambda each: each.ts)
    processes: dict[str, int] = {}
    titles: dict[str, str] = {}  # the proxy's, if it is there: engines call a request otherwise
    for each in events:
        processes.setdefault(each.trace_id, len(processes) + 1)
        if row_name(*each.row[1:]) == "proxy" or each.trace_id not in titles:
            titles[each.trace_id] = f"request {each.args['request_id']}, trace {each.trace_id}"
    rows = sorted({each.row for each in events}, key=lambda row: (processes[row[0]], *row[1:]))
    numbers = {row: number for number, row in enumerate(rows, start=1)}
    merged = [Event("M", "process_name", pid, 0, {"name": titles[trace_id]}) for trace_id, pid in processes.items()]
    for row, tid in numbers.items():
        pid = processes[row[0]]
        merged.append(Event("M", "thread_name", pid, tid, {"name": row_name(*row[1:])}))
        merged.append(Event("M", "thread_sort_index", pid, tid, {"sort_index": tid}))
    return merged + [
        msgspec.structs.replace(each, pid=processes[each.trace_id], tid=numbers[each.row]) for each in events
    ]
