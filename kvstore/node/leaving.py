"""A node's drain. Either the supervisor begins the drain, or an operator requests it in etcd and sees its progress
there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.cluster.etcd import Drain, EtcdDirectory
from kvstore.cluster.members import DirectoryError
from kvstore.moving.draining import Draining

log = logging.getLogger("kvstore.cluster")

LEAVE_S: Final = 0.5  # time for clients to see that the node has left before its connections close
SAY_TRIES: Final = 20
SAY_AGAIN_S: Final = 0.5


class Leaving:
    """The drain of a node. A node has at most one drain in each run. Callers of `check` and `begin` must hold the same
    lock.

    `withdraw()`: the function that ends the node's membership. It returns whether the node was a member.
    `make`: the function that makes a `Draining` from `asked` and `leave`.
    """

    def __init__(
        self,
        node: str,
        directory: EtcdDirectory,
        withdraw: Callable[[], bool],
        make: Callable[..., Draining],
    ) -> None:
        self.draining: Draining | None = None
        self._node = node
        self._directory = directory
        self._withdraw = withdraw
        self._make = make
        self._asked = False  # an operator requested the drain, so its progress is written to etcd
        self._said: Drain | None = None
        self._stopped = threading.Event()

    def begin(self, asked: Drain) -> Draining:
        """Begin the drain unless it has begun already, and return it."""
        if self.draining is None:
            self.draining = self._make(asked=asked, leave=self._leave)
            self.draining.start()
        return self.draining

    def check(self, instance: str) -> None:
        """Begin a drain that an operator has requested of this instance, and write its progress. Raises
        `DirectoryError`."""
        if self.draining is not None:
            progress = self.draining.progress
            if self._asked and progress != self._said:
                self._directory.write_drain(self._node, progress)
                self._said = progress
            return
        asked = self._directory.read_drain(self._node)
        if asked is None:
            return
        if asked.instance != instance:
            self._directory.end_drain(self._node)  # the request was for an earlier run
        elif asked.state == "asked":
            log.info("node %s: an operator has requested a drain of at most %g s", self._node, asked.seconds)
            self._asked = True
            self.begin(asked)

    def stop(self, timeout_s: float) -> None:
        """End the drain, and wait until it has ended."""
        self._stopped.set()
        if self.draining is not None:
            self.draining.stop()
            self.draining.join(timeout_s)

    def _leave(self) -> None:
        assert self.draining is not None
        was_in = self._withdraw()
        if self._asked:
            self._say(msgspec.structs.replace(self.draining.progress, state="done"))
        if was_in:
            time.sleep(LEAVE_S)

    def _say(self, progress: Drain) -> None:
        for _ in range(SAY_TRIES):
            try:
                self._directory.write_drain(self._node, progress)
                return
            except DirectoryError as error:
                log.warning("node %s: has drained and left, but cannot write that to etcd: %s", self._node, error)
                if self._stopped.wait(SAY_AGAIN_S):
                    return
