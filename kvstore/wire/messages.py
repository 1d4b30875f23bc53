"""The wire protocol: message types, limits, errors. A pure codec: no sockets, no clocks, no threads.

A message is a ZMTP multipart message between a DEALER (client) and a ROUTER (shard). Its first frame is a header:
a msgpack array ``[tag, field, ...]`` described by one of the structs below. Keys, payload and checksums follow in
separate frames and never pass through msgpack. `docs/protocol.md` is normative; golden vectors test it.

Safety property: no memory is allocated for a frame before its size is compared with a limit. A header either decodes
into exactly one of the structs below or raises `WireError` with a code and a sentence for the sender.

Compatibility: fields may be appended with a default; an old peer ignores fields that it does not know. Any other change
needs a new `PROTOCOL_VERSION`. HELLO names the range of versions that the client speaks. The shard takes the highest
version that both speak (`agreed_protocol`), and names it in WELCOME for the whole connection. Each release also speaks
the version of the release before it, so that nodes and engines can be upgraded one by one.

Over 400 lines because all messages of the protocol, their limits and their checks are in one place.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final, TypeVar

import msgspec

from kvstore.wire.verbs import (
    ADMIN,
    ANYBODY,
    DELETE,
    LOGGED_IN,
    MONITOR,
    READ,
    WRITE,
    Bound,
    KeyedRequest,
    Reply,
    Request,
    Verb,
    table,
)

PROTOCOL_VERSION: Final = 4
OLDEST_PROTOCOL: Final = 3  # the version of the release before this one
NAMESPACE_VERSION: Final = 1
FLAGGED_TRANSPORT: Final = "nixl"  # HELLO and WELCOME had a field for this transport before transports had names

MIN_KEY_BYTES: Final = 8
MAX_KEY_BYTES: Final = 64
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_KEYS: Final = 8192  # per request; clients split longer batches
MAX_NAMESPACE_BYTES: Final = 8 * 1024
MAX_BLOCK_BYTES: Final = 64 << 20
MAX_PIN_S: Final = 60.0
MAX_PRIORITY: Final = 3
MAX_POSITION: Final = (1 << 31) - 1  # the highest position of a block in its chain
MAX_TTL_S: Final = 10 * 365 * 86400
MAX_READS: Final = 255  # the largest number of reads of a transient block
TRANSIENT_TTL_S: Final = 60.0  # the time to live of a transient block if the client gives none
MAX_REPLICAS: Final = 3
MAX_GENERATION: Final = (1 << 63) - 1
MAX_HOTTEST_BYTES: Final = 8 << 20  # the most bytes of keys in one HOTTEST reply
MAX_HOTTEST_KEYS: Final = MAX_HOTTEST_BYTES // MAX_KEY_BYTES  # as many keys of any length fit one HOTTEST reply
MAX_LISTED_CLIENTS: Final = 256  # the most connections in one CLIENTS reply
MAX_SHOWN_NAME: Final = 64  # characters of the names that a shard keeps for people: of clients, principals, tenants
MAX_SHOWN_MODEL: Final = 200  # characters of a model's name that are shown
MAX_DEADLINE_MS: Final = 600_000
MAX_PROMISE_MS: Final = 600_000
MAX_SETTING_CHARACTERS: Final = 128  # of the name and of the value of a setting in CONFIGURE
CHECKSUM_BYTES: Final = 8
ATTRIBUTES_BYTES: Final = 6  # a block's attributes without its key, as sent to another shard: see attributes.py

# A payload frame holds as many small blocks as fit this size. Measured: with one frame of this size per system call,
# the copies of both ends overlap. With 4 MiB per call, a transfer took 1.15 times as long.
FRAME_BYTES: Final = 1 << 20
MAX_FRAME_BLOCKS: Final = 512  # one system call takes at most 1024 pieces
REPLY_GROUP_BYTES: Final = 4 << 20  # this many bytes of a GET are prepared and announced at a time


def frame_blocks(block_bytes: int) -> int:
    """Return the number of blocks in a payload frame. It is as many as fit `FRAME_BYTES`, but at least 1 and at most
    `MAX_FRAME_BLOCKS`."""
    return max(1, min(MAX_FRAME_BLOCKS, FRAME_BYTES // block_bytes))


class ErrorCode(enum.IntEnum):
    """Why a request was refused. The number goes over the wire; the name is for people."""

    PROTOCOL = 1  # a frame, a header, a size or the order of messages is wrong
    VERSION = 2  # a protocol or namespace version that this server does not support
    NO_NAMESPACE = 3  # a block request before a HELLO with a namespace
    BLOCK_SIZE = 4  # payload does not match the namespace's block_bytes
    KEY_SIZE = 5  # key length out of range, or different from the namespace's
    LIMIT = 6  # over a limit of the protocol
    NOT_AUTHORIZED = 7
    OUT_OF_MEMORY = 8  # this shard can never hold a block of this size
    SHUTTING_DOWN = 9
    NO_PLACE = 10  # too many connections, so this one may send only PING and INFO until another one ends
    SETTING = 11  # CONFIGURE names a setting that cannot be changed here, or a value that is not allowed


class Outcome(enum.IntEnum):
    """The result of a SET for one block."""

    CREATED = 0
    EXISTED = 1
    FORCED = 2
    DUPLICATED = 3
    ERROR = 4  # there is no room, or only if earlier blocks of its chain were evicted
    PENDING = 5  # another client is writing it, and it is not readable yet; counts as `existed`


class Presence(enum.IntEnum):
    """The result of a CONTAINS for one block."""

    ABSENT = 0
    PRESENT = 1
    PROMISED = 2  # absent, but a client has promised to set it; used only if the request has `promised`


class PromiseOutcome(enum.IntEnum):
    """The result of a PROMISE for one block."""

    MINE = 0  # this connection has promised it
    PRESENT = 1  # it is stored, or being written
    OTHERS = 2  # another client has promised it


class WireError(Exception):
    """A message that cannot be accepted. The error has the code and the sentence that are sent to the peer."""

    def __init__(self, code: ErrorCode, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id  # 0 if it is not known here; the code that catches the error fills it in


# ---- client -> shard -------------------------------------------------------------------------------------------


class Hello(Request, tag=1, frozen=True):
    """The first message of a connection. With an empty `namespace`, only PING, INFO, SYNC, SCRUB, CONFIGURE and a
    PURGE of all namespaces are allowed."""

    protocol: int  # the oldest version that the client speaks; a shard of version 3 uses this version or refuses
    namespace: bytes = b""  # canonical JSON
    client: str = ""  # for logs
    credentials: bytes = b""
    replicas: int = 1  # how many copies of each block this client keeps; nodes that move blocks keep the same number
    cookie: str = ""  # the node's cookie, from its record; it shows that a supervisor belongs to the cluster
    release_ring: bool = False  # whether the client understands RELEASE_RING, on a Unix socket
    nixl: bool = False  # `transport` is NIXL, for shards that know no other transport
    newest: int = 0  # the newest version that the client speaks; 0 if it speaks only `protocol`
    generation: int = 0  # the highest generation of the namespace that the client knows
    holds: bool = False  # the client keeps copies of blocks, and so answers RAISED with NOTED
    transport: str = ""  # the transport of a client on another host; empty if it has none, or only `nixl` is set


class Set(KeyedRequest, tag=2, frozen=True):
    """Frames: header, keys, payload frames, checksums (`CHECKSUM_BYTES` little-endian per block).

    `chained`: the keys are a part of one chain, head first. The chain's other keys may be at other shards. Without
    `chained`, the fields `parent`, `end` and `position` have no effect.
    `parent`: the key before the first one, or the `end` of the previous part; empty if the chain begins here.
    `end`: the last key of the client's call, if that key went to another shard. The next part may name it as its
    parent.
    `position`: the position of the first key in the chain.

    `call`: a number for the client's call. All SETs of this call for the chain have the same number, and different
    calls have different numbers. It is 0 if the call is not known.
    `offsets`: the place of each key in that call, as u32le. It is empty if the places are consecutive, from 0.

    `attributes`: an entry of `attributes.py` for each of up to `MAX_FRAME_BLOCKS` blocks, which are copies of another
    shard's blocks. With `attributes`, the fields `priority`, `ttl_s`, `chained`, `parent` to `position`, `call` and
    `offsets` have no effect.

    `references`: the blocks are in memory that the client shares. Instead of payload and checksums, frames of
    `shared.STAGED` entries follow the keys. The shard reports with TAKEN how far it has read.

    `reads`: 0 for ordinary blocks, 1 to MAX_READS for transient ones. A transient block is dropped after this many
    reads, or after `ttl_s` seconds (TRANSIENT_TTL_S if that is 0). It is in no chain, and has no priority.

    `generation`: the generation that the namespace had when the blocks were made. A shard at a higher generation
    refuses all of the blocks.
    """

    force: bool = False
    priority: int = 0  # 0 to MAX_PRIORITY; evicted only when its namespace has no block of a lower priority left
    outcomes: bool = False  # whether the reply contains an `Outcome` for each block
    ttl_s: float = 0.0  # the blocks expire after this many seconds; if 0, the shard's rule for the namespace applies
    chained: bool = False
    parent: bytes = b""
    end: bytes = b""
    position: int = 0
    attributes: bytes = b""
    call: int = 0
    offsets: bytes = b""
    references: bool = False
    reads: int = 0
    generation: int = 0


class Get(KeyedRequest, tag=3, frozen=True):
    """Frames: header, keys. The reply is a series of PARTs.

    `credit` > 0: the shard may send this many bytes of payload before it needs more CREDIT.
    `refresh`: the GET counts as a use of the blocks, and its hits and misses are counted.
    `prefix`: the keys are a chain, and only its blocks before the first absent one are requested.
    `attributes`: PARTs contain the attributes of each block.
    `references`: if possible, PARTs say where in shared memory the blocks are. This works only on a Unix socket.
    `wait_ms`: how many milliseconds to wait for promised blocks. With `prefix`, promised blocks count as present.
    """

    credit: int = 0
    refresh: bool = True
    prefix: bool = False
    attributes: bool = False
    references: bool = False
    wait_ms: int = 0


class Contains(KeyedRequest, tag=4, frozen=True):
    """Frames: header, keys.

    `pin_s` > 0: blocks that are found are not evicted for this many seconds.
    `promised`: the reply says which keys are promised.
    """

    refresh: bool = False
    pin_s: float = 0.0
    promised: bool = False


class MatchPrefix(KeyedRequest, tag=5, frozen=True):
    """Frames: header, keys (a chain, head first). Requests the number of blocks before the first absent one."""

    refresh: bool = False
    pin_s: float = 0.0


class Delete(KeyedRequest, tag=6, frozen=True):
    """Frames: header, keys. `damaged`: delete only blocks whose bytes do not match their checksum."""

    damaged: bool = False


class Sync(Request, tag=7, frozen=True):
    """The reply comes when the blocks of every earlier SET on this connection are readable."""

    deadline_ms: int


class Info(Request, tag=8, frozen=True):
    deadline_ms: int


class Ping(Request, tag=9, frozen=True):
    deadline_ms: int


class Credit(Request, tag=10, frozen=True):
    """The shard may send `bytes` more bytes of payload for GET `id`. No reply."""

    bytes: int


class Cancel(Request, tag=11, frozen=True):
    """The client does not want the rest of GET `id`. No reply."""


class Scrub(Request, tag=12, frozen=True):
    """Check every block on disk against its checksum now, in one pass. INFO shows the progress."""

    deadline_ms: int


class Hottest(Request, tag=13, frozen=True):
    """Request keys of the connection's namespace, most recently used first: `limit` keys after the first `skip`.

    The key of a block comes after the keys of the earlier blocks of its chain.
    `before`: the reply also has, for each block, the key of the block that it follows.
    """

    deadline_ms: int
    skip: int
    limit: int
    before: bool = False


class Purge(Request, tag=14, frozen=True):
    """Remove all blocks of the connection's namespace, and raise its generation.

    `all`: purge all namespaces of the shard that the sender may use.
    `model`: if given, purge only namespaces whose model matches this pattern.
    `prefix`: if given, purge only namespaces whose id (in hexadecimal) begins with it.
    `generation`: each namespace is raised to at least this generation. The number is the same for all shards of a
    store.
    """

    deadline_ms: int
    all: bool = False
    generation: int = 0
    model: str = ""
    prefix: str = ""


class Release(Request, tag=15, frozen=True):
    """The client has finished reading the first `count` blocks that the answer to GET `id` referenced, or all of them
    if `count` is 0. No reply."""

    count: int


class Share(Request, tag=16, frozen=True):
    """A file of the client's memory. Its descriptor comes with this message's bytes, on a Unix socket. SETs refer to
    the file by `number`. The file must be sealed against shrinking. `handle`: the data that is needed to attach another
    kind of memory."""

    number: int
    nbytes: int
    handle: bytes = b""


class MakePromise(KeyedRequest, tag=17, frozen=True):
    """Frames: header, keys. The client is about to set these blocks, so other clients that request them may wait. The
    promise of a key ends when the key is set, at a WITHDRAW, when the connection ends, or after `ttl_ms`. A client that
    has promised a key renews the promise by sending this request again."""

    ttl_ms: int


class Withdraw(KeyedRequest, tag=18, frozen=True):
    """Frames: header, keys. The client will not set these blocks. This ends the promises that this connection has made
    for them."""


class Expire(KeyedRequest, tag=19, frozen=True):
    """Frames: header, keys. Give blocks a new time to live, which begins now. If it is 0, the shard's rule for the
    namespace applies, as in SET. Transient blocks keep their time to live."""

    ttl_s: float = 0.0


class Raise(Request, tag=20, frozen=True):
    """The client knows this generation of the connection's namespace from another shard of the store.

    A shard without blocks of the namespace adopts the generation from any client that may write. A shard that has
    blocks and missed the purge adopts it only from a client that may purge, and then removes the blocks, as for PURGE.
    There is no reply, except RAISED if the shard keeps its lower generation.
    """

    generation: int


class Noted(Request, tag=21, frozen=True):
    """The client has dropped everything that it held of earlier generations of the connection's namespace. No reply."""

    generation: int


class Clients(Request, tag=22, frozen=True):
    """Request the shard's open connections, in the order in which they were made: up to `MAX_LISTED_CLIENTS` of those
    whose number is above `after`."""

    deadline_ms: int
    after: int = 0


class Slowlog(Request, tag=23, frozen=True):
    """Request the last slow requests of the shard."""

    deadline_ms: int


class Configure(Request, tag=24, frozen=True):
    """Set the setting `name` to `value` until the server is restarted. Without a name, request all settings that can be
    changed in this way."""

    deadline_ms: int
    name: str = ""
    value: str = ""


# ---- shard -> client -------------------------------------------------------------------------------------------


class ShardAddress(msgspec.Struct, array_like=True, frozen=True):
    """The address of a shard. An empty `host` stands for the host at which the client has reached this node."""

    name: str  # stable across restarts; placement hashes it
    host: str
    port: int
    weight: float  # bytes of block memory


class Welcome(Reply, tag=65, frozen=True):
    protocol: int  # the version that is spoken on this connection
    version: str
    node: str
    shard: int
    block_bytes: int
    shards: list[ShardAddress]
    zone: str = ""  # nodes of one zone fail together; replicas go to different zones
    unix_socket: str = ""  # path of this shard's Unix socket on its host; empty if it has none
    instance: str = ""  # random, new at each start; a client that finds the same value at a Unix socket is on this host
    nixl: bool = False  # `transport` is NIXL, for clients that know no other transport
    generation: int = 0  # the namespace's generation on this shard; 0 if the shard knows of no purge
    transport: str = ""  # how a client on another host reads the references that its GETs request


class SetReply(Reply, tag=66, frozen=True):
    total: int
    created: int
    existed: int
    forced: int
    duplicated: int
    error: int
    outcomes: bytes = b""  # one `Outcome` per key, if the SET requested them
    evicted: int = 0  # the number of blocks that were evicted to make room
    generation: int = 0  # if not 0, the blocks were refused because the namespace is at this generation


class Part(Reply, tag=67, frozen=True):
    """Blocks of GET `id`. Frames: header and, unless it has no blocks, one payload frame.

    `positions`: for each block, the index of its key in the request, as u32le.
    `sums`: u64le checksums, one per block.
    `attributes`: entries of `attributes.py`, one per block, if the GET requested them.
    `references`: an entry of `shared.py` per block. In this case no payload frame follows.

    The PART with `last` ends the reply; its counts of hits and misses are complete. The next `following` bytes of
    payload come in the PARTs right after this one, so the client need not wake up before these bytes have arrived.
    """

    positions: bytes
    sums: bytes
    last: bool
    hit: int = 0
    miss: int = 0
    following: int = 0
    attributes: bytes = b""
    references: bytes = b""


class ContainsReply(Reply, tag=68, frozen=True):
    """`present`: one byte per key, a `Presence`."""

    present: bytes


class MatchReply(Reply, tag=69, frozen=True):
    length: int


class DeleteReply(Reply, tag=70, frozen=True):
    deleted: int


class SyncReply(Reply, tag=71, frozen=True):
    """The blocks of every earlier SET on this connection are readable."""


class InfoReply(Reply, tag=72, frozen=True):
    """`info`: a `ShardInfo` as msgpack."""

    info: bytes


class Pong(Reply, tag=73, frozen=True):
    """The answer to a PING."""


class ScrubReply(Reply, tag=74, frozen=True):
    """The pass is complete when `scrub_passes` of INFO has reached `passes`. If `passes` is 0, the disk tier is off."""

    passes: int


class HottestReply(Reply, tag=75, frozen=True):
    """`keys`: the concatenated keys, of `key_bytes` bytes each.
    `total`: the number of blocks that the namespace has on this shard.
    `before`: for each key the nearest earlier block of its chain, or the key itself if there is none; empty unless the
    request has `before`."""

    key_bytes: int
    keys: bytes
    total: int
    before: bytes = b""


class PurgeReply(Reply, tag=76, frozen=True):
    """The blocks that were stored when the PURGE came are removed from memory and disk, and cannot come back.

    * `purged`: The number of blocks that were removed.
    * `generation`: The namespaces have at least this generation now.
    * `namespaces`: The ids of the namespaces that were purged, in hexadecimal.
    * `told`: The number of connections that were notified because their clients hold copies.
    * `silent`: The addresses of those connections that have not answered.
    """

    purged: int
    generation: int = 0
    namespaces: list[str] = msgspec.field(default_factory=list)
    told: int = 0
    silent: list[str] = msgspec.field(default_factory=list)


class Extent(Reply, tag=77, frozen=True):
    """A file of shared memory. Its descriptor comes with this message's bytes. PARTs refer to the file by `number`.
    `handle`: the data that is needed to attach another kind of memory."""

    number: int
    nbytes: int
    handle: bytes = b""


class Retired(Reply, tag=78, frozen=True):
    """The memory of these files is gone, and no PART refers to them any more. `numbers`: the files' numbers, as
    u64le."""

    numbers: bytes


class ShareReply(Reply, tag=79, frozen=True):
    """From now on SETs may refer to the file."""


class Taken(Reply, tag=80, frozen=True):
    """The shard has read the first `count` blocks of SET `id`, so the client may reuse their memory."""

    count: int


class ReleaseRing(Reply, tag=81, frozen=True):
    """Shared memory whose descriptor comes with this message's bytes: a `shared.IdRing`. The client may put the id of a
    GET there, instead of sending a RELEASE of all its blocks."""

    nbytes: int


class PromiseReply(Reply, tag=82, frozen=True):
    """`answers`: one byte per key, a `PromiseOutcome`."""

    answers: bytes


class WithdrawReply(Reply, tag=83, frozen=True):
    """`withdrawn`: the number of promises that this request ended."""

    withdrawn: int


class ExpireReply(Reply, tag=84, frozen=True):
    """`present`: one byte per key, which is 1 if the block is present and has the new time to live, otherwise 0."""

    present: bytes


class Raised(Reply, tag=85, frozen=True):
    """The connection's namespace has this generation now, so data of earlier generations is useless. RAISED comes
    before anything that the shard sends later."""

    generation: int


class ConnectedClient(msgspec.Struct, array_like=True, frozen=True):
    """One open connection of a shard. Times are in seconds. Long names are cut.

    * `number`: It counts the connections since the shard's process started, from 1.
    * `address`: HOST:PORT; at the Unix socket, the user and the process id.
    * `client`: The name that the client gave itself.
    * `principal`: The login's name; empty without a login.
    * `tenant`: The tenant of the namespace or, without one, of the principal; empty if there is none.
    * `namespace`: The id of the namespace in hexadecimal; empty if there is none.
    * `model`: The model of the namespace.
    * `transport`: "tcp", "tls", "unix", "shared memory" or the name of a transport.
    * `age_s`: The time since the connection was accepted.
    * `idle_s`: The time since the client last sent something.
    * `requests`: The number of requests that have begun and are not answered.
    * `bytes_in`: Bytes received, or copied from the client's memory.
    * `bytes_out`: Bytes sent, or lent.
    * `waiting_bytes`: Bytes to be sent: replies in the shard's queue, and what its kernel has not sent yet.
    """

    number: int
    address: str
    client: str
    principal: str
    tenant: str
    namespace: str
    model: str
    transport: str
    age_s: float
    idle_s: float
    requests: int
    bytes_in: int
    bytes_out: int
    waiting_bytes: int


class ClientsReply(Reply, tag=86, frozen=True):
    """`clients`: the connections that the sender's rights include; empty at the end of the list."""

    clients: list[ConnectedClient]


class SlowRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request that took long. Times are in seconds. Long names are cut.

    * `at`: When it was answered, in seconds since 1970.
    * `verb`: "set", "get", "contains" …
    * `keys`: The number of its keys.
    * `bytes`: The bytes of its blocks: those that a SET brought, or that a GET sent.
    * `seconds`: The time in the shard, without the time of the client and the wait for other clients' blocks.
    * `total_s`: The time from the arrival of header and keys to the reply; of a GET, to its last part.
    * `stage`: The stage of the shard's loop that took longest, as in `slow_turns` of `ShardInfo`.
    * `stage_s`: How long that stage took.
    * `address`: As in `ConnectedClient`.
    * `client`: As in `ConnectedClient`.
    * `principal`: As in `ConnectedClient`.
    * `tenant`: As in `ConnectedClient`.
    * `namespace`: As in `ConnectedClient`.
    * `model`: As in `ConnectedClient`.
    """

    at: float
    verb: str
    keys: int
    bytes: int
    seconds: float
    total_s: float
    stage: str
    stage_s: float
    address: str
    client: str
    principal: str
    tenant: str
    namespace: str
    model: str


class SlowlogReply(Reply, tag=87, frozen=True):
    """The slow log of a shard.

    * `requests`: Those that the sender's rights include, the last one first.
    * `limit_ms`: The least time of a slow request, in milliseconds; 0 if the shard keeps none.
    """

    requests: list[SlowRequest]
    limit_ms: int


class RunningSetting(msgspec.Struct, array_like=True, frozen=True):
    """A setting that can be changed while the server runs.

    * `name`: Its name.
    * `value`: The value in force.
    * `configured`: The value at the start; for a quota, the value in the file of logins.
    * `expected`: Which values are allowed, in words.
    * `keep`: Where to write the value in force so that it outlives a restart, in words.
    """

    name: str
    value: str
    configured: str
    expected: str
    keep: str


class ConfigureReply(Reply, tag=88, frozen=True):
    """The requested settings, or the one that was set. `before`: the value that the latter had before."""

    settings: list[RunningSetting]
    before: str = ""


class Error(Reply, tag=127, frozen=True):
    """A request was refused. `id` is 0 if the message was so malformed that its request is not known."""

    code: int
    message: str


# ---- the table of verbs ----------------------------------------------------------------------------------------


_Greeting = TypeVar("_Greeting", Hello, Welcome)


def transport_of(greeting: Hello | Welcome) -> str:
    """Return the transport by which a client on another host reads the shard's memory, or an empty string if there is
    none."""
    return greeting.transport or (FLAGGED_TRANSPORT if greeting.nixl else "")


def with_transport(greeting: _Greeting, name: str) -> _Greeting:
    """Return a copy of the message in which the transport of this name is set."""
    return msgspec.structs.replace(greeting, transport=name, nixl=name == FLAGGED_TRANSPORT)


_DEADLINE: Final = Bound(
    "deadline_ms", 1, MAX_DEADLINE_MS, f"a deadline of {{}} ms: expected 1 to {MAX_DEADLINE_MS} ms"
)
_COUNT: Final = Bound("count", 0, MAX_KEYS, f"{{}} keys in one request: expected 0 to {MAX_KEYS}; split the batch")
_GENERATION: Final = Bound("generation", 0, MAX_GENERATION, f"generation {{}}: expected 0 to {MAX_GENERATION}")
_TTL: Final = Bound("ttl_s", 0, MAX_TTL_S, f"a time to live of {{}} s: expected 0 to {MAX_TTL_S} s")
_REPLICAS: Final = Bound("replicas", 1, MAX_REPLICAS, f"{{}} replicas: expected 1 to {MAX_REPLICAS}")
_PRIORITY: Final = Bound("priority", 0, MAX_PRIORITY, f"a priority of {{}}: expected 0 to {MAX_PRIORITY}")
_POSITION: Final = Bound("position", 0, MAX_POSITION, f"a position of {{}} in a chain: expected 0 to {MAX_POSITION}")
_PIN: Final = Bound("pin_s", 0, MAX_PIN_S, f"a pin of {{}} s: expected 0 to {MAX_PIN_S:g} s")
_RELEASED: Final = Bound("count", 0, (1 << 63) - 1, "a RELEASE of {} blocks: expected 0 or more, below 2**63")
_AFTER: Final = Bound("after", 0, (1 << 63) - 1, "connections after number {}: expected 0 or more, below 2**63")
_PROMISE: Final = Bound("ttl_ms", 1, MAX_PROMISE_MS, f"a promise for {{}} ms: expected 1 to {MAX_PROMISE_MS} ms")


def _check_bounds(request: Request, bounds: Sequence[Bound]) -> None:
    for field, least, most, text in bounds:
        value = getattr(request, field)
        if not least <= value <= most:
            raise WireError(ErrorCode.LIMIT, text.format(value))


def _check_keyed(request: KeyedRequest) -> None:
    if not MIN_KEY_BYTES <= request.key_bytes <= MAX_KEY_BYTES:
        raise WireError(
            ErrorCode.KEY_SIZE,
            f"keys of {request.key_bytes} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}",
        )
    _check_bounds(request, (_COUNT, _DEADLINE))


def _check_set(request: Set) -> None:
    for name, key in (("parent", request.parent), ("end", request.end)):
        if len(key) not in (0, request.key_bytes):
            raise WireError(
                ErrorCode.KEY_SIZE,
                f"{name} is a key of {len(key)} bytes: expected {request.key_bytes} like the other keys, or none",
            )
    if not 0 <= request.call < 1 << 63 or len(request.offsets) not in (0, 4 * request.count):
        raise WireError(
            ErrorCode.PROTOCOL,
            f"{len(request.offsets)} bytes of offsets for {request.count} keys in call {request.call}: expected 0 or "
            f"{4 * request.count} bytes, and a call number from 0 to 2**63-1",
        )
    if request.attributes:
        expected = request.count * (ATTRIBUTES_BYTES + request.key_bytes)
        if request.count > MAX_FRAME_BLOCKS or len(request.attributes) != expected:
            raise WireError(
                ErrorCode.PROTOCOL,
                f"{len(request.attributes)} bytes of attributes for {request.count} blocks: expected {expected} bytes, "
                f"and at most {MAX_FRAME_BLOCKS} blocks",
            )
    excluded = request.force or request.chained or request.attributes
    if not 0 <= request.reads <= MAX_READS or (request.reads and excluded):
        raise WireError(
            ErrorCode.PROTOCOL,
            f"a SET for {request.reads} reads: expected 0 to {MAX_READS}, but 0 with force, chained or attributes",
        )


def _check_get(request: Get) -> None:
    if not 0 <= request.wait_ms <= request.deadline_ms:
        raise WireError(
            ErrorCode.LIMIT, f"a wait of {request.wait_ms} ms: expected 0 to {request.deadline_ms} ms, the deadline"
        )
    if request.credit < 0:
        raise WireError(ErrorCode.PROTOCOL, f"a credit of {request.credit} bytes: expected 0 or more")
    if request.credit and request.references:
        raise WireError(
            ErrorCode.PROTOCOL,
            f"a GET by references with a credit of {request.credit} bytes: expected 0, because RELEASE grants more",
        )


def _check_hottest(request: Hottest) -> None:
    if not (0 <= request.skip < 1 << 63 and 0 <= request.limit < 1 << 63):
        raise WireError(
            ErrorCode.LIMIT,
            f"a limit of {request.limit} keys after {request.skip} skipped ones: expected 0 or more for both, and "
            "below 2**63",
        )


def _check_share(request: Share) -> None:
    if not (0 <= request.number < 1 << 63 and 0 < request.nbytes < 1 << 63):
        raise WireError(
            ErrorCode.LIMIT,
            f"SHARE of file {request.number} of {request.nbytes} bytes: expected a file number of 0 or more and a size "
            "of 1 byte or more, both below 2**63",
        )


def _check_configure(request: Configure) -> None:
    for what, text in (("name", request.name), ("value", request.value)):
        if len(text) > MAX_SETTING_CHARACTERS:
            raise WireError(
                ErrorCode.SETTING,
                f"the {what} of a setting has {len(text)} characters: expected at most {MAX_SETTING_CHARACTERS}",
            )


VERBS: Final = table(
    Verb(Hello, ANYBODY, (_REPLICAS, _GENERATION), large=True),
    Verb(Set, WRITE, (_PRIORITY, _TTL, _POSITION, _GENERATION), _check_set, timed=True, disk=True),
    Verb(Get, READ, (), _check_get, timed=True, disk=True),
    Verb(Contains, READ, (_PIN,), timed=True),
    Verb(MatchPrefix, READ, (_PIN,), timed=True),
    Verb(Delete, DELETE, timed=True, disk=True),
    Verb(Sync, LOGGED_IN),
    Verb(Info, ADMIN | MONITOR, large=True),
    Verb(Ping, ANYBODY),
    Verb(Credit, ANYBODY),  # like CANCEL and RELEASE, it concerns a GET of the same connection
    Verb(Cancel, ANYBODY),
    Verb(Scrub, ADMIN),
    Verb(Hottest, ADMIN, (_DEADLINE,), _check_hottest, namespace=True, place=True, large=True),
    Verb(Purge, ADMIN, (_DEADLINE, _GENERATION), place=True),
    Verb(Release, ANYBODY, (_RELEASED,)),
    Verb(Share, WRITE, (), _check_share),
    Verb(MakePromise, WRITE, (_PROMISE,), timed=True, name="promise"),
    Verb(Withdraw, WRITE, timed=True),
    Verb(Expire, WRITE, (_TTL,), timed=True),
    Verb(Raise, READ | WRITE | ADMIN, (_GENERATION,), namespace=True),
    Verb(Noted, LOGGED_IN, (_GENERATION,)),
    Verb(Clients, ADMIN | MONITOR, (_AFTER,), large=True),
    Verb(Slowlog, ADMIN | MONITOR, large=True),
    Verb(Configure, ADMIN, (_DEADLINE,), _check_configure, large=True),
)
"""The row of each request."""

# ---- codec -----------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(reduce(or_, VERBS))
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(reduce(or_, Reply.__subclasses__()))

encode = _encoder.encode


def decode_request(header: bytes | bytearray | memoryview) -> Request:
    """Return the request in a header frame. Raises `WireError` when it is malformed or exceeds the protocol's
    limits."""
    try:
        request = _request_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            ErrorCode.PROTOCOL,
            f"the header is not a request of protocol {PROTOCOL_VERSION}: {error}",
            _request_id(header),
        ) from None
    if not 0 <= request.id < 1 << 63:
        raise WireError(ErrorCode.PROTOCOL, f"request id {request.id} is outside 0 .. 2**63-1")
    verb = VERBS[type(request)]
    try:
        if isinstance(request, KeyedRequest):
            _check_keyed(request)
        _check_bounds(request, verb.bounds)
        if verb.check is not None:
            verb.check(request)
    except WireError as error:
        error.request_id = request.id
        raise
    return request


def agreed_protocol(hello: Hello) -> int:
    """Return the highest version that both the sender of a HELLO and this release speak. Raises `WireError` if there is
    none."""
    newest = min(max(hello.protocol, hello.newest), PROTOCOL_VERSION)
    if newest < max(hello.protocol, OLDEST_PROTOCOL):
        theirs = _versions(hello.protocol, max(hello.protocol, hello.newest))
        ours = _versions(OLDEST_PROTOCOL, PROTOCOL_VERSION)
        raise WireError(
            ErrorCode.VERSION,
            f"the client speaks {theirs} of the protocol: this server speaks {ours}; "
            f"upgrade the {'server' if hello.protocol > PROTOCOL_VERSION else 'client'}",
            hello.id,
        )
    return newest


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def _request_id(header: bytes | bytearray | memoryview) -> int:
    """Return the id in a malformed header, so that the sender learns which request failed. Return 0 if the id cannot be
    read."""
    try:
        fields = msgspec.msgpack.decode(header, type=list[msgspec.Raw])
        value = msgspec.msgpack.decode(fields[1], type=int)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError):
        return 0
    return value if 0 <= value < 1 << 63 else 0


def decode_reply(header: bytes | bytearray | memoryview) -> Reply:
    """Return the reply in a header frame. Raises `WireError` when the frame is not a reply."""
    try:
        return _reply_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            ErrorCode.PROTOCOL, f"the header is not a reply of protocol {PROTOCOL_VERSION}: {error}"
        ) from None
