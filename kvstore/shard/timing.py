"""How long requests take in a shard: one histogram for each verb and tier. The bounds of the buckets double.

The time of a request begins with the turn of the loop in which its header and keys have arrived. So the time that it
waits for other requests of that turn is included. The time ends when the reply is queued. The time of a GET ends when
its last part is given to the connection. So it includes the time that the client takes to read the earlier parts. It
does not include the wait for promised blocks, for which the client that computes them is responsible. The tier is
`disk` if the request waited for the disk. This applies to a GET for which a block was read from disk, and to a DELETE
or a SET with `force` whose removal had to be durable. Requests that are refused are not counted.

A row is one list of integers. This command measures the cost per request: `python -m timeit -s "from
kvstore.shard.timing import Timing; from kvstore.wire import Get; t = Timing()" "t.add(Get, 0.0)"`.
"""

from __future__ import annotations

import time
from typing import Final

from kvstore.wire import VERBS, Request, RequestTimes
from kvstore.wire.status import FIRST_BOUND, REQUEST_BOUNDS_S

NEVER_US: Final = 1 << 62  # no request takes that long
_LAST: Final = len(REQUEST_BOUNDS_S)  # for times over every bound


class Timing:
    """The histograms of one shard. `limit_us`: the least time of a slow request. Used by the loop's thread only."""

    def __init__(self) -> None:
        self.limit_us = NEVER_US
        # Each list has one count for each bucket and, at the end, the sum of all times in microseconds.
        self._memory = {verb.request: [0] * (_LAST + 2) for verb in VERBS.values() if verb.timed}
        self._disk = {verb.request: [0] * (_LAST + 2) for verb in VERBS.values() if verb.disk}

    def add(self, request: type[Request], began: float, disk: bool = False) -> bool:
        """Count a request that is answered now. Return whether it took at least `limit_us`, so that it may belong in
        the slow log.

        began: the time when the request began, in monotonic seconds.
        disk: whether the request waited for the disk.
        """
        row = (self._disk if disk else self._memory)[request]
        took_us = int((time.monotonic() - began) * 1e6)
        bucket = (took_us >> FIRST_BOUND).bit_length()
        row[bucket if bucket < _LAST else _LAST] += 1
        row[-1] += took_us
        return took_us >= self.limit_us

    def rows(self) -> list[RequestTimes]:
        """Return the rows with at least one counted request."""
        return [
            RequestTimes(VERBS[request].name, tier, row[-1] / 1e6, row[:-1])
            for tier, rows in (("memory", self._memory), ("disk", self._disk))
            for request, row in rows.items()
            if any(row)
        ]
