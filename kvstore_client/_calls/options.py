"""How one call is made: the one value that travels from the client's public methods down to the requests."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one call. Checked by the client; a call reads those that concern it."""

    timeout_s: float  # for the whole call; of a stream, for each block
    fail_open: bool  # transport failures are misses

    # Look-ups (contains, match_prefix)
    refresh: bool = False  # counts as a use of the blocks
    pin_s: float = 0.0  # keep what is found from eviction for so long

    # Sets
    force: bool = False  # replace what is there
    deferred: bool = True  # one copy of a block is enough
    priority: int = 0
    ttl_s: float = 0.0  # 0: the server's rule for the namespace

    # Reads
    prefix: bool = False  # the keys are a chain, and only its leading run is wanted

    @property
    def deadline_ms(self) -> int:
        """`timeout_s` as requests carry it."""
        return max(1, int(self.timeout_s * 1000))

    def within(self, timeout_s: float) -> Options:
        """The same for a part of the call: it may take `timeout_s` (at least 1 ms)."""
        return msgspec.structs.replace(self, timeout_s=max(0.001, timeout_s))
