"""A client under load in a container of its own: tests/chaos/cluster_load.py with the image's Python and client."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final

from tests.chaos.cluster_clients import LOAD, READY_S, Client
from tests.chaos.cluster_load import Check, Options
from tests.containers.clients import LIBRARIES, SOURCE
from tests.support.harness import ROOT
from tests.support.podman import SERVER, Container

COPIES: Final = 2
TIMEOUT_S: Final = 10.0  # for a call
BLOCK_BYTES: Final = 16 << 10


class Load:
    """The load runs while the `with` block runs. At the end it checks that no byte was wrong and no call raised an
    exception.

    Missed blocks are not set again, because that would hide a loss.
    """

    def __init__(self, endpoint: str, network: str, folder: Path, namespace: str) -> None:
        self._container = Container.named("kvstore-load")
        command = [
            *("podman", "--log-level=fatal", "run", "--rm", "--interactive", "--no-healthcheck"),
            *(f"--name={self._container.name}", f"--network={network}", "--read-only", "--cap-drop=ALL"),
            f"--volume={ROOT / 'tests'}:{SOURCE / 'tests'}:ro",
            f"--volume={LIBRARIES}:{SOURCE / 'psutil'}:ro",
            *("--env=PYTHONDONTWRITEBYTECODE=1", f"--env=PYTHONPATH={SOURCE}"),
            *("--entrypoint=python", SERVER, str(SOURCE / LOAD.relative_to(ROOT))),
        ]
        options = Options(endpoint, namespace, 0, 1, COPIES, TIMEOUT_S, BLOCK_BYTES, recompute=False)
        self.client = Client(command, folder / f"{namespace}.log", options)

    def __enter__(self) -> Load:
        try:
            self.client.wait(lambda: self.client.ready, READY_S, "the first chains are set")
        except BaseException:
            self._end()
            raise
        self.client.tell("go")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        if error is None:
            calls = self.client.calls
            print(f"{len(calls)} calls, {sum(call.errors for call in calls)} blocks not stored")
            assert not sum(call.wrong for call in calls) and not {call.raised for call in calls if call.raised}

    def _end(self) -> None:
        try:
            self.client.end()
        finally:
            self._container.remove()

    def acknowledged(self) -> int:
        """Return the number of chains whose blocks were all acknowledged with both copies so far."""
        return sum(call.acknowledged is not None for call in self.client.calls)

    def wait_acknowledged(self, more: int, deadline_s: float = 60.0) -> None:
        """Let the load run until this many more chains are acknowledged."""
        wanted = self.acknowledged() + more
        self.client.wait(lambda: self.acknowledged() >= wanted, deadline_s, f"{more} more chains are acknowledged")

    def assert_all_there(self) -> Check:
        """Check that every acknowledged block can be read, with the right bytes."""
        check = self.client.check()
        assert check.acknowledged and not check.missing, f"{len(check.missing)} of {check.acknowledged} are lost"
        assert not check.wrong
        return check
