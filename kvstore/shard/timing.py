"""How long requests take in a shard: a histogram for each verb and tier, with bounds that double.

A request's time begins with the turn of the loop in which its header and keys have arrived, so what it waits for others
in that turn counts. It ends when its reply is queued; that of a GET when its last part is given to the connection, so
what the client takes to read the parts before counts, as does what a GET waits for promised blocks. The tier is `disk`
when the request waited for the disk: a GET that had a block read, a DELETE or a SET with `force` whose removal had to
be durable. Requests that are refused are not counted.

A row is one list of integers. What a request pays: `python -m timeit -s "from kvstore.shard.timing import Timing; from
kvstore.wire import Get; t = Timing()" "t.add(Get, 0.0)"`.
"""

from __future__ import annotations

import time
from typing import Final

from kvstore.wire import VERBS, Request, RequestTimes
from kvstore.wire.status import FIRST_BOUND, REQUEST_BOUNDS_S

_LAST: Final = len(REQUEST_BOUNDS_S)  # what took longer than every bound


class Timing:
    """The histograms of one shard. Used by the loop's thread only."""

    def __init__(self) -> None:
        # Each by bucket; the last is the sum, in microseconds.
        self._memory = {verb.request: [0] * (_LAST + 2) for verb in VERBS.values() if verb.timed}
        self._disk = {verb.request: [0] * (_LAST + 2) for verb in VERBS.values() if verb.disk}

    def add(self, request: type[Request], began: float, disk: bool = False) -> None:
        """A request that began then, in monotonic seconds, is answered now. disk: it waited for the disk."""
        row = (self._disk if disk else self._memory)[request]
        took_us = int((time.monotonic() - began) * 1e6)
        bucket = (took_us >> FIRST_BOUND).bit_length()
        row[bucket if bucket < _LAST else _LAST] += 1
        row[-1] += took_us

    def rows(self) -> list[RequestTimes]:
        """-> the rows that have counted a request."""
        return [
            RequestTimes(VERBS[request].name, tier, row[-1] / 1e6, row[:-1])
            for tier, rows in (("memory", self._memory), ("disk", self._disk))
            for request, row in rows.items()
            if any(row)
        ]
