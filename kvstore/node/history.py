"""Polls a node's shards every two seconds, and keeps their counts of the last five minutes.

Requests for `/status.json` cost the shards nothing, because the answer to each request is the last poll, already
encoded. A poll sends one INFO to each shard. The memory for polls has a bound: a few numbers per poll for the charts,
and for one minute the counters of each shard that changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

import kvstore
from kvstore.node.diagnosis import Finding, Seen, findings, of_cluster
from kvstore.node.health import Health, why_not_registered
from kvstore.node.rates import Key, Table, change, hit_rate, table_of, total
from kvstore.node.status import (
    ClusterRow,
    History,
    MemberRow,
    Status,
    namespace_rows,
    request_rows,
    shard_row,
    tenant_rows,
)
from kvstore.wire import ShardInfo

log = logging.getLogger("kvstore.server")

INTERVAL_S: Final = 2.0
HISTORY_S: Final = 300.0
MINUTE_S: Final = 60.0
START_LOOK_S: Final = 0.05  # how often to check whether the shards have started


class StatusHistory(threading.Thread):
    """Polls a node's shards between `start` and `close`. Any thread may call its methods."""

    def __init__(self, health: Health, node: str, settings: dict[str, str]) -> None:
        super().__init__(name="kvstore-looks", daemon=True)
        self._health = health
        self._node = node
        self._settings = settings
        self._began = self._looked = time.monotonic()
        count = len(health.node.addresses)
        self._pids = [0] * count
        self._restarted: list[float | None] = [None] * count  # for each shard, when a new process was last seen
        self._tables: list[Table] = [{} for _ in range(count)]
        self._minute: deque[Sequence[Table]] = deque(maxlen=round(MINUTE_S / INTERVAL_S))
        self._rates: deque[Sequence[float | None]] = deque(maxlen=round(HISTORY_S / INTERVAL_S))
        self._changed = threading.Condition()
        self._status = b""  # the last poll as JSON
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop polling. Does not block."""
        self._closed.set()

    def status(self, patience_s: float) -> bytes:
        """Return the last poll as JSON. If the first poll is not complete yet, wait for it for up to `patience_s`
        seconds. After that, return empty bytes."""
        with self._changed:
            self._changed.wait_for(lambda: self._status, patience_s)
            return self._status

    def run(self) -> None:
        """Poll after the shards have started."""
        node = self._health.node
        while any(map(node.not_serving, range(len(node.addresses)))) and not self._closed.wait(START_LOOK_S):
            pass  # a shard that starts with the server is not missing
        while not self._closed.is_set():
            due = time.monotonic() + INTERVAL_S
            try:
                status = msgspec.json.encode(self._look())
            except Exception:  # the page shows the last poll, and its time
                log.exception("the state of the shards could not be summed up; trying again")
            else:
                with self._changed:
                    self._status = status
                    self._changed.notify_all()
            self._closed.wait(max(0.0, due - time.monotonic()))

    def _look(self) -> Status:
        states = self._health.shards()
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        changes = [self._change(shard, state) for shard, state in enumerate(states)]
        self._minute.append(changes)
        unix = round(time.time(), 1)
        self._rates.append((unix, *_rates(total(changes), seconds)))
        minutes = [total(look[shard] for look in self._minute) for shard in range(len(states))]
        said = self._messages(states, minutes, now)
        minute = total(minutes)
        answering = [state for state in states if isinstance(state, ShardInfo)]
        namespaces, left_out = namespace_rows(answering, minute)
        worst = said[0].severity if said else "note"
        return Status(
            time=unix,
            interval_s=INTERVAL_S,
            node=self._node,
            version=kvstore.__version__,
            uptime_s=round(now - self._began, 1),
            restarts=self._health.node.restarts(),
            verdict="ok" if worst == "note" else worst,
            messages=said,
            hits=minute["hits",],
            misses=minute["misses",],
            shards=[
                shard_row(shard, state, self._health.node.pid(shard), changes[shard], seconds, minutes[shard])
                for shard, state in enumerate(states)
            ],
            requests=request_rows(minute),
            namespaces=namespaces,
            namespaces_left_out=left_out,
            tenants=tenant_rows(answering, minute),
            cluster=self._cluster(),
            history=History(*([row[column] for row in self._rates] for column in range(7))),  # type: ignore[arg-type]
            settings=self._settings,
        )

    def _change(self, shard: int, state: ShardInfo | str) -> dict[Key, int]:
        """Return a shard's counts since its last poll."""
        if isinstance(state, str):
            return {}
        table = table_of(state)
        old = self._tables[shard] if state.pid == self._pids[shard] else {}
        if self._pids[shard] not in (0, state.pid):
            self._restarted[shard] = self._looked
        self._tables[shard], self._pids[shard] = table, state.pid
        return change(old, table)

    def _messages(self, states: Sequence[ShardInfo | str], minutes: Sequence[Table], now: float) -> list[Finding]:
        seen = []
        for shard, state in enumerate(states):
            since = self._restarted[shard]
            restarted_s = now - since if since is not None and now - since < HISTORY_S else None
            seen.append(Seen(f"Shard {shard}", state, minutes[shard], restarted_s))
        if self._health.node.cluster is None:
            return findings(seen)
        status = self._health.node.cluster()
        return findings(seen, of_cluster(status, why_not_registered(status)))

    def _cluster(self) -> ClusterRow | None:
        if self._health.node.cluster is None:
            return None
        status = self._health.node.cluster()
        return ClusterRow(
            registered=status.registered,
            state=status.state,
            epoch=status.epoch,
            directory_up=status.directory_up,
            members=[
                MemberRow(m.node, m.state, m.zone, m.version, len(m.shards), m.metrics, m.node == self._node)
                for m in status.nodes
            ],
        )


def _rates(changed: Table, seconds: float) -> tuple[float | None, ...]:
    """Return the numbers of one poll in the order of the fields of `History` that follow `time`."""

    def rate(*key: str) -> float:
        return round(changed.get(key, 0) / seconds, 1)

    share = hit_rate(changed.get(("hits",), 0), changed.get(("misses",), 0))
    return (
        None if share is None else round(share, 4),
        rate("bytes_in"),
        rate("bytes_out"),
        rate("evicted"),
        rate("disk", "evicted"),
        round(rate("sets") + rate("gets") + rate("lookups"), 1),
    )
