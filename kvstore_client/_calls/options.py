"""The options of one call, which the client's public methods pass on as one value."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore_client._calls.chains import Chain


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one call. The client has already checked them. Each kind of call uses only its own options."""

    timeout_s: float  # for the whole call; in a stream, for each block
    fail_open: bool  # count transport errors as misses

    # Look-ups (contains, match_prefix)
    refresh: bool = False  # count the look-up as a use of the blocks
    pin_s: float = 0.0  # how long the found blocks are protected from eviction

    # Sets
    force: bool = False  # replace blocks that exist
    deferred: bool = True  # return when one copy of each block is stored
    priority: int = 0
    ttl_s: float = 0.0  # 0 stands for the server's rule for the namespace
    generation: int | None = None  # when the blocks were made; None stands for the present generation
    reads: int = 0  # the number of reads after which transient blocks are dropped; 0 for other blocks
    chains: Sequence[Chain] = (Chain(),)  # the chains of the keys, in the order of the keys

    # Reads
    prefix: bool = False  # the keys form a chain, and only its leading blocks without a gap are wanted
    wait_s: float = 0.0  # how long to wait for promised blocks, in addition to `timeout_s`
    alone: bool = True  # the calling thread has no other call in progress, so it may block

    @property
    def deadline_ms(self) -> int:
        """The deadline `timeout_s` in the form that requests carry: in milliseconds, at least 1."""
        return max(1, int(self.timeout_s * 1000))

    def within(self, timeout_s: float) -> Options:
        """Return the same options for a part of the call that may take `timeout_s`, or 1 ms if that is longer."""
        return msgspec.structs.replace(self, timeout_s=max(0.001, timeout_s))
