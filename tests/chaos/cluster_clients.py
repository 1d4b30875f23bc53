"""Clients under load (cluster_load.py) on hosts of a cluster, and the results of their calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from tests.chaos.cluster_load import Call, Check, Miss, Options, Ready, Summary, keys_of
from tests.support.cluster import CLIENTS, Site
from tests.support.harness import environment, wait_until

LOAD = Path(__file__).with_name("cluster_load.py")
READY_S = 60.0
CHECK_S = 60.0
END_S = 20.0

Excuse = Callable[[Call, Miss], bool]
_records = msgspec.json.Decoder(Call | Check | Ready | Summary)


class Client:
    """One process of the load. A thread records its output. `command`: the command that runs cluster_load.py."""

    def __init__(self, command: Sequence[str], log_file: Path, options: Options) -> None:
        self.calls: list[Call] = []
        self.checks: list[Check] = []
        self.ready: Ready | None = None
        self.summary: Summary | None = None
        self.log = log_file
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, msgspec.json.encode(options).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
            )
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record = _records.decode(line)
            if isinstance(record, Call):
                self.calls.append(record)
            elif isinstance(record, Check):
                self.checks.append(record)
            elif isinstance(record, Ready):
                self.ready = record
            else:
                self.summary = record

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, condition: Callable[[], object], deadline_s: float, what: str) -> None:
        """Wait until the condition holds; fail at once when the process has ended."""

        def holds() -> object:
            assert self.process.poll() is None, f"the client ended with {self.process.returncode}: {self.log_text()}"
            return condition()

        wait_until(holds, deadline_s, f"{what}: {self.log_text()}")

    def check(self) -> Check:
        """Make the client read every block that all replicas acknowledged to it, and return the result."""
        before = len(self.checks)
        self.tell("check")
        self.wait(lambda: len(self.checks) > before, CHECK_S, "the check")
        return self.checks[-1]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """End the process."""
        try:
            if self.process.poll() is None:
                self.tell("stop")
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._thread.join()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


class Clients:
    """All processes of the load, which run until the `with` block ends. The methods report on the calls made so far."""

    def __init__(self, site: Site, namespace: str, replicas: int, **options: object) -> None:
        self._clients: list[Client] = []
        try:
            for number, host in enumerate(CLIENTS):
                given = Options(site.cluster.url, namespace, number, len(CLIENTS), replicas, **options)  # type: ignore[arg-type]
                command = [*site.network.command(host), sys.executable, str(LOAD)]
                self._clients.append(Client(command, site.folder / f"{host}-{namespace}.log", given))
            for client in self._clients:
                client.wait(lambda client=client: client.ready, READY_S, "the first chains are set")
        except BaseException:
            self._end()
            raise
        for client in self._clients:
            client.tell("go")

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for client in self._clients:
            client.end()

    def run_for(self, seconds: float) -> None:
        """Let the load run for this time; no client may end."""
        end = time.monotonic() + seconds
        for client in self._clients:
            client.wait(lambda: time.monotonic() > end, seconds + 1, "time passes")

    def check(self) -> list[Check]:
        """Make each client read every block that all replicas acknowledged to it, and return the results."""
        before = [len(client.checks) for client in self._clients]
        for client in self._clients:
            client.tell("check")
        for client, count in zip(self._clients, before, strict=True):
            client.wait(lambda client=client, count=count: len(client.checks) > count, CHECK_S, "the check")
        return [client.checks[-1] for client in self._clients]

    def acknowledged(self) -> list[int]:
        """Return the chains that are completely stored so far, with all copies of all blocks."""
        return [call.acknowledged for call in self.calls() if call.acknowledged is not None]

    # ---- what the calls say ------------------------------------------------------------------------------------

    def calls(self) -> list[Call]:
        """Return all calls so far, in the order in which they began."""
        return sorted((call for client in self._clients for call in client.calls), key=lambda call: call.at)

    def wrong(self) -> int:
        """Return the number of blocks with a wrong byte."""
        return sum(call.wrong for call in self.calls()) + sum(
            check.wrong for client in self._clients for check in client.checks
        )

    def latest(self) -> Call:
        """Return the call that exceeded its deadline by the most."""
        return max(self.calls(), key=lambda call: call.late_s)

    def raised(self) -> set[str]:
        """Return the exceptions that calls raised. There should be none, because the clients fail open."""
        return {call.raised for call in self.calls() if call.raised}

    def troubles(self, since: float, until: float, excuse: Excuse) -> list[Call]:
        """Return the calls that began in this interval and failed: they did not store a block, or missed one without an
        excuse."""
        return [
            call
            for call in self.calls()
            if since <= call.at < until and (call.errors or any(not excuse(call, miss) for miss in call.missed))
        ]

    def hit_rates(self, since: float, until: float, window_s: float = 1.0) -> list[float]:
        """Return for each window the share of the requested blocks that was found."""
        rates = []
        calls = [call for call in self.calls() if call.op in ("get_into", "stream_get", "contains")]
        for start in np.arange(since, until - window_s + 1e-6, window_s):
            window = [call for call in calls if start <= call.at < start + window_s]
            if keys := sum(call.keys for call in window):
                rates.append(sum(call.hits for call in window) / keys)
        return rates


def key_array(misses: Iterable[Miss]) -> np.ndarray:
    """Return the keys, one per row."""
    return np.array([list(keys_of(miss.chain)[miss.position]) for miss in misses], dtype=np.uint8)
