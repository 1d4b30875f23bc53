"""The state that all connections of one shard share: the time of the turn, counters, and the account of memory.

The loop creates it and sets the time. Connections and request handlers update the counters. Used by the loop's thread
only.
"""

from __future__ import annotations

import secrets

from kvstore.auth.rights import ALL, Rights
from kvstore.shard.account import LIMITS, Account
from kvstore.shard.slow_requests import SlowRequests
from kvstore.shard.timing import NEVER_US, Timing
from kvstore.shard.turns import LoopWatchdog


class ShardState:
    """Time and counters of a shard. Plain fields, because every message reads and changes them."""

    def __init__(self, now: float, newcomer: Rights = ALL) -> None:
        """newcomer: the rights of a connection before its HELLO."""
        self.newcomer = newcomer
        self.started = now
        self.instance = secrets.token_hex(16)  # random; a client that finds it at a Unix socket is on this host
        self.now = now  # monotonic seconds, read once per turn of the loop
        self.draining = False  # new SETs are refused
        self.turns = LoopWatchdog()
        self.timing = Timing()
        self.slow = SlowRequests(self.turns)
        self.account = Account()
        self.connections = self.streams = 0  # open now
        self.accepted = 0  # connections since the start
        self.bytes_in = self.bytes_out = self.errors = 0
        self.refused = dict.fromkeys(LIMITS, 0)  # refused requests, by the limit that was reached
        self.sets = self.gets = self.lookups = 0
        self.unauthorized = 0  # requests refused because the connection lacked the right

    def keep_slow_requests(self, limit_ms: int) -> None:
        """Keep requests that take at least this long in the slow log from now on. 0: none."""
        self.slow.limit_ms = limit_ms
        self.timing.limit_us = limit_ms * 1000 or NEVER_US
