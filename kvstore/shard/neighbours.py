"""What the shards of a node tell each other: where chains are cut (`kvstore/store/chains.py`).

Each shard has a pipe from which it reads; the others write to it. The supervisor makes the pipes and keeps them open,
so they outlive a shard. Nobody waits: what does not fit a pipe is dropped, and leaves useless blocks
where they are.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterator
from typing import Final

from kvstore.shard.setup import ShardConfig
from kvstore.store.chains import Chains, Cut

_CUT: Final = struct.Struct("<16sQI")  # namespace id, call, offset
_PIECE: Final = select.PIPE_BUF // _CUT.size * _CUT.size  # a write of so much is not torn apart
_READ_BYTES: Final = 16 * _PIECE  # in one turn


class Neighbours:
    """The other shards of the node."""

    def __init__(self, config: ShardConfig, chains: Chains) -> None:
        self.fd = config.heard_fd
        self._told = config.told_fds
        self._chains = chains

    def tell(self) -> None:
        """Tell the others what was cut here since the last call."""
        cuts = self._chains.cuts
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

    def heard(self) -> Iterator[Cut]:
        """-> what the others have cut. Call it when `fd` is readable."""
        data = os.read(self.fd, _READ_BYTES)
        for fields in _CUT.iter_unpack(data):
            yield Cut(*fields)
