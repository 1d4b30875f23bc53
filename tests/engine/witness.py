"""Writes into an engine's log what its processes are doing when a test fails, so that one run is enough to find the
cause.

Each process writes the Python stack of every thread, even if it hangs in a C function. The process with the engine's
core also writes its requests and the connector's records, if its main thread still executes Python. Each rank writes
what its loads wait for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

STACKS, REQUESTS = signal.SIGUSR1, signal.SIGUSR2
TELL_S = 2.0  # the time that the processes have for their reports
_schedulers: list[Any] = []  # of this process
_transfers: list[Any] = []


def listen() -> None:
    """Prepare this process and its later forks to report on request. Call it before there is an engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__

    def remember(scheduler: Any, *arguments: Any, **named: Any) -> None:
        _schedulers.append(scheduler)
        make(scheduler, *arguments, **named)

    Scheduler.__init__ = remember

    from kvstore_client.engine.transfer_in import TransferIn

    make_transfer = TransferIn.__init__

    def remember_transfer(transfer: Any, *arguments: Any, **named: Any) -> None:
        _transfers.append(transfer)
        make_transfer(transfer, *arguments, **named)

    TransferIn.__init__ = remember_transfer  # type: ignore[method-assign]
    faulthandler.register(STACKS, file=2)
    signal.signal(REQUESTS, lambda *_: _tell_requests())


def ask(pid: int, log: Path) -> str:
    """Make the engine of this process, the processes it started, and the calling process report. Returns their reports,
    after the end of the earlier log. All continue undisturbed."""
    before = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"\nthe test's own stacks:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        size = log.stat().st_size
        for number in (REQUESTS, STACKS, STACKS):  # twice, to show whether a thread hangs or loops
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    if _listens(each.pid, number):
                        each.send_signal(number)
            size = _until_told(log, size)
    with log.open("rb") as file:
        file.seek(max(0, before - 4000))
        return file.read().decode(errors="replace")


def _listens(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches this signal; a process that does not would be killed by it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _until_told(log: Path, size: int) -> int:
    """Wait until the log has grown beyond this size, and then is unchanged for a moment. Returns its size."""
    before, end = size, time.monotonic() + TELL_S
    while time.monotonic() < end:
        time.sleep(TELL_S / 16)
        size, last = log.stat().st_size, size
        if last == size > before:
            break
    return size


def _tell_requests() -> None:
    for tell, each in [*((_described, each) for each in _schedulers), *((_loads, each) for each in _transfers)]:
        try:
            told = tell(each)
        except Exception as error:  # the state may be changing at this moment
            told = f"process {os.getpid()}: its requests cannot be told: {error!r}\n"
        os.write(2, told.encode())


def _described(scheduler: Any) -> str:
    connector = scheduler.connector
    children = getattr(connector, "sub_connectors", [connector])
    halves = [half for each in children if (half := getattr(each, "_scheduler", None)) is not None]
    lines = [
        f"process {os.getpid()}: cache {scheduler.kv_cache_manager.usage:.0%} used, {len(scheduler.requests)} requests"
    ]
    for name, request in list(scheduler.requests.items()):
        lines.append(
            f"  {name}: {request.status.name}, {request.num_computed_tokens} of {request.num_tokens} tokens computed, "
            f"prompt {request.num_prompt_tokens}"
        )
    for half in halves:
        lines.append(f"  records: {half.under_way}")
        for records in (half.loads._waiting, half.loads._loading, half.saves._copying, half.saves._held):
            lines += [f"    {key}: {str(value)[:600]}" for key, value in list(records.items())]
    return "\n".join([*lines, ""])


def _loads(transfer: Any) -> str:
    lines = [f"process {os.getpid()}: {transfer.waiting} loads"]
    for job in list(transfer._jobs):
        task = job.task
        awaits = None if task is None else task.awaited
        lines.append(
            f"  {job.state}, {len(job.keys)} blocks, asked at {job.asked_at:.3f}, began at {job.began}, sent at "
            f"{job.sent_at}, blocks {job.first} to {job.end}, stopped {job.stopped}, awaits {str(awaits)[:400]}"
        )
    return "\n".join([*lines, ""])
