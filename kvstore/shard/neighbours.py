"""What the shards of a node tell each other: where chains are cut (`kvstore/store/chains.py`).

Each shard has a pipe from which it reads; the others write to it. The supervisor makes the pipes and keeps them open,
so they outlive a shard. Nobody waits: what does not fit a pipe is dropped, and leaves useless blocks
where they are.

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
from kvstore.store.namespaces import Store

_CUT: Final = struct.Struct("<16sQI")  # namespace id, call, offset
_PIECE: Final = select.PIPE_BUF // _CUT.size * _CUT.size  # a write of so much is not torn apart
_READ_BYTES: Final = 16 * _PIECE  # in one turn
CUTTING_S: Final = 0.002  # of a turn


class Neighbours:
    """The other shards of the node."""

    def __init__(self, config: ShardConfig, store: Store) -> None:
        self.fd = config.heard_fd
        self._told = config.told_fds
        self._store = store

    def tell(self) -> None:
        """Tell the others what was cut here since the last call."""
        cuts = self._store.chains.cuts
        if not cuts:
            return
        data = b"".join(_CUT.pack(namespace, call, offset) for (namespace, call), offset in cuts.items())
        cuts.clear()
        for fd in self._told:
            for at in range(0, len(data), _PIECE):
                try:
                    os.write(fd, data[at : at + _PIECE])
                except BlockingIOError:  # that shard has not read for long
                    break

    def hear(self) -> None:
        """Take in what the others have cut. Call it when `fd` is readable."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _READ_BYTES)
            self._store.chains.heard.extend(Cut(*fields) for fields in _CUT.iter_unpack(data))

    @property
    def pending(self) -> bool:
        """There is something to cut: the loop must not sleep."""
        return bool(self._store.chains.heard)

    def cut(self, now: float) -> None:
        """Cut here what others have cut, for `CUTTING_S` at most."""
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
