"""The generation of one client's namespace: the client learns it from some shards and passes it on to others.

A purge raises the namespace's generation on all shards of the store (docs/protocol.md). Blocks that were made before
the purge are of no use any more. Each shard reports its generation: in WELCOME, with RAISED, and when it refuses a SET.
The highest generation counts. A shard that reports a lower one has missed a purge, so the client sends it the higher
one. If this client may not raise a generation, the shard's blocks are misses: the link to the shard counts as broken
until the shard has caught up.

A client that keeps copies of blocks has a thread. This thread learns of a purge even while no call is in progress, and
informs the shards that the client's copies no longer count.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from kvstore import wire
from kvstore_client._links.notices import Notices

LISTEN_S: Final = 0.1
KNOWS_GENERATIONS: Final = 4  # the oldest protocol version with generations
_LISTEN_BYTES: Final = 4096

log = logging.getLogger("kvstore_client")


class GenerationLink(Protocol):
    """The part of a link that this module uses."""

    sock: Any
    generation: int
    knows_generations: bool
    notices: Notices

    @property
    def pending(self) -> Mapping[int, Any]: ...

    def receive(self, budget: int) -> None: ...


class KnownGenerations:
    """What a client knows about the generation of its namespace. Thread-safe.

    * `known`: The highest generation that any shard has reported.
    * `heard`: Whether any shard has ever answered.
    """

    def __init__(self) -> None:
        self.known = 0
        self.heard = False
        self._told = 0  # the generation that was last sent to other shards
        self._noted = 0
        self._warned = 0
        self.new_locks()

    def new_locks(self) -> None:
        """Make a new lock after a fork, because a thread of the parent may hold the old one."""
        self._lock = threading.Lock()

    def greet(self, link: GenerationLink, welcome: wire.Welcome) -> None:
        """Note the generation in a shard's WELCOME. Raises `OSError` if it is lower than the known one."""
        link.knows_generations = welcome.protocol >= KNOWS_GENERATIONS
        self.heard = True
        if link.knows_generations:
            self.hear(link, max(welcome.generation, link.generation))  # RAISED may have come with WELCOME

    def hear(self, link: GenerationLink, generation: int) -> None:
        """Note that a shard is at this generation. Raises `OSError` if it is lower than the known one."""
        link.generation = generation
        self.learn(generation)
        if generation < self.known:
            message = f"{link}: it lacks a purge of this namespace, so its blocks count as misses; purge again"
            if self._warned < self.known:
                self._warned = self.known
                log.warning("%s", message)
            raise ConnectionAbortedError(0, f"it lacks a purge of this namespace: purge again ({generation})")

    def learn(self, generation: int) -> None:
        """Note that some shard, or another store, is at this generation."""
        if generation > self.known:
            with self._lock:
                self.known = max(self.known, generation)

    @property
    def untold(self) -> bool:
        """Whether there is a new generation for `tell` to send."""
        return self._told != self.known

    def tell(self, links: Sequence[GenerationLink]) -> None:
        """Send the generation to shards that may have a lower one, on every connection and before any other request.
        Never blocks."""
        known = self._told = self.known
        for link in links:
            if link.sock is not None and link.knows_generations and link.generation < known:
                link.notices.post(wire.encode(wire.Raise(0, known)))

    def note(self, links: Sequence[GenerationLink]) -> None:
        """Inform all shards, on every connection, that this client's copies of earlier generations no longer count.
        Never blocks."""
        if self._noted == self.known:
            return
        known = self._noted = self.known
        for link in links:
            if link.sock is not None and link.knows_generations:
                link.notices.post(wire.encode(wire.Noted(0, known)))


class Listener:
    """The thread that learns of purges. A child process makes a new one."""

    def __init__(self, generations: KnownGenerations, links: Callable[[], Sequence[GenerationLink]]) -> None:
        """`links`: a method that returns the present connections. The method's object is not kept alive, because a
        client that was never closed must not live for ever."""
        self._generations = generations
        self._links = weakref.WeakMethod(links)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="kvstore-listen", daemon=True).start()

    def stop(self) -> None:
        """Make the thread end soon. This does not wait for its end."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LISTEN_S):
            try:
                if not self._listen():
                    return
            except Exception:  # a defect must not stop an engine from learning of purges
                log.exception("listening for purges failed; trying again")

    def _listen(self) -> bool:
        """Check once for news of purges. Return whether the client still exists."""
        links_of = self._links()
        if links_of is None:
            return False
        links = links_of()
        for link in links:
            if link.sock is not None and not link.pending:  # otherwise a caller reads the link
                link.receive(_LISTEN_BYTES)
        if self._generations.untold:
            self._generations.tell(links)
        self._generations.note(links)
        return True
