"""The options of one call, passed as one value from the client's public methods down to the requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore_client._calls.chains import Chain


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one call. The client has checked them; each kind of call reads only its own."""

    timeout_s: float  # for the whole call; in a stream, for each block
    fail_open: bool  # transport failures count as misses

    # Look-ups (contains, match_prefix)
    refresh: bool = False  # count the look-up as a use of the blocks
    pin_s: float = 0.0  # protect found blocks from eviction for so long

    # Sets
    force: bool = False  # replace blocks that exist
    deferred: bool = True  # return when one replica of each block has taken it
    priority: int = 0
    ttl_s: float = 0.0  # 0: the server's rule for the namespace
    generation: int | None = None  # in which the blocks were made; None: now
    reads: int = 0  # the blocks are transient, and may be read so often; 0: ordinary blocks
    chains: Sequence[Chain] = (Chain(),)  # that the keys are of, in the order of the keys

    # Reads
    prefix: bool = False  # the keys are a chain, and only its leading run is wanted
    wait_s: float = 0.0  # wait for blocks that were promised, so long beside `timeout_s`
    alone: bool = True  # the calling thread has no other call under way, so it may block

    @property
    def deadline_ms(self) -> int:
        """`timeout_s` as requests carry it: in milliseconds, at least 1."""
        return max(1, int(self.timeout_s * 1000))

    def within(self, timeout_s: float) -> Options:
        """The same options for a part of the call, which may take `timeout_s` (at least 1 ms)."""
        return msgspec.structs.replace(self, timeout_s=max(0.001, timeout_s))
