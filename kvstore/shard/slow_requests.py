"""The slow log: the last requests that took long in this shard.

`Timing` compares the time of each request with the limit, and only requests over the limit are looked at here. The time
that a client takes to send or to read blocks does not count, nor does the wait for blocks that other clients have
promised or are writing. So a large or an early request is not slow. What counts is divided into the stages of a turn of
the loop (`kvstore.shard.turns`):

* a slow turn during the request, or the turn in which it is answered, counts for the stage that took most of the turn;
* the wait for the disk counts as `disk`. A GET waits for blocks that are read, and a removal until it is durable. A SET
  waits while its client is not read because the disk is behind;
* the wait of a GET until its first part is sent counts as `replies`.

Used by the loop's thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from kvstore import wire
from kvstore.auth.rights import Rights
from kvstore.shard.session import Session, may_see
from kvstore.shard.turns import STAGES, LoopWatchdog, Stage
from kvstore.wire import MAX_SHOWN_NAME

KEPT_REQUESTS: Final = 128


class SlowRequests:
    """The slow log of one shard. `turns`: the loop's watchdog, which knows the slow turns.

    limit_ms: the least time of a slow request; 0 if none is kept.
    count: the number of slow requests, by the stage that took longest.
    """

    def __init__(self, turns: LoopWatchdog) -> None:
        self.limit_ms = 0
        self.count: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self._turns = turns
        self._kept: deque[tuple[str, wire.SlowRequest]] = deque(maxlen=KEPT_REQUESTS)  # with the sender's tenant

    def add(
        self,
        session: Session,
        request: type[wire.Request],
        began: float,
        keys: int,
        nbytes: int = 0,
        *,
        running: Stage = "requests",
        waits: Mapping[Stage, float] | None = None,
    ) -> None:
        """Keep a request that is answered now, if the part of its time that counts is over the limit.

        began: when the header and the keys had arrived, in monotonic seconds.
        nbytes: the bytes of its blocks.
        running: the stage of the loop that runs now.
        waits: how long the request has waited, in seconds.
        """
        total_s = time.monotonic() - began
        stages = self._turns.slow_since(began, running)
        for stage, seconds in (waits or {}).items():
            stages[stage] = max(seconds, stages.get(stage, 0.0))  # a wait includes the turns during it
        took_s = min(total_s, sum(stages.values()))
        if took_s * 1000 < self.limit_ms:
            return
        longest = max(stages, key=lambda stage: stages[stage])
        self.count[longest] += 1
        namespace, model, tenant = session.shown()
        row = wire.SlowRequest(
            time.time(),
            wire.VERBS[request].name,
            keys,
            nbytes,
            took_s,
            total_s,
            longest,
            min(total_s, stages[longest]),
            session.address,
            session.client,
            session.rights.principal[:MAX_SHOWN_NAME],
            tenant,
            namespace,
            model,
        )
        self._kept.append((session.rights.tenant, row))

    def rows(self, rights: Rights) -> list[wire.SlowRequest]:
        """Return the requests that a principal with these rights may see, the last one first."""
        return [row for tenant, row in reversed(self._kept) if may_see(rights, tenant, row.model)]
