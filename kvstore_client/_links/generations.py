"""The generation of one client's namespace: what its links hear of it, and whom it tells.

A purge raises the namespace's generation on all shards of the store (docs/protocol.md). Whatever was made before is of
no use any more. Each shard says at which it is: in WELCOME, with RAISED, and when it refuses a SET. The highest counts.
A shard that is behind has missed a purge. It is told, and if it may not be raised by this client, its blocks are
misses: its link is broken until it has caught up.

A client that keeps copies of blocks has a thread that hears of a purge while it asks for nothing, and tells the shards
that its copies count no more.
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
KNOWS_GENERATIONS: Final = 4  # the oldest protocol version that has them
_LISTEN_BYTES: Final = 4096

log = logging.getLogger("kvstore_client")


class Link(Protocol):
    """What is used of a link here."""

    sock: Any
    generation: int
    knows_generations: bool
    notices: Notices

    @property
    def pending(self) -> Mapping[int, Any]: ...

    def receive(self, budget: int) -> None: ...


class Generations:
    """Thread-safe. known: the highest generation that was heard of. heard: some shard has answered, ever."""

    def __init__(self) -> None:
        self.known = 0
        self.heard = False
        self._told = 0  # to which the other links were told to come
        self._noted = 0
        self._warned = 0
        self.new_locks()

    def new_locks(self) -> None:
        """Forget who holds the locks: after a fork."""
        self._lock = threading.Lock()

    def greet(self, link: Link, welcome: wire.Welcome) -> None:
        """A shard has said at which it is. Raises `OSError` if it is behind, and stays there."""
        link.knows_generations = welcome.protocol >= KNOWS_GENERATIONS
        self.heard = True
        if link.knows_generations:
            self.hear(link, max(welcome.generation, link.generation))  # RAISED may have come with WELCOME

    def hear(self, link: Link, generation: int) -> None:
        """A shard is at this generation. Raises `OSError` if it stays behind."""
        link.generation = generation
        self.learn(generation)
        if generation < self.known:
            message = f"{link}: it lacks a purge of this namespace, so its blocks count as misses; purge again"
            if self._warned < self.known:
                self._warned = self.known
                log.warning("%s", message)
            raise ConnectionAbortedError(0, f"it lacks a purge of this namespace: purge again ({generation})")

    def learn(self, generation: int) -> None:
        """Some shard, or another store, is at this generation."""
        if generation > self.known:
            with self._lock:
                self.known = max(self.known, generation)

    @property
    def untold(self) -> bool:
        """Whether there is something for `tell`."""
        return self._told != self.known

    def tell(self, links: Sequence[Link]) -> None:
        """Tell shards that may be behind, on every connection, before anything else is asked there. Never blocks."""
        known = self._told = self.known
        for link in links:
            if link.sock is not None and link.knows_generations and link.generation < known:
                link.notices.post(wire.encode(wire.Raise(0, known)))

    def note(self, links: Sequence[Link]) -> None:
        """Tell all shards, on every connection, that copies of earlier generations count no more. Never blocks."""
        if self._noted == self.known:
            return
        known = self._noted = self.known
        for link in links:
            if link.sock is not None and link.knows_generations:
                link.notices.post(wire.encode(wire.Noted(0, known)))


class Listener:
    """The thread that hears of purges. A child process makes a new one."""

    def __init__(self, generations: Generations, links: Callable[[], Sequence[Link]]) -> None:
        """links: the present connections; a method, whose object is not kept alive: a client that nobody closed must
        not live for ever."""
        self._generations = generations
        self._links = weakref.WeakMethod(links)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="kvstore-listen", daemon=True).start()

    def stop(self) -> None:
        """End soon. Does not wait."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LISTEN_S):
            try:
                if not self._listen():
                    return
            except Exception:  # a defect must not leave the engine deaf
                log.exception("listening for purges failed; trying again")

    def _listen(self) -> bool:
        """-> whether the client is still there."""
        links_of = self._links()
        if links_of is None:
            return False
        links = links_of()
        for link in links:
            if link.sock is not None and not link.pending:  # else a caller reads
                link.receive(_LISTEN_BYTES)
        if self._generations.untold:
            self._generations.tell(links)
        self._generations.note(links)
        return True
