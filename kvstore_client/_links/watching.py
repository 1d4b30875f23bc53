"""Watching a cluster: all clients of a process share one follower.

An engine has a client for each rank and purpose, but etcd should send each change to the process only once.
Thread-safe. A child process starts without followers, and its clients begin to watch anew (`LinkPool.after_fork`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from kvstore.cluster.following import Follower
from kvstore.cluster.members import Membership
from kvstore.tls import TLSOptions

log = logging.getLogger("kvstore_client")

OnChange = Callable[[Membership], None]


class Watch:
    """One client's watch of a cluster. Raises the errors of `Follower`.

    * `on_change`: A method that is called with each view: at once with the current one, if there is one, and with later
      ones on the follower's thread. The method's object is not kept alive.
    * `tls`: How to connect to nodes, if the nodes themselves are asked which of them are up.
    """

    def __init__(self, url: str, on_change: OnChange, tls: TLSOptions | None = None) -> None:
        self.url = url
        self._key = url, tls
        self._on_change = weakref.WeakMethod(on_change)  # because a client that was never closed must not live for ever
        self._closed = False
        with _lock:
            shared = _shared.get(self._key)
            if shared is None:
                shared = _shared[self._key] = _Shared(url, tls)
            shared.watches.add(self)
        self._shared = shared
        if shared.follower.current is not None:
            self.tell(shared.follower.current)

    def tell(self, membership: Membership) -> None:
        """Pass on a view. Two threads may call this at once, but no older view is passed on after a newer one."""
        with self._shared.telling:
            on_change = self._on_change()
            if on_change is not None and not self._closed and self._shared.follower.current is membership:
                on_change(membership)
        if on_change is None:
            self.close()

    def wait(self, timeout_s: float) -> Membership:
        """Return the current view. Raises `DirectoryError` if there is none within `timeout_s`."""
        return self._shared.follower.wait(timeout_s)

    @property
    def lost(self) -> str:
        """The reason why the directory does not answer; empty if it answers."""
        return self._shared.follower.lost

    def close(self) -> None:
        """Stop watching. When the last watch of a cluster stops, the follower is closed too."""
        with _lock:
            self._closed = True
            self._shared.watches.discard(self)
            last = not self._shared.watches and _shared.get(self._key) is self._shared
            if last:
                del _shared[self._key]
        if last:
            self._shared.follower.close()


class _Shared:
    """A follower and the watches that use it."""

    def __init__(self, url: str, tls: TLSOptions | None) -> None:
        self.watches: set[Watch] = set()
        self.telling = threading.RLock()
        self.follower = Follower(url, self._tell, name="kvstore_client", tls=tls)
        self.follower.start()

    def _tell(self, membership: Membership) -> None:
        with _lock:
            watches = list(self.watches)
        for watch in watches:
            try:
                watch.tell(membership)
            except Exception:  # a defect in one client must not hide the view from the others
                log.exception("a client could not use a new view of %s", watch.url)


_lock = threading.Lock()
_shared: dict[tuple[str, TLSOptions | None], _Shared] = {}


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
