"""The account of the memory that a shard uses for its clients, apart from blocks and their index.

All memory that the shard keeps for a client is drawn from one limit, and given back when it is freed. A request that
does not fit is either refused with an error that says so, or delayed: while the account is full, the shard reads
nothing from a connection with queued replies. So the limit holds for any number of connections and any mix of requests.

An address may hold at most `FREE_TIMES` times the bytes that are still free. This is the rule of dynamic thresholds
(Choudhury and Hahne, 1998). One address can take at most three quarters of the limit, and two addresses three sevenths
each. So something is always left for the next address. Members of the cluster have `RESERVED_BYTES` of their own.

Used by the loop's thread only.
"""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode, WireError

MAX_HELD_BYTES: Final = 96 << 20
RESERVED_BYTES: Final = 16 << 20  # the part of the limit that is reserved for the cluster's members
FREE_TIMES: Final = 3  # an address with many engines must get what it needs, even if another one floods
REQUESTS_BYTES: Final = 1 << 20  # room for an address's requests, in addition to its promises
SMALL_BYTES: Final = 8 << 10  # always granted, so that small requests that free memory get through

# The holders of memory. After them, the overhead of each kind of holder, rounded up generously. Only the sum matters:
# tests/attack/test_memory.py compares a shard's resident memory with the limit that is promised.
CONNECTIONS: Final = "connections"
FRAMES: Final = "frames"  # frames that are being collected
WRITES: Final = "writes"  # keys of SETs whose payload has not arrived yet
STREAMS: Final = "streams"  # GETs in progress
REPLIES: Final = "replies"  # replies that clients have not taken
CHAINS: Final = "chains"  # the keys in clients' last requests
LISTS: Final = "lists"  # lists of a namespace's blocks in their order
LEASES: Final = "leases"  # records of the blocks that clients on this host may read in shared memory
PROMISES: Final = "promises"  # keys that clients have promised to set
REMOVALS: Final = "removals"  # keys that must still be removed from the disk tier's index
HOLDERS: Final = (CONNECTIONS, FRAMES, WRITES, STREAMS, REPLIES, CHAINS, LISTS, LEASES, PROMISES, REMOVALS)

CONNECTION_BYTES: Final = 28 << 10
PENDING_WRITE_BYTES: Final = 2 << 10
WRITE_BLOCK_BYTES: Final = 8  # for a block's slot and flags
STREAM_BYTES: Final = 2560
REPLY_BYTES: Final = 64
REMOVAL_BYTES: Final = 128  # per key: in this process, in the keeper's queue and in its transaction


# The limits at which a client is refused, with the names that they have in INFO and in metrics.
PLACES: Final = "connections"
PLACES_OF_ADDRESS: Final = "connections_of_address"
BUFFER_MEMORY: Final = "memory"
MEMORY_OF_ADDRESS: Final = "memory_of_address"
GETS: Final = "gets_of_connection"
JOBS: Final = "jobs"
LOGINS: Final = "logins"
TENANT: Final = "tenant"
LIMITS: Final = (PLACES, PLACES_OF_ADDRESS, BUFFER_MEMORY, MEMORY_OF_ADDRESS, GETS, JOBS, LOGINS, TENANT)


class LimitReached(WireError):
    """The error for a request that is refused because of one of `LIMITS`."""

    def __init__(self, limit: str, message: str, code: ErrorCode = ErrorCode.LIMIT) -> None:
        super().__init__(code, message)
        self.limit = limit


class Account:
    """The bytes that are held, for each holder and in total."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(HOLDERS, 0)
        self.held_bytes = 0
        self.members = AddressBudget(self, "the cluster's members", member=True)

    @property
    def free_bytes(self) -> int:
        """The bytes that clients other than members may still take. It is below 0 if small requests have taken more."""
        in_reserve = min(self.members.held_bytes, RESERVED_BYTES)
        return MAX_HELD_BYTES - RESERVED_BYTES - (self.held_bytes - in_reserve)

    def take(self, holder: str, size: int) -> None:
        """Take `size` bytes without a check, because they are few or were checked before."""
        self.held[holder] += size
        self.held_bytes += size

    def give_back(self, holder: str, size: int) -> None:
        """Give back bytes that were taken."""
        self.held[holder] -= size
        self.held_bytes -= size


class AddressBudget:
    """The connections and the held bytes of the clients at one address, or of the cluster's members.

    Many engines may share one address. So the account includes the memory of the connections themselves and of the keys
    remembered for them, but this memory does not count for the address.
    """

    def __init__(self, account: Account, address: str, member: bool = False) -> None:
        self.address = address
        self.connections = 0  # all open connections
        self.places = 0  # the connections that have a place of a client
        self.jobs = 0  # jobs in the background
        self.logins = 0  # waiting logins
        self.held_bytes = 0
        self._account = account
        self._member = member

    @property
    def _room_bytes(self) -> int:
        """The number of bytes that the address may still take."""
        free_bytes = self._account.free_bytes
        if self._member:
            return RESERVED_BYTES - self.held_bytes + max(0, free_bytes)
        return min(free_bytes, FREE_TIMES * free_bytes - self.held_bytes)

    @property
    def full(self) -> bool:
        """True if the address may take no more bytes."""
        return self._room_bytes <= 0

    def check(self, size: int) -> None:
        """Raise `LimitReached` if `size` more bytes do not fit."""
        if size <= self._room_bytes:
            return
        account = self._account
        if self._member or size > account.free_bytes:
            raise LimitReached(
                BUFFER_MEMORY,
                f"there is no room for {size} bytes: the connections, requests and replies of clients hold "
                f"{account.held_bytes} bytes. The limit is {MAX_HELD_BYTES} bytes, of which {RESERVED_BYTES} are "
                "reserved for members of the cluster. Try again later",
            )
        raise LimitReached(
            MEMORY_OF_ADDRESS,
            f"the requests and replies of clients at {self.address} hold {self.held_bytes} bytes. With {size} more, "
            f"they would hold more than {FREE_TIMES} times the {account.free_bytes} bytes that are free for all "
            "clients. Send fewer requests at once",
        )

    def check_lasting(self, size: int) -> None:
        """Like `check`, for bytes that are held for long. Room must remain for the requests that renew or release these
        bytes. Each byte taken also lowers the address's limit by `FREE_TIMES` bytes."""
        self.check((FREE_TIMES + 1) * size + REQUESTS_BYTES)

    def take(self, holder: str, size: int) -> None:
        """Take `size` bytes without a check, because they are few or were checked before."""
        account = self._account  # the same as `Account.take`, repeated because every request calls this
        account.held[holder] += size
        account.held_bytes += size
        self.held_bytes += size

    def give_back(self, holder: str, size: int) -> None:
        """Give back bytes that were taken."""
        account = self._account
        account.held[holder] -= size
        account.held_bytes -= size
        self.held_bytes -= size
