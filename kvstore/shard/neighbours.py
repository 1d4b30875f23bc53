"""Messages between the shards of a node about where chains are cut (`kvstore/store/chains.py`).

Each shard reads from a pipe of its own, to which the other shards write. The supervisor makes the pipes and keeps them
open, so they outlive a shard. No shard waits for a pipe. A message that does not fit is dropped, and the only effect is
that useless blocks stay in memory.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from typing import Final

from kvstore.shard.setup import ShardConfig
from kvstore.store.chains import Cut
from kvstore.store.namespaces import ShardStore

_CUT: Final = struct.Struct("<16sQI")  # namespace id, call, offset
_PIPE_PIECE: Final = select.PIPE_BUF // _CUT.size * _CUT.size  # a write of at most this size is never split
_PIPE_READ_BYTES: Final = 16 * _PIPE_PIECE  # the most bytes read in one turn
CUTTING_S: Final = 0.002  # the most time spent on cuts in one turn


class Neighbours:
    """The other shards of the node."""

    def __init__(self, config: ShardConfig, store: ShardStore) -> None:
        self.fd = config.heard_fd
        self._told = config.told_fds
        self._store = store

    def tell(self) -> None:
        """Send to the other shards the cuts that were made here since the last call."""
        cuts = self._store.chains.cuts
        if not cuts:
            return
        data = b"".join(_CUT.pack(namespace, call, offset) for (namespace, call), offset in cuts.items())
        cuts.clear()
        for fd in self._told:
            for at in range(0, len(data), _PIPE_PIECE):
                try:
                    os.write(fd, data[at : at + _PIPE_PIECE])
                except BlockingIOError:  # the other shard has not read for a long time
                    break

    def hear(self) -> None:
        """Receive the cuts of the other shards. Call it when `fd` is readable."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _PIPE_READ_BYTES)
            self._store.chains.heard.extend(Cut(*fields) for fields in _CUT.iter_unpack(data))

    @property
    def pending(self) -> bool:
        """True if there are cuts to carry out, so that the loop must not sleep."""
        return bool(self._store.chains.heard)

    def cut(self, now: float) -> None:
        """Carry out the cuts that the other shards have sent, for at most `CUTTING_S`."""
        heard = self._store.chains.heard
        if not heard:
            return
        namespaces = {namespace.id: namespace for namespace in self._store}
        until = time.monotonic() + CUTTING_S
        while heard:
            cut = heard.popleft()
            namespace = namespaces.get(cut.namespace)
            if namespace is not None and not self._store.chains.cut(namespace, cut, now):
                heard.appendleft(cut)
            if time.monotonic() > until:
                break
