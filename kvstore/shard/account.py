"""The account of a shard's memory beside blocks and their index: what its clients make it hold.

Whatever the shard keeps for a client is drawn from one limit and given back when it is let go. What does not fit waits
(a connection that has replies queued is not read while the account is full) or is refused with an error that says so.
So no number of connections and no mix of requests takes more memory than the limit.

An address may hold `FREE_TIMES` as much as is still free, the rule of dynamic thresholds (Choudhury and Hahne, 1998):
one that asks for all it can get has three quarters, two have three sevenths each, and something is always left for
whoever comes next. Members of the cluster have `RESERVED_BYTES` of their own.

Used by the loop's thread only.
"""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode, WireError

MAX_HELD_BYTES: Final = 96 << 20
RESERVED_BYTES: Final = 16 << 20  # of them, for the cluster's members
FREE_TIMES: Final = 3  # a host with many engines, and one that floods, must not have less than it needs
REQUESTS_BYTES: Final = 1 << 20  # of requests that an address has room for beside what it promises
SMALL_BYTES: Final = 8 << 10  # always given: small requests, which may end the use of memory, must get through

# What holds memory, and below it what one of them takes beside its bytes, rounded up generously. What counts is the
# sum: tests/attack/test_memory.py holds the resident memory of a shard against its promise.
CONNECTIONS: Final = "connections"
FRAMES: Final = "frames"  # frames that are being collected
WRITES: Final = "writes"  # keys of SETs whose payload has not arrived yet
STREAMS: Final = "streams"  # GETs in progress
REPLIES: Final = "replies"  # replies that clients have not taken
CHAINS: Final = "chains"  # the keys that a client asked for last
LISTS: Final = "lists"  # the order of a namespace's blocks
LEASES: Final = "leases"  # which blocks clients on this host may read in shared memory
PROMISES: Final = "promises"  # keys that clients are about to set
REMOVALS: Final = "removals"  # keys that the disk tier's index has yet to forget
HOLDERS: Final = (CONNECTIONS, FRAMES, WRITES, STREAMS, REPLIES, CHAINS, LISTS, LEASES, PROMISES, REMOVALS)

CONNECTION_BYTES: Final = 28 << 10
WRITE_BYTES: Final = 2 << 10
WRITE_BLOCK_BYTES: Final = 8  # slot and flags of a block
STREAM_BYTES: Final = 2560
REPLY_BYTES: Final = 64
REMOVAL_BYTES: Final = 128  # a key: here, in the keeper's queue and in its transaction


# Limits that refuse a client, as INFO and metrics count them.
PLACES: Final = "connections"
PLACES_OF_ADDRESS: Final = "connections_of_address"
MEMORY: Final = "memory"
MEMORY_OF_ADDRESS: Final = "memory_of_address"
GETS: Final = "gets_of_connection"
JOBS: Final = "jobs"
LOGINS: Final = "logins"
TENANT: Final = "tenant"
LIMITS: Final = (PLACES, PLACES_OF_ADDRESS, MEMORY, MEMORY_OF_ADDRESS, GETS, JOBS, LOGINS, TENANT)


class LimitReached(WireError):
    """A request is refused because of one of `LIMITS`."""

    def __init__(self, limit: str, message: str, code: ErrorCode = ErrorCode.LIMIT) -> None:
        super().__init__(code, message)
        self.limit = limit


class Account:
    """Bytes held by holder, and all together."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(HOLDERS, 0)
        self.held_bytes = 0
        self.members = Share(self, "the cluster's members", member=True)

    @property
    def free_bytes(self) -> int:
        """What clients that are no members may still take; below 0 if small requests have taken more."""
        in_reserve = min(self.members.held_bytes, RESERVED_BYTES)
        return MAX_HELD_BYTES - RESERVED_BYTES - (self.held_bytes - in_reserve)

    def take(self, holder: str, size: int) -> None:
        """Take `size` bytes without a check: they are few, or were checked."""
        self.held[holder] += size
        self.held_bytes += size

    def give_back(self, holder: str, size: int) -> None:
        """Return bytes that were taken."""
        self.held[holder] -= size
        self.held_bytes -= size


class Share:
    """What the clients at one address have, or the members: connections, and bytes for requests and replies.

    Many engines may be at one address: what their connections take by themselves, and the keys that are remembered for
    them, are in the account but not in the share.
    """

    def __init__(self, account: Account, address: str, member: bool = False) -> None:
        self.address = address
        self.connections = 0  # all that are open
        self.places = 0  # of them, those that have a place of a client
        self.jobs = 0  # in the background
        self.logins = 0  # that wait
        self.held_bytes = 0
        self._account = account
        self._member = member

    @property
    def _room_bytes(self) -> int:
        """How much more it may hold."""
        free_bytes = self._account.free_bytes
        if self._member:
            return RESERVED_BYTES - self.held_bytes + max(0, free_bytes)
        return min(free_bytes, FREE_TIMES * free_bytes - self.held_bytes)

    @property
    def full(self) -> bool:
        """It holds what it may."""
        return self._room_bytes <= 0

    def check(self, size: int) -> None:
        """Raise `LimitReached` when `size` more bytes do not fit."""
        if size <= self._room_bytes:
            return
        account = self._account
        if self._member or size > account.free_bytes:
            raise LimitReached(
                MEMORY,
                f"the server holds {account.held_bytes} bytes for the connections, requests and replies of its clients "
                f"and has no room for {size} more: its limit is {MAX_HELD_BYTES}, of which {RESERVED_BYTES} are for "
                "members of its cluster; try again later",
            )
        raise LimitReached(
            MEMORY_OF_ADDRESS,
            f"the server holds {self.held_bytes} bytes for requests and replies of clients at {self.address}: with "
            f"{size} more they would have more than {FREE_TIMES} times the {account.free_bytes} that are left for all; "
            "send fewer requests at once",
        )

    def check_lasting(self, size: int) -> None:
        """As `check`, of bytes that stay for long: beside them there must be room for the requests that renew or end
        them. A byte taken makes what its address may hold smaller by `FREE_TIMES`, too."""
        self.check((FREE_TIMES + 1) * size + REQUESTS_BYTES)

    def take(self, holder: str, size: int) -> None:
        """Take `size` bytes without a check: they are few, or were checked."""
        account = self._account  # as `Account.take`, for each request
        account.held[holder] += size
        account.held_bytes += size
        self.held_bytes += size

    def give_back(self, holder: str, size: int) -> None:
        """Return bytes that were taken."""
        account = self._account
        account.held[holder] -= size
        account.held_bytes -= size
        self.held_bytes -= size
