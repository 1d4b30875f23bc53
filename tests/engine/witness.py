"""What the processes of an engine are doing, told into its log when a test fails: one run is enough to find the cause.

Of each process: the Python stack of every thread, also when the process hangs in a call of C; and, if its main thread
still runs Python, of the one that has the engine's core each of its requests and the connector's records, and of each
rank what its loads wait for.
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
TELL_S = 2.0  # how long the processes have for it
_schedulers: list[Any] = []  # of this process
_transfers: list[Any] = []


def listen() -> None:
    """This process and those that are forked from it tell when asked. To be called before there is an engine."""
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
    """Have the engine of this process and the processes it started tell all, and the calling process. -> what they say,
    and the end of what was in the log before. All go on as if nothing were."""
    before = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"\nthe test's own stacks:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        size = log.stat().st_size
        for number in (REQUESTS, STACKS, STACKS):  # twice: does it stand still, or does it go round and round?
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    if _listens(each.pid, number):
                        each.send_signal(number)
            size = _until_told(log, size)
    with log.open("rb") as file:
        file.seek(max(0, before - 4000))
        return file.read().decode(errors="replace")


def _listens(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches this signal; another one would die of it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _until_told(log: Path, size: int) -> int:
    """Wait until something was added to a log of this size, and then nothing for a moment. -> its size."""
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
        except Exception as error:  # it is in the middle of a change
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
