"""Containers with a client: `client_program` with the image's Python and packages, next to a server's container."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from tests.containers import client_program
from tests.support.harness import ROOT, wait_until
from tests.support.podman import Container, Network

SOURCE: Final = Path("/source")  # the place of the tests in the container
LIBRARIES: Final = Path(psutil.__file__).parent  # which the tests import and the image lacks


class ClientContainer(Container):
    """A container that runs the program with one USE, for the keys from number `first` on."""

    def __init__(
        self,
        endpoint: str,
        use: str,
        count: int,
        *,
        first: int = 0,
        network: Network,
        volumes: Sequence[str] = (),
        user: str = "",
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(
            *("-m", client_program.__name__, endpoint, use, str(first), str(count)),
            entrypoint="python",
            network=network,
            environment={"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
            volumes=[f"{ROOT / 'tests'}:{SOURCE / 'tests'}:ro", f"{LIBRARIES}:{SOURCE / 'psutil'}:ro", *volumes],
            user=user,
            options=[f"--workdir={SOURCE}", *options],
        )

    def said(self) -> list[Any]:
        """Return the objects it has printed."""
        return [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]

    def logged(self) -> list[str]:
        """Return the lines that its client has logged."""
        return [line for line in self.logs().splitlines() if not line.startswith("{")]

    def first_said(self) -> Any:
        """Wait for the first object that the client prints."""

        def found() -> Any:
            said = self.said()
            assert said or self.running or self.said(), f"{self.name} has ended:\n{self.logs()}"
            return said

        return wait_until(found, what=f"{self.name} says something")[0]

    def result(self) -> Any:
        """Wait for the client's end. Returns the only object that it printed."""
        assert self.wait() == 0, self.logs()
        (found,) = self.said()
        return found


def use(endpoint: str, use: str, count: int, **given: Any) -> tuple[Any, list[str]]:
    """Run a client to its end. Returns its result and its log. `given`: as for `ClientContainer`."""
    with ClientContainer(endpoint, use, count, **given) as container:
        return container.result(), container.logged()
